# SPDX-License-Identifier: Apache-2.0

"""How a layer's copies travel and where they stay, as the flags say."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_fssdp.collectives.lanes import make_lane
from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.experts.gradients import GradientSums
from megatron_fssdp.experts.materialize import Materializer
from megatron_fssdp.experts.placement import Scheduler
from megatron_fssdp.experts.replicas import ReplicaPool, Transport
from megatron_fssdp.integration.state import LayerState
from megatron_fssdp.planning.cost import cheapest_schedule
from megatron_fssdp.planning.schedule import Schedule


def make_materializer(
    layer: LayerState,
    config: FSSDPConfig,
    num_microbatches: Callable[[], int] | None,
    device: torch.device,
) -> Materializer:
    """Return what fills a layer's slots.

    Args:
        layer: whose.
        config: the `--fssdp-*` settings.
        num_microbatches: how many an iteration has; None: not known.
        device: where the layer computes.
    """
    shared = layer.shared
    if shared.transport is None:
        assert shared.copy_group is not None, "a layer that is only watched copies nothing"
        lane = make_lane(device, overlap=config.fssdp_overlap == "on")
        shared.transport = Transport(shared.copy_group, lane)
    pool = ReplicaPool(config.fssdp_num_replica_slots)
    if config.fssdp_rematerialize and layer.shape is not None:
        pool = shared.pools.setdefault(layer.shape, pool)
    sends_once = not (config.fssdp_rematerialize or config.fssdp_calibration)
    return Materializer(
        shared.transport,
        pool,
        layer.name,
        GradientSums(
            in_fp32=config.fssdp_grad_dtype == "fp32",
            num_backwards=num_microbatches if sends_once else None,
        ),
    )


def make_scheduler(layer: LayerState, config: FSSDPConfig) -> Scheduler:
    """Return what makes the messages of a layer's copies."""
    topology, shape = layer.shared.topology, layer.shape
    if config.fssdp_collectives == "flat" or shape is None:
        return Schedule.flat
    if config.fssdp_collectives == "tree":
        return lambda plan, present: Schedule.tree(plan, topology.node_of_rank, present)
    return lambda plan, present: cheapest_schedule(plan, topology, shape.expert_bytes, present)

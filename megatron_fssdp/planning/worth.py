# SPDX-License-Identifier: Apache-2.0

"""What new owners are worth: seconds that they save in every iteration."""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.cost import (
    ComputeRate,
    Copying,
    LayerShape,
    mean_rows,
    saved_s,
    schedule_s,
    with_paying_spares,
)
from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.planner import PlanSettings, plan_each
from megatron_fssdp.planning.quotas import balance
from megatron_fssdp.planning.schedule import Schedule
from megatron_fssdp.planning.topology import Topology


def saved_by_owners(
    load_LE: Int64Array,
    old_LE: Int64Array,
    new_LE: Int64Array,
    topology: Topology,
    settings: PlanSettings,
    shape: LayerShape,
    rate: ComputeRate,
    copying: Copying | None = None,
) -> float:
    """Estimate the seconds by which new owners shorten an iteration of all layers.

    It counts the fullest rank's tokens and the replicas' copies, both planned anew for either
    owners; not how many tokens leave their node, for who sends them is not known here.

    Args:
        load_LE: (L, E) int64, the predicted tokens of a micro-batch.
        old_LE: (L, E) int64, the owners now.
        new_LE: (L, E) int64, the owners to come.
        topology: the ranks, their nodes and links.
        settings: of the planner, before `cost.with_paying_spares`.
        shape: sizes of a layer.
        rate: of a rank.
        copying: the micro-batches of an iteration, each of `load_LE` tokens, and how often
            replicas travel; None: one.
    """
    nodes, num_ranks = topology.node_of_rank, topology.num_ranks
    copying = copying or Copying()
    settings_L = [
        with_paying_spares(settings, topology, shape, rate, copying, mean_rows(load_E, num_ranks))
        for load_E in load_LE
    ]
    old, new = (plan_each(load_LE, each_LE, topology, settings_L) for each_LE in (old_LE, new_LE))
    seconds = 0.0
    for load_E, before, after in zip(load_LE, old, new, strict=True):
        counts_RE = np.tile(load_E // num_ranks, (num_ranks, 1))
        quotas = [balance(counts_RE, plan, nodes) for plan in (before, after)]
        layer_s = saved_s(quotas[0], before, quotas[1], after, topology, shape, rate)
        seconds += copying.num_microbatches * layer_s
        for plan, sign in ((before, 1), (after, -1)):
            seconds += sign * _copies_s(Schedule.tree(plan, nodes), topology, shape, copying)
    return seconds


def _copies_s(schedule: Schedule, topology: Topology, shape: LayerShape, copying: Copying) -> float:
    """Seconds that a layer's replicas travel in an iteration, each trip by itself."""
    there_s = schedule_s(schedule, topology, shape.expert_bytes)
    back_s = schedule_s(schedule, topology, shape.num_params * shape.grad_bytes)
    return copying.num_microbatches * (copying.fetches * there_s + copying.returns * back_s)

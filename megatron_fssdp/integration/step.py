# SPDX-License-Identifier: Apache-2.0

"""One layer's plan, ready for the device and for this rank, and its improvement after the gate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.experts.placement import Placement, Scheduler
from megatron_fssdp.experts.quotas import DeviceTables, send_array, split_tokens
from megatron_fssdp.integration.records import Calibration
from megatron_fssdp.planning.calibration import calibrate_layer
from megatron_fssdp.planning.cost import ComputeRate, LayerShape, saved_s, schedule_s
from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.planner import PlanSettings
from megatron_fssdp.planning.quotas import Messages, balance, messages_of, rank_loads
from megatron_fssdp.planning.topology import Topology


@dataclass(frozen=True, eq=False)
class Split:
    """What the quotas of a forward say.

    Attributes:
        split_EI: (E, I) int64 on the layer's device, this rank's tokens for each instance.
        loads_R: (R,) int64 where the counts are, the tokens that each rank computes.
        messages: what this rank sends and receives, on the host; None: only the device knows.
    """

    split_EI: torch.Tensor
    loads_R: torch.Tensor
    messages: Messages | None


@dataclass(frozen=True, eq=False)
class LayerStep:
    """What one layer's forwards need during one iteration.

    Attributes:
        plan: the layer's plan.
        group: the expert-parallel group.
        topology: which node each of the group's ranks is on.
        device: where the layer computes.
        tolerance: how much fuller than the mean the fullest rank may be where that saves traffic.
        quotas: where they are made, "host" or "device".
        scheduler: makes the messages that fetch replicas.
    """

    plan: LayerPlan
    group: dist.ProcessGroup
    topology: Topology
    device: torch.device
    tolerance: float
    quotas: str
    scheduler: Scheduler

    @property
    def num_physical(self) -> int:
        """Slots of the whole group."""
        return self.plan.num_ranks * self.plan.num_slots

    @cached_property
    def placement(self) -> Placement:
        """The plan as this rank sees it."""
        return Placement(self.plan, self.group.rank(), self.scheduler)

    @cached_property
    def physical_EI(self) -> torch.Tensor:
        """(E, I) int64 on the device: each instance's physical expert, padded with 0."""
        physical_EI = np.maximum(self.plan.instance_physical_EI, 0)
        return torch.from_numpy(physical_EI).to(self.device, non_blocking=True)

    @cached_property
    def _tables(self) -> DeviceTables:
        return DeviceTables.build(self.plan, self.topology.node_of_rank, self.device)

    def split(self, counts_RE: torch.Tensor) -> Split:
        """Choose the quotas for true counts.

        Args:
            counts_RE: (R, E) int64, tokens that each rank routes to each expert; with quotas
                "host" on the host, else on the device.
        """
        rank = self.group.rank()
        if self.quotas == "device":
            return Split(*split_tokens(counts_RE, self._tables, rank, self.tolerance), None)
        counts, nodes = counts_RE.numpy(), self.topology.node_of_rank
        quota_EI = balance(counts, self.plan, nodes, self.tolerance)
        messages = messages_of(counts, quota_EI, self.plan, nodes, rank)
        # First what the device waits for.
        split_EI = send_array(messages.split_EI, self.device)
        return Split(split_EI, torch.from_numpy(rank_loads(quota_EI, self.plan)), messages)


def calibrate_step(
    step: LayerStep,
    counts_RE: Int64Array,
    settings: PlanSettings,
    shape: LayerShape,
    rate: ComputeRate,
) -> tuple[LayerStep, Calibration] | None:
    """Add the replicas that a layer lacks for its true counts, if they pay (section 4.2).

    Args:
        step: what was planned from predicted loads.
        counts_RE: (R, E) int64, the true counts.
        settings: slots and tolerance.
        shape: the layer's sizes.
        rate: of a rank.

    Returns:
        The better step and what it brings; None if fetching it would take longer than it saves.
    """
    nodes = step.topology.node_of_rank
    plan, num_new = calibrate_layer(counts_RE, step.plan, nodes, settings)
    if not num_new:
        return None
    extra_s = schedule_s(step.scheduler(plan, step.plan), step.topology, shape.expert_bytes)
    old_EI, new_EI = (balance(counts_RE, each, nodes, step.tolerance) for each in (step.plan, plan))
    gain_s = saved_s(old_EI, step.plan, new_EI, plan, step.topology, shape, rate)
    if gain_s <= extra_s:
        return None
    calibration = Calibration(num_new=num_new, saved_s=gain_s, extra_s=extra_s)
    return replace(step, plan=plan), calibration

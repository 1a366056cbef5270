# SPDX-License-Identifier: Apache-2.0

"""What an iteration did: loads, plans, bytes and seconds, for whoever reports them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_fssdp.collectives.lanes import Meter
from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One direction of a layer's copies: parameters there (spAG) or gradients back (spRS).

    Attributes:
        near_bytes, far_bytes: sent inside nodes, and between them, by all ranks of the
            expert-parallel group (and its expert-tensor-parallel peers) together.
        total_s: seconds that this rank's collectives took.
        exposed_s: seconds that this rank's computation waited for them.
    """

    near_bytes: int = 0
    far_bytes: int = 0
    total_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def num_bytes(self) -> int:
        """All bytes."""
        return self.near_bytes + self.far_bytes

    @classmethod
    def of(
        cls,
        ran: Sequence[tuple[Schedule, int]],
        meter: Meter,
        node_of_rank: Sequence[int],
        num_senders: int = 1,
    ) -> Traffic:
        """Sum what ran: schedules, and the bytes of each of their messages.

        Args:
            ran: schedules, with the bytes of a message.
            meter: what they took.
            node_of_rank: (R,) the node of each rank.
            num_senders: groups that ran the same, with messages of the same size.
        """
        total_s, exposed_s = meter.read()
        far = num_senders * sum(schedule.num_far(node_of_rank) * size for schedule, size in ran)
        every = num_senders * sum(len(schedule.copies) * size for schedule, size in ran)
        return cls(near_bytes=every - far, far_bytes=far, total_s=total_s, exposed_s=exposed_s)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            near_bytes=self.near_bytes + other.near_bytes,
            far_bytes=self.far_bytes + other.far_bytes,
            total_s=self.total_s + other.total_s,
            exposed_s=self.exposed_s + other.exposed_s,
        )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Replicas that were added when the gate had decided.

    Attributes:
        num_new: how many.
        saved_s, extra_s: modelled seconds that they save, and that fetching them takes.
    """

    num_new: int
    saved_s: float
    extra_s: float


@dataclass(frozen=True, eq=False)
class IterationRecord:
    """What one iteration routed and what became of it. L layers in the order of construction.

    Attributes:
        iteration: iterations that this process had begun before it.
        counts_LRE: int64, tokens by layer, source rank and expert, all micro-batches; with expert
            tensor parallelism, those of all ranks that share the source's experts.
        loads_LR: int64, tokens that each rank computed.
        plans: the layers' plans.
        gathers: the parameters that went to replicas, by layer.
        reductions: the gradients that came back, by layer.
        replica_bytes: memory that this rank has taken for replicas and their gradients.
        plan_s: seconds that this rank took to plan this iteration.
        calibrations: plans that were improved for true counts.
    """

    iteration: int
    counts_LRE: list[Int64Array]
    loads_LR: list[Int64Array]
    plans: list[LayerPlan]
    gathers: list[Traffic] = field(default_factory=list)
    reductions: list[Traffic] = field(default_factory=list)
    replica_bytes: int = 0
    plan_s: float = 0.0
    calibrations: list[Calibration] = field(default_factory=list)

    @property
    def num_replicas(self) -> int:
        """Replicas of all layers."""
        return sum(plan.num_replicas for plan in self.plans)

    @property
    def traffic(self) -> Traffic:
        """All copies of all layers, both directions."""
        return sum([*self.gathers, *self.reductions], Traffic())

    def imbalance(self) -> tuple[list[float], list[float]]:
        """Tokens of the fullest rank over the mean, by layer: owners only, and as it ran."""
        before, after = [], []
        for counts_RE, loads_R, plan in zip(
            self.counts_LRE, self.loads_LR, self.plans, strict=True
        ):
            owned_R = np.bincount(
                plan.owner_E, weights=counts_RE.sum(axis=0), minlength=plan.num_ranks
            )
            # A layer that routed nothing is balanced.
            mean = max(owned_R.mean(), 1e-9)
            before.append(float(owned_R.max() / mean) if owned_R.any() else 1.0)
            after.append(float(loads_R.max() / mean) if owned_R.any() else 1.0)
        return before, after

# SPDX-License-Identifier: Apache-2.0

"""A layer's plan as the sends and receives of each rank: pure arithmetic, no communication."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.plan import EMPTY, LayerPlan


@dataclass(frozen=True)
class Copy:
    """One replica's way: an expert's parameters go owner -> replica, its gradient comes back.

    Attributes:
        expert: the expert's id in its layer.
        owner: rank that owns the expert; `owner_slot` is its slot there.
        replica: rank that holds the replica; `replica_slot` is its slot there.
    """

    expert: int
    owner: int
    owner_slot: int
    replica: int
    replica_slot: int


@dataclass(frozen=True)
class Schedule:
    """All copies of one layer, ordered by (expert, replica rank): the same on every rank.

    Two ranks meet their common messages in this order, so messages need no tags, and gradients
    are summed in this order, so a run repeats bit for bit.
    """

    copies: tuple[Copy, ...]

    @classmethod
    def from_plan(cls, plan: LayerPlan) -> Schedule:
        """List the copies that turn the owners' placement into the plan's."""
        rank, slot = np.nonzero(plan.slot_expert_RS != EMPTY)
        expert = plan.slot_expert_RS[rank, slot]
        owner_slot_E = np.empty(plan.num_experts, dtype=np.int64)
        is_owned = plan.owner_E[expert] == rank
        owner_slot_E[expert[is_owned]] = slot[is_owned]
        replicas = sorted(
            zip(
                expert[~is_owned].tolist(),
                rank[~is_owned].tolist(),
                slot[~is_owned].tolist(),
                strict=True,
            )
        )
        return cls(
            tuple(Copy(e, int(plan.owner_E[e]), int(owner_slot_E[e]), r, s) for e, r, s in replicas)
        )

    @cached_property
    def max_sends(self) -> int:
        """Copies that the busiest owner sends."""
        owners = [copy.owner for copy in self.copies]
        return max((owners.count(owner) for owner in set(owners)), default=0)

    def sends_of(self, rank: int) -> list[Copy]:
        """Return the copies whose owner is `rank`."""
        return [copy for copy in self.copies if copy.owner == rank]

    def receives_of(self, rank: int) -> list[Copy]:
        """Return the copies whose replica is on `rank`."""
        return [copy for copy in self.copies if copy.replica == rank]

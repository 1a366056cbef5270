# SPDX-License-Identifier: Apache-2.0

"""What the baselines share: their interface, and the way from placements to a `LayerPlan`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from megatron_fssdp.planning.plan import Int64Array, LayerPlan, build_slots
from megatron_fssdp.planning.topology import Topology


class Baseline(Protocol):
    """A planner of another system, for one layer."""

    def __call__(
        self, load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int
    ) -> LayerPlan:
        """Plan a layer.

        Args:
            load_E: (E,) int64 tokens of each expert.
            owner_E: (E,) int64, where each expert is at home.
            topology: the ranks and their nodes.
            num_slots: slots of a rank beyond E / R.

        Returns:
            The placement. Planners that move experts name another owner than `owner_E`.
        """


def with_replicas(
    owner_E: Int64Array, replicas: Iterable[tuple[int, int]], num_ranks: int, num_slots: int
) -> LayerPlan:
    """Build a plan from owners and (expert, rank) replicas; repetitions count once."""
    unique = dict.fromkeys(
        (expert, rank) for expert, rank in replicas if int(owner_E[expert]) != rank
    )
    rows = np.array([(0, expert, rank) for expert, rank in unique], dtype=np.int64)
    slots_LRS = build_slots(owner_E[None], rows.reshape(-1, 3), num_ranks, num_slots)
    return LayerPlan(owner_E=owner_E, slot_expert_RS=slots_LRS[0])


def from_slots(physical_RS: list[list[int]], owner_E: Int64Array) -> LayerPlan:
    """Build a plan from the experts in each rank's slots.

    An expert stays at home if it has a slot there, else the first rank that holds it owns it.
    Two copies of one expert on a rank are one instance.
    """
    num_ranks = len(physical_RS)
    new_owner_E = np.full(len(owner_E), -1, dtype=np.int64)
    for rank, experts in enumerate(physical_RS):
        for expert in experts:
            if owner_E[expert] == rank or new_owner_E[expert] < 0:
                new_owner_E[expert] = rank
    pairs = [(expert, rank) for rank, experts in enumerate(physical_RS) for expert in experts]
    return with_replicas(new_owner_E, pairs, num_ranks, num_slots=max(map(len, physical_RS)))

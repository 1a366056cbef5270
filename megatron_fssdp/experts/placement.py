# SPDX-License-Identifier: Apache-2.0

"""A layer's plan as one rank sees it: what its slots hold, what it sends and receives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from megatron_fssdp.planning.plan import EMPTY, LayerPlan
from megatron_fssdp.planning.schedule import Schedule

# From a placement, and one whose replicas are there already, to the messages that are missing.
Scheduler = Callable[[LayerPlan, LayerPlan | None], Schedule]


@dataclass(frozen=True, eq=False)
class Placement:
    """What the slots of one rank hold during one or more forwards of a layer.

    Attributes:
        plan: the layer's plan, equal on all ranks.
        rank: this rank, in the expert-parallel group.
        scheduler: makes the messages; the same on all ranks.
    """

    plan: LayerPlan
    rank: int
    scheduler: Scheduler = Schedule.flat

    @property
    def num_slots(self) -> int:
        """Slots of this rank."""
        return self.plan.num_slots

    @cached_property
    def schedule(self) -> Schedule:
        """All messages that make the plan's replicas."""
        return self.scheduler(self.plan, None)

    @cached_property
    def _filled(self) -> list[tuple[int, int, bool]]:
        """(slot, expert, whether this rank owns it)."""
        slots = enumerate(self.plan.slot_expert_RS[self.rank].tolist())
        owner_E = self.plan.owner_E.tolist()
        return [(s, e, owner_E[e] == self.rank) for s, e in slots if e != EMPTY]

    @cached_property
    def owned_slots(self) -> tuple[int, ...]:
        """The slots of the owned experts, ascending."""
        return tuple(slot for slot, _, is_owned in self._filled if is_owned)

    @cached_property
    def replica_of_slot(self) -> dict[int, int]:
        """The expert in each slot that holds a replica, slots ascending."""
        slots = enumerate(self.plan.slot_expert_RS[self.rank].tolist())
        owner_E = self.plan.owner_E
        return {
            s: expert for s, expert in slots if expert != EMPTY and owner_E[expert] != self.rank
        }

    @cached_property
    def sent_slots(self) -> tuple[int, ...]:
        """Owned slots that are replicated somewhere, ascending."""
        slots = {copy.sender_slot for copy in self.schedule.copies if copy.sender == self.rank}
        return tuple(sorted(slots.intersection(self.owned_slots)))

# SPDX-License-Identifier: Apache-2.0

"""The plan: which expert every slot of every rank holds, for all MoE layers of a model chunk.

Shape letters, here and everywhere in `planning`:
    L MoE layers, R ranks of the expert-parallel group, E experts of a layer,
    S slots of a rank and layer, I instances of an expert (its owner's copy and its replicas),
    N instances of a whole layer in one flat list.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

EMPTY = -1


@dataclass(frozen=True, eq=False)
class Plan:
    """Where the instances of every expert are. Frozen; building it proves it.

    Example, 1 layer, 2 ranks, 4 experts, 1 replica slot: rank 1 gets a replica of expert 0.

        owner_LE         [[0, 0, 1, 1]]
        slot_expert_LRS  [[[0, 1, EMPTY], [2, 3, 0]]]

    Attributes:
        owner_LE: (L, E) int64, the rank that owns each expert's parameters and optimizer state.
        slot_expert_LRS: (L, R, S) int64, the expert in each slot; EMPTY (-1) where there is none.
            A rank holds an expert at most once, and every owner holds its own experts. In a row
            owned experts come first, in ascending order, then replicas, then empty slots.

    Raises:
        ValueError: if the arrays break one of these rules.
    """

    owner_LE: Int64Array
    slot_expert_LRS: Int64Array

    def __post_init__(self) -> None:
        for array in (self.owner_LE, self.slot_expert_LRS):
            array.setflags(write=False)
        num_layers, num_ranks, _ = self.slot_expert_LRS.shape
        num_experts = self.num_experts
        if self.owner_LE.shape != (num_layers, num_experts):
            raise ValueError(
                f"owner_LE has shape {self.owner_LE.shape}, "
                f"slot_expert_LRS {self.slot_expert_LRS.shape}: they differ in L"
            )
        if num_experts and not (self.owner_LE.min() >= 0 and self.owner_LE.max() < num_ranks):
            raise ValueError(f"owner_LE names a rank outside 0..{num_ranks - 1}")
        if self.slot_expert_LRS.size:
            if self.slot_expert_LRS.min() < EMPTY or self.slot_expert_LRS.max() >= num_experts:
                raise ValueError(
                    f"slot_expert_LRS names an expert outside {EMPTY}..{num_experts - 1}"
                )
            self._check_rows()
        elif self.owner_LE.size:
            raise ValueError("there are experts but no slots")

    def _check_rows(self) -> None:
        """Prove the order in a row, and with it that owners hold their experts, and once only.

        In a row the key below rises where slots are in order: owned experts by number, then
        replicas, then empty slots. (L, R, S) arrays only: an (L, R, E) one would cost more than
        planning does.
        """
        num_layers, num_ranks, num_slots = self.slot_expert_LRS.shape
        num_experts = self.num_experts
        slot = self.slot_expert_LRS.reshape(num_layers, -1)
        # EMPTY, as an index, reads the number before: `filled` removes that again.
        start_L1 = np.arange(num_layers)[:, None] * num_experts
        owner = self.owner_LE.take(start_L1 + slot) if num_experts else slot
        filled = slot != EMPTY
        owned = (owner == np.repeat(np.arange(num_ranks), num_slots)) & filled
        if np.count_nonzero(owned) < self.owner_LE.size:
            raise ValueError("an owner does not hold its own expert")
        ordered = np.sort(self.slot_expert_LRS, axis=2)
        if ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != EMPTY)).any():
            raise ValueError("a rank holds the same expert in two slots of one layer")
        key = np.where(owned, slot, np.where(filled, num_experts, num_experts + 1))
        key_LRS = key.reshape(self.slot_expert_LRS.shape)
        if (key_LRS[:, :, 1:] < key_LRS[:, :, :-1]).any():
            raise ValueError(
                "the slots of a rank are out of order: owned experts ascending, replicas, EMPTY"
            )

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.slot_expert_LRS.shape[0])

    @property
    def num_ranks(self) -> int:
        """R."""
        return int(self.slot_expert_LRS.shape[1])

    @property
    def num_slots(self) -> int:
        """S."""
        return int(self.slot_expert_LRS.shape[2])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.owner_LE.shape[1])

    @cached_property
    def num_replicas_L(self) -> Int64Array:
        """(L,) int64, instances beyond the owners' own, of each layer."""
        filled_L: Int64Array = (self.slot_expert_LRS != EMPTY).sum(axis=(1, 2), dtype=np.int64)
        return filled_L - self.num_experts

    @cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """Each layer's part of the plan; made once, so that their tables are made once."""
        return tuple(
            LayerPlan(owner_E=owner_E, slot_expert_RS=slot_expert_RS)
            for owner_E, slot_expert_RS in zip(self.owner_LE, self.slot_expert_LRS, strict=True)
        )

    def layer(self, index: int) -> LayerPlan:
        """Return one layer's part of the plan."""
        return self.layers[index]


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One layer of a `Plan`, with its instances as tables that vectorised code can index.

    An expert's instances are numbered owner first, then its replicas by ascending rank. A
    physical expert is a slot of the whole group: slot s of rank r is number r * S + s, the order
    in which Megatron's token dispatchers lay experts out.

    Attributes:
        owner_E: (E,) int64.
        slot_expert_RS: (R, S) int64, EMPTY where a slot holds nothing.
    """

    owner_E: Int64Array
    slot_expert_RS: Int64Array

    def with_slots(self, num_slots: int) -> LayerPlan:
        """Return the plan with `num_slots` a rank; the slots that go must be empty.

        Raises:
            ValueError: if one of them holds an expert.
        """
        if (self.slot_expert_RS[:, num_slots:] != EMPTY).any():
            raise ValueError(f"{num_slots} slots do not hold what the plan has in {self.num_slots}")
        return LayerPlan(self.owner_E, self.slot_expert_RS[:, :num_slots])

    @property
    def num_ranks(self) -> int:
        """R."""
        return int(self.slot_expert_RS.shape[0])

    @property
    def num_slots(self) -> int:
        """S."""
        return int(self.slot_expert_RS.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.owner_E.shape[0])

    @cached_property
    def _instances(self) -> tuple[Int64Array, Int64Array]:
        physical = np.flatnonzero(self.slot_expert_RS != EMPTY)
        expert = self.slot_expert_RS.ravel()[physical]
        rank = physical // max(self.num_slots, 1)
        # Owner first, then ascending rank: slots are already listed by ascending rank.
        order = np.argsort(expert * 2 + (rank != self.owner_E[expert]), kind="stable")
        expert, rank, physical = expert[order], rank[order], physical[order]
        count_E = np.bincount(expert, minlength=self.num_experts)
        position = np.arange(len(expert)) - np.repeat(np.cumsum(count_E) - count_E, count_E)
        rank_EI = np.full((self.num_experts, int(count_E.max(initial=1))), EMPTY, dtype=np.int64)
        physical_EI = rank_EI.copy()
        rank_EI[expert, position] = rank
        physical_EI[expert, position] = physical
        rank_EI.setflags(write=False)
        physical_EI.setflags(write=False)
        return rank_EI, physical_EI

    @property
    def instance_rank_EI(self) -> Int64Array:
        """(E, I) int64, the rank of each instance, padded with EMPTY; column 0 is the owner."""
        return self._instances[0]

    @property
    def instance_physical_EI(self) -> Int64Array:
        """(E, I) int64, each instance's physical expert, padded with EMPTY."""
        return self._instances[1]

    @cached_property
    def derived(self) -> dict[Hashable, Any]:
        """Tables that other modules derive from this plan, kept with it."""
        return {}

    @cached_property
    def num_replicas(self) -> int:
        """Instances beyond the owners' own."""
        return int(np.count_nonzero(self.slot_expert_RS != EMPTY)) - self.num_experts


def build_slots(
    owner_LE: Int64Array,
    replicas_N3: Int64Array,
    num_ranks: int,
    num_replica_slots: int,
) -> Int64Array:
    """Lay owned experts and replicas out in slots.

    Args:
        owner_LE: (L, E) int64.
        replicas_N3: (N, 3) int64, layer, expert and rank of each replica. A rank's replicas keep
            this order: planners list those that carry most first.
        num_ranks: R.
        num_replica_slots: slots of a rank and layer for replicas. S is this plus the most experts
            that one rank owns in one layer.

    Returns:
        (L, R, S) int64: owned experts ascending, replicas, EMPTY.
    """
    num_layers, num_experts = owner_LE.shape
    num_rows = num_layers * num_ranks
    # Most layers share one sharding: K is 1 then, and L otherwise.
    owner_KE = owner_LE[:1] if (owner_LE == owner_LE[:1]).all() else owner_LE
    owned_row = (np.arange(len(owner_KE))[:, None] * num_ranks + owner_KE).ravel()
    expert = np.tile(np.arange(num_experts), len(owner_KE))
    order, place, owned_count = _places(owned_row, len(owner_KE) * num_ranks)
    num_slots = int(owned_count.max(initial=0)) + num_replica_slots
    owned = np.full((len(owner_KE) * num_ranks, num_slots), EMPTY)
    owned[owned_row[order], place] = expert[order]
    times = num_layers // max(len(owner_KE), 1)
    slots = np.tile(owned, (times, 1))
    row = replicas_N3[:, 0] * num_ranks + replicas_N3[:, 2]
    order, place, _ = _places(row, num_rows)
    row = row[order]
    slots[row, np.tile(owned_count, times)[row] + place] = replicas_N3[order, 1]
    return slots.reshape(num_layers, num_ranks, num_slots)


def _places(row: Int64Array, num_rows: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the stable order by row, each one's place in its row, and the size of each row."""
    order = np.argsort(row, kind="stable")
    count = np.bincount(row, minlength=num_rows)
    place = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    return order, place, count

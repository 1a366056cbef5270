# SPDX-License-Identifier: Apache-2.0

"""Moves: experts' parameters and optimizer state on their way to new owners, round by round.

A rank has as many homes as it owns experts. When owners change, an expert arrives in the home that
another leaves in the same round, so a rank needs room for one expert in flight, and no more.

Every rank sends as often as it receives. Let it send to itself for the rest, until all ranks send
equally often, D times, where D is the most that any rank has to send. By Koenig's theorem the moves
then fall into D rounds in each of which every rank sends once and receives once. Such a round is a
permutation of the ranks: disjoint cycles, and the ranks that send to themselves rest. So the rounds
are always as few as they can be. (Swapping first is not: three ranks that swap pairwise take three
rounds, and two as cycles that run against each other.)

Shape letters beyond those of `plan`: H homes of a rank, V moves, D rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import Topology

NOBODY = -1


@dataclass(frozen=True, eq=False)
class Homes:
    """Where every expert's parameters and optimizer state live. Frozen; building it proves it.

    Each of the R ranks has H = L * E / R homes, numbered from 0, for experts of any layer. As
    every rank has a home at least, R is the highest owner plus one.

    Attributes:
        owner_LE: (L, E) int64, the rank that owns each expert.
        home_LE: (L, E) int64, the home on that rank in which the expert lives.

    Raises:
        ValueError: if ranks own different numbers of experts, or a home does not hold exactly one.
    """

    owner_LE: Int64Array
    home_LE: Int64Array

    def __post_init__(self) -> None:
        for array in (self.owner_LE, self.home_LE):
            array.setflags(write=False)
        if self.owner_LE.ndim != 2 or self.owner_LE.shape != self.home_LE.shape:
            raise ValueError(
                f"owner_LE has shape {self.owner_LE.shape}, home_LE {self.home_LE.shape}: "
                "both must be (layers, experts)"
            )
        if not self.owner_LE.size:
            raise ValueError(f"owner_LE has shape {self.owner_LE.shape}: there are no experts")
        # More ranks than experts cannot be even; they are refused before they are counted.
        _check_owners(self.owner_LE, min(self.num_ranks, self.owner_LE.size), self.num_homes)
        if self.home_LE.min() < 0 or self.home_LE.max() >= self.num_homes:
            raise ValueError(f"home_LE names a home outside 0..{self.num_homes - 1}")
        place_LE = self.owner_LE * self.num_homes + self.home_LE
        held = np.bincount(place_LE.ravel(), minlength=self.owner_LE.size)
        if (held != 1).any():
            place = int((held != 1).argmax())
            raise ValueError(
                f"home {place % self.num_homes} of rank {place // self.num_homes} holds "
                f"{held[place]} experts: every home must hold exactly one"
            )

    @classmethod
    def even(cls, num_layers: int, num_experts: int, num_ranks: int) -> Homes:
        """Return Megatron's own layout, homes by layer and then by expert.

        Expert e is owned by rank e // (E / R) and lives in home l * (E / R) + e % (E / R).

        Raises:
            ValueError: if E is not a multiple of R.
        """
        owner_LE = shard_evenly(num_layers, num_experts, num_ranks)
        owned = num_experts // num_ranks or 1
        home_LE = np.arange(num_layers)[:, None] * owned + np.arange(num_experts) % owned
        return cls(owner_LE, home_LE)

    @cached_property
    def num_ranks(self) -> int:
        """R."""
        return int(self.owner_LE.max()) + 1

    @property
    def num_homes(self) -> int:
        """H."""
        return self.owner_LE.size // max(self.num_ranks, 1)

    @cached_property
    def expert_RH2(self) -> Int64Array:
        """(R, H, 2) int64, the layer and the expert in each home."""
        expert_RH2 = np.empty((self.num_ranks, self.num_homes, 2), dtype=np.int64)
        expert_RH2[self.owner_LE, self.home_LE] = np.moveaxis(
            np.indices(self.owner_LE.shape), 0, -1
        )
        expert_RH2.setflags(write=False)
        return expert_RH2

    def expert_of(self, rank: int) -> Int64Array:
        """Return (H, 2) int64, the layer and the expert in each home of a rank."""
        expert_H2: Int64Array = self.expert_RH2[rank]
        return expert_H2

    def owned(self, layer: int, rank: int) -> list[tuple[int, int]]:
        """Return (expert, home) of each expert that a rank owns in a layer, experts ascending."""
        experts = np.flatnonzero(self.owner_LE[layer] == rank)
        return list(zip(experts.tolist(), self.home_LE[layer, experts].tolist(), strict=True))


class Move(NamedTuple):
    """One expert's parameters and optimizer state go to a new owner.

    Attributes:
        layer: the expert's layer; `expert` is its id there.
        source: rank that owned it; `source_home` is the home that it leaves.
        target: rank that owns it now; `target_home` is its home there.
    """

    layer: int
    expert: int
    source: int
    source_home: int
    target: int
    target_home: int


def plan_moves(
    homes: Homes, new_owner_LE: Int64Array
) -> tuple[Homes, tuple[tuple[Move, ...], ...]]:
    """Plan how experts reach their new owners.

    Example, one layer of two experts, which two ranks swap: one round of two moves.

        owners [[0, 1]] -> [[1, 0]]    ((Move(0, 0, 0, 0, 1, 0), Move(0, 1, 1, 0, 0, 0)),)

    Args:
        homes: where experts are.
        new_owner_LE: (L, E) int64, who owns them next; every rank H of them.

    Returns:
        The new homes, and the moves in rounds, those of a round by source. An expert whose owner
        stays keeps its home; every other moves once. In a round each rank sends at most one expert
        and receives at most one, into the home that its own leaves. There are as many rounds as
        the most experts that any rank sends: fewer cannot do.

    Raises:
        ValueError: if the new owners have another shape, name a rank outside 0..R-1 or give a rank
            another number of experts than H.
    """
    if new_owner_LE.shape != homes.owner_LE.shape:
        raise ValueError(
            f"the new owners have shape {new_owner_LE.shape}, the old {homes.owner_LE.shape}"
        )
    _check_owners(new_owner_LE, homes.num_ranks, homes.num_homes)
    new_owner_LE = new_owner_LE.astype(np.int64)
    layer_V, expert_V = np.nonzero(new_owner_LE != homes.owner_LE)
    source_V, target_V = homes.owner_LE[layer_V, expert_V], new_owner_LE[layer_V, expert_V]
    left_V = homes.home_LE[layer_V, expert_V]
    num_rounds = int(np.bincount(source_V, minlength=1).max())
    round_V = _rounds(source_V, target_V, homes.num_ranks, num_rounds)
    left_DR = np.full((num_rounds, homes.num_ranks), NOBODY)
    left_DR[round_V, source_V] = left_V
    taken_V = left_DR[round_V, target_V]
    home_LE = homes.home_LE.copy()
    home_LE[layer_V, expert_V] = taken_V
    move_V6 = np.stack((layer_V, expert_V, source_V, left_V, target_V, taken_V), axis=1)
    order_V = np.lexsort((source_V, round_V))
    rounds: list[list[Move]] = [[] for _ in range(num_rounds)]
    for at, move in zip(round_V[order_V].tolist(), move_V6[order_V].tolist(), strict=True):
        rounds[at].append(Move(*move))
    return Homes(new_owner_LE, home_LE), tuple(map(tuple, rounds))


def moved_bytes(rounds: tuple[tuple[Move, ...], ...], state_bytes: int) -> int:
    """Bytes that all moves send; `state_bytes` are one expert's parameters and optimizer state."""
    return sum(map(len, rounds)) * state_bytes


def moves_s(rounds: tuple[tuple[Move, ...], ...], topology: Topology, state_bytes: int) -> float:
    """Seconds that the rounds take one by one, each as long as the slowest link that it uses."""
    node = topology.node_of_rank
    near_s = topology.intra_node.time_s(state_bytes)
    far_s = topology.inter_node.time_s(state_bytes)
    seconds = 0.0
    for moves in rounds:
        seconds += max(near_s if node[m.source] == node[m.target] else far_s for m in moves)
    return seconds


def _check_owners(owner_LE: Int64Array, num_ranks: int, num_homes: int) -> None:
    """Prove that every rank owns as many experts as it has homes."""
    if owner_LE.min() < 0 or owner_LE.max() >= num_ranks:
        raise ValueError(f"the owners name a rank outside 0..{num_ranks - 1}")
    owned_R = np.bincount(owner_LE.ravel(), minlength=num_ranks)
    if (owned_R != num_homes).any() or num_ranks * num_homes != owner_LE.size:
        rank = int((owned_R != num_homes).argmax())
        raise ValueError(
            f"rank {rank} owns {owned_R[rank]} experts of all layers, but {owner_LE.size} experts "
            f"on {num_ranks} ranks must be {owner_LE.size / num_ranks:g} each"
        )


def _rounds(
    source_V: Int64Array, target_V: Int64Array, num_ranks: int, num_rounds: int
) -> Int64Array:
    """Return (V,) int64, the round of each move; `num_rounds` is the most that a rank sends."""
    rests_R = num_rounds - np.bincount(source_V, minlength=num_ranks)
    rests = np.repeat(np.arange(num_ranks), rests_R)
    source, target = np.concatenate([source_V, rests]), np.concatenate([target_V, rests])
    calendar = _Calendar(source.tolist(), target.tolist(), num_ranks, num_rounds)
    for move in range(len(source)):
        calendar.add(move)
    return np.array(calendar.round_of[: len(source_V)], dtype=np.int64)


class _Calendar:
    """Edge colouring of the bipartite graph of senders and receivers: the colours are rounds.

    A rank is a sender and, apart from that, a receiver; the two have own calendars. Sets of free
    rounds are bits of an int.
    """

    def __init__(
        self, source: list[int], target: list[int], num_ranks: int, num_rounds: int
    ) -> None:
        self.ends = (source, target)
        self.round_of = [NOBODY] * len(source)
        self.move_at = [[[NOBODY] * num_rounds for _ in range(num_ranks)] for _ in range(2)]
        self.free = [[(1 << num_rounds) - 1] * num_ranks for _ in range(2)]

    def add(self, move: int) -> None:
        """Give a move a round in which its source does not send and its target not receive.

        Both have free rounds, as none has more than D moves. If they share none, the target's
        other moves are put round: see `_exchange`.
        """
        source, target = self.ends[0][move], self.ends[1][move]
        common = self.free[0][source] & self.free[1][target]
        if common:
            self._put(move, _first(common))
            return
        wanted = _first(self.free[0][source])
        self._exchange(target, wanted, _first(self.free[1][target]))
        self._put(move, wanted)

    def _exchange(self, target: int, wanted: int, offered: int) -> None:
        """Free a round of a receiver, in exchange for one that is free.

        What it receives in `wanted` goes to `offered`; what that move's sender sends in `offered`
        goes to `wanted`, and so on. The chain ends, as no end of a move has two in one round. It
        comes to senders by moves in `wanted`, so a sender that is free then is not on it.
        """
        chain = []
        side, rank, at = 1, target, wanted
        while (move := self.move_at[side][rank][at]) != NOBODY:
            chain.append(move)
            side = 1 - side
            rank, at = self.ends[side][move], wanted + offered - at
        rounds = [self.round_of[move] for move in chain]
        for move in chain:
            self._take(move)
        for move, at in zip(chain, rounds, strict=True):
            self._put(move, wanted + offered - at)

    def _put(self, move: int, at: int) -> None:
        self.round_of[move] = at
        for side in range(2):
            rank = self.ends[side][move]
            self.move_at[side][rank][at] = move
            self.free[side][rank] ^= 1 << at

    def _take(self, move: int) -> None:
        at = self.round_of[move]
        for side in range(2):
            rank = self.ends[side][move]
            self.move_at[side][rank][at] = NOBODY
            self.free[side][rank] ^= 1 << at


def _first(rounds: int) -> int:
    """The lowest bit that is set."""
    return (rounds & -rounds).bit_length() - 1

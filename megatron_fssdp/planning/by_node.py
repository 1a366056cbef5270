# SPDX-License-Identifier: Apache-2.0

"""Replicas node by node: what keeps most tokens on its node, then what levels the node.

Each node chooses for its free slots by tokens. The first instance of an expert on a node keeps
the node's tokens for it there, which saves network; it must save more bytes than its weights cost
to cross the network. A further instance on a node that has the expert already costs no network and
saves none: it only levels the node's ranks, and is worth less per token (`LEVEL_WORTH`). Before
both come experts that their owner cannot keep: if no node takes them for their tokens, the owner's
node does. Where all nodes hold their hot experts, each has about its own tokens to compute, so that
levelling nodes one by one levels all ranks. It need not: the caller checks (`estimate`) and has
another way.

All layers at once, in whole-array steps: this is called for every layer of a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.arrays import descending, sum_by_owner
from megatron_fssdp.planning.node_slots import NodeSlots
from megatron_fssdp.planning.plan import EMPTY, Int64Array
from megatron_fssdp.planning.topology import Topology

BoolArray = npt.NDArray[np.bool_]

# What an instance is worth per token that it takes, in eighths: on a node that lacks the expert,
# and on one that has it. Measured on the benchmark's cells: 3 sends least and balances best.
FRESH_WORTH = 8
LEVEL_WORTH = 3
# A copy inside a node travels at least this many times faster than one between nodes.
NEAR_SPEED = 8
# More new instances of one expert on one node than this are not considered.
MOST_OF_ONE = 4
# Experts are looked for among the hottest: as many as a node has free slots, this many times those
# that are at home on it, and a few more.
REACH = 2
# An expert counts as replicated if it is among a node's replicas without the last one in this many,
# which may have to make room.
MARGIN = 4
# What an owner alone computes should be less than the mean by one part in this many: loads drift.
LIGHTER = 16


def place_by_node(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    topology: Topology,
    num_slots: int,
    least_tokens: int,
    target_L: Int64Array,
    levels_last: bool = False,
) -> NodeSlots:
    """Fill each node's free slots with what saves most there.

    Args:
        load_LE: (L, E) int64, the predicted tokens; their sources are taken to be even.
        owner_LE: (L, E) int64.
        topology: the ranks and their nodes.
        num_slots: replicas that each rank may get.
        least_tokens: tokens that a replica must keep on a node that lacked the expert.
        target_L: (L,) int64, tokens that a rank may have.
        levels_last: leave half of the slots, at most as many as levelling takes, until nodes and
            ranks have been levelled; otherwise instances that level compete with those that keep
            tokens near, and levelling gets what is left.

    Returns:
        The slots.
    """
    size_M = np.bincount(topology.node_R)
    room_M = size_M * num_slots
    ranked = _rank_by_worth(load_LE, owner_LE, topology, size_M, num_slots, least_tokens)
    first = ranked
    if levels_last:
        first = replace(ranked, is_taken_LMF=ranked.is_taken_LMF & ranked.is_fresh_LMF)
        first = first.only(room_M - np.minimum(size_M - 1, room_M // 2))
    excess_LE = _excess(load_LE, owner_LE, topology.num_ranks)
    excess_LE[first.only(room_M - room_M // MARGIN).experts(load_LE.shape)] = 0
    # A node of one rank has no other rank to level with.
    leaving_LMG = _by_home(excess_LE, topology.node_R[owner_LE], np.where(size_M > 1, room_M, 0))
    is_leaving_LMG = leaving_LMG != EMPTY
    first = first.only(room_M - is_leaving_LMG.sum(axis=2))
    tokens_LMK = first.tokens(load_LE)
    kept_LE = first.kept(load_LE, tokens_LMK)
    layer = np.nonzero(is_leaving_LMG)[0]
    given_LMG = np.full(leaving_LMG.shape, EMPTY)
    given_LMG[is_leaving_LMG] = kept_LE[layer, leaving_LMG[is_leaving_LMG]] // 2
    kept_LE[layer, leaving_LMG[is_leaving_LMG]] -= given_LMG[is_leaving_LMG]
    slots = NodeSlots.build(kept_LE, owner_LE, topology, size_M, num_slots)
    slots.pack(leaving_LMG, given_LMG)
    slots.pack(*first.chosen(tokens_LMK))
    slots.level_nodes(target_L)
    slots.level(np.repeat(target_L, len(size_M)))
    if not levels_last:
        return slots
    last = replace(ranked, is_taken_LMF=ranked.is_taken_LMF & ~first.is_taken_LMF)
    if last.is_taken_LMF.any():
        slots.pack(*last.chosen(np.zeros_like(tokens_LMK)))
    return slots


def _excess(load_LE: Int64Array, owner_LE: Int64Array, num_ranks: int) -> Int64Array:
    """(L, E) tokens of each expert that must leave its owner for it to stand some drift.

    Of each owner the hottest experts must go, until the rest is light enough.
    """
    load_LR = sum_by_owner(load_LE, owner_LE, num_ranks)
    mean_L = load_LR.sum(axis=1) // num_ranks
    most_L1 = (mean_L - mean_L // LIGHTER)[:, None]
    # Owner, tokens and expert as one number: several times faster than to sort places.
    num_experts = load_LE.shape[1]
    expert_bits, bits = (num_experts - 1).bit_length(), int(load_LE.max()).bit_length()
    key_LE = (((owner_LE << bits) | load_LE) << expert_bits) | np.arange(num_experts)
    key_LE.sort(axis=1)
    expert_LE = key_LE & ((1 << expert_bits) - 1)
    sorted_LE = (key_LE >> expert_bits) & ((1 << bits) - 1)
    owner_LE = key_LE >> (expert_bits + bits)
    # Of an owner's sum, without the owners before, what is too much.
    most_LR = np.cumsum(load_LR, axis=1) - load_LR + most_L1
    start_L1 = np.arange(len(load_LE))[:, None] * num_ranks
    over_LE = np.cumsum(sorted_LE, axis=1) - most_LR.take(start_L1 + owner_LE)
    np.minimum(over_LE, sorted_LE, out=over_LE)
    layer, place = np.nonzero(over_LE > 0)
    excess_LE = np.zeros_like(load_LE)
    excess_LE[layer, expert_LE[layer, place]] = over_LE[layer, place]
    return excess_LE


def _by_home(load_LE: Int64Array, home_LE: Int64Array, room_M: Int64Array) -> Int64Array:
    """(L, M, G) int64 experts by the node of their owner, most tokens first; EMPTY: no more."""
    num_layers, num_nodes = len(load_LE), len(room_M)
    layer, expert = np.nonzero(load_LE)
    row = layer * num_nodes + home_LE[layer, expert]
    order = np.lexsort((-load_LE[layer, expert], row))
    row, expert = row[order], expert[order]
    count = np.bincount(row, minlength=num_layers * num_nodes)
    place = np.arange(len(row)) - (np.cumsum(count) - count)[row]
    fits = place < room_M[row % num_nodes]
    result = np.full((len(count), min(int(count.max()), int(room_M.max()))), EMPTY)
    result[row[fits], place[fits]] = expert[fits]
    return result.reshape(num_layers, num_nodes, -1)


def fill_by_node(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    topology: Topology,
    num_slots: int,
    least_tokens: int,
    target_L: Int64Array,
) -> NodeSlots:
    """Level all ranks with replicas on the nodes that have most tokens for them.

    For slots that are too few for what `place_by_node` wants. Arguments as there.
    """
    size_M = np.bincount(topology.node_R)
    near_LME = load_LE[:, None] * size_M[:, None] // topology.num_ranks
    slots = NodeSlots.build(load_LE, owner_LE, topology, size_M, num_slots)
    slots.fill(near_LME, least_tokens, target_L)
    return slots


@dataclass(frozen=True)
class _Ranked:
    """What each node would choose, most worth first.

    Attributes:
        hottest_LK: (L, K) int64, the experts looked at.
        is_home_LMK: (L, M, K) bool, where their owners are.
        near_LBK: (L, M or 1, K) int64, the tokens that each node has for them; 1: the same.
        place_LMF: (L, M, F) int64, place in `hottest_LK`.
        is_taken_LMF: (L, M, F) bool.
        is_fresh_LMF: (L, M, F) bool, the first instance of an expert on its node.
    """

    hottest_LK: Int64Array
    is_home_LMK: BoolArray
    near_LBK: Int64Array
    place_LMF: Int64Array
    is_taken_LMF: BoolArray
    is_fresh_LMF: BoolArray

    def only(self, limit_LM: Int64Array) -> _Ranked:
        """Leave the first instances of each node, (L, M) or (M,) of them."""
        is_early_LMF = np.arange(self.place_LMF.shape[2]) < limit_LM[..., None]
        return replace(self, is_taken_LMF=self.is_taken_LMF & is_early_LMF)

    def experts(self, shape: tuple[int, ...]) -> BoolArray:
        """(L, E) whether some node gets an instance."""
        layer, node, place = np.nonzero(self.is_taken_LMF)
        is_taken_LE = np.zeros(shape, dtype=bool)
        is_taken_LE[layer, self.hottest_LK[layer, self.place_LMF[layer, node, place]]] = True
        return is_taken_LE

    @cached_property
    def count_LMK(self) -> Int64Array:
        """Instances of each expert on each node."""
        row = np.arange(self.is_home_LMK[..., 0].size).reshape(*self.is_home_LMK.shape[:2], 1)
        chosen = (row * self.is_home_LMK.shape[2] + self.place_LMF)[self.is_taken_LMF]
        count = np.bincount(chosen, minlength=self.is_home_LMK.size)
        return self.is_home_LMK + count.reshape(self.is_home_LMK.shape)

    def tokens(self, load_LE: Int64Array) -> Int64Array:
        """(L, M, K) tokens of each instance: a node's own ones, at home also those of the rest."""
        kept_LMK = np.where(self.is_home_LMK | (self.count_LMK == 0), 0, self.near_LBK)
        load_LK = np.take_along_axis(load_LE, self.hottest_LK, axis=1)
        at_home_LK = load_LK - kept_LMK.sum(axis=1)
        all_LMK = np.where(self.is_home_LMK, at_home_LK[:, None], kept_LMK)
        tokens_LMK: Int64Array = all_LMK // np.maximum(self.count_LMK, 1)
        return tokens_LMK

    def kept(self, load_LE: Int64Array, tokens_LMK: Int64Array) -> Int64Array:
        """(L, E) tokens that stay with the owners."""
        at_home_LK = (tokens_LMK * self.is_home_LMK).sum(axis=1)
        kept_LE = load_LE.copy()
        np.put_along_axis(kept_LE, self.hottest_LK, at_home_LK, axis=1)
        return kept_LE

    def chosen(self, tokens_LMK: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(L, M, F) experts, and tokens of an instance, most tokens first; EMPTY: no more."""
        tokens_LMF = np.take_along_axis(tokens_LMK, self.place_LMF, axis=2)
        tokens_LMF[~self.is_taken_LMF] = EMPTY
        shape = tokens_LMF.shape
        by_size = descending(tokens_LMF.reshape(-1, shape[2]) + 1).reshape(shape)
        place_LMF = np.take_along_axis(self.place_LMF, by_size, axis=2)
        expert_LMF = self.hottest_LK[np.arange(shape[0])[:, None, None], place_LMF]
        return expert_LMF, np.take_along_axis(tokens_LMF, by_size, axis=2)


def _rank_by_worth(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    topology: Topology,
    size_M: Int64Array,
    num_slots: int,
    least_tokens: int,
) -> _Ranked:
    """Rank what each node could get by worth per token; arguments as `place_by_node` has them."""
    most, width = int(size_M.max()) * num_slots, int(size_M.max())
    hottest_LK = descending(load_LE)[:, : most + REACH * most // len(size_M) + 4]
    home_LK = topology.node_R[np.take_along_axis(owner_LE, hottest_LK, axis=1)]
    is_home_LMK = home_LK[:, None] == np.arange(len(size_M))[:, None]
    load_LK = np.take_along_axis(load_LE, hottest_LK, axis=1)
    # Nodes of one size have the same tokens: B is 1 then, and M otherwise.
    size_B = size_M[:1] if (size_M == size_M[0]).all() else size_M
    near_LBK = load_LK[:, None] * size_B[:, None] // topology.num_ranks
    # A column for each new instance of an expert on a node: of hotter ones up to `MOST_OF_ONE`.
    copies = [hottest_LK.shape[1] // number for number in range(1, min(MOST_OF_ONE, width) + 1)]
    place_C = np.concatenate([np.arange(count) for count in copies])
    number_C = np.repeat(np.arange(1, len(copies) + 1), copies)
    near_LBC = near_LBK[:, :, place_C]
    # Where the owner is not, and where it is one of those that share the tokens.
    away_LBC, home_LBC = (
        _level_worth(near_LBC, number_C + is_home, size_B, least_tokens) for is_home in (0, 1)
    )
    away_LBC = np.where(number_C == 1, near_LBC * FRESH_WORTH, away_LBC)
    away_LBC *= near_LBC >= least_tokens
    worth_LMC = np.where(is_home_LMK[:, :, place_C], home_LBC, away_LBC)
    worth = worth_LMC.reshape(-1, len(place_C))
    order = descending(worth)[:, :most]
    is_taken = np.take_along_axis(worth, order, axis=1) > 0
    shape = (*is_home_LMK.shape[:2], order.shape[1])
    is_taken_LMF = is_taken.reshape(shape)
    is_taken_LMF &= np.arange(shape[2]) < (size_M * num_slots)[:, None]
    place_LMF = place_C[order].reshape(shape)
    is_first_LMF = (number_C == 1)[order].reshape(shape)
    return _Ranked(
        hottest_LK,
        is_home_LMK,
        near_LBK,
        place_LMF,
        is_taken_LMF,
        is_first_LMF & ~np.take_along_axis(is_home_LMK, place_LMF, axis=2),
    )


def _level_worth(
    near_LBC: Int64Array, count_C: Int64Array, size_B: Int64Array, least_tokens: int
) -> Int64Array:
    """(L, B, C) what one of several instances on a node is worth; 0: too little, or no room."""
    worth_LBC = near_LBC * LEVEL_WORTH // count_C
    is_worth_LBC = worth_LBC >= LEVEL_WORTH * least_tokens // NEAR_SPEED
    worth_LBC *= is_worth_LBC & (count_C <= size_B[:, None])
    return worth_LBC

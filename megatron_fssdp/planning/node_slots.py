# SPDX-License-Identifier: Apache-2.0

"""The slots of all nodes of all layers, filled in whole-array steps: one step, one slot a node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.plan import EMPTY, Int64Array, build_slots
from megatron_fssdp.planning.topology import Topology

BoolArray = npt.NDArray[np.bool_]

FULL = 1 << 61
NONE = -(1 << 40)
# Times the number of nodes: the most moves between nodes.
NODE_TURNS = 3
# Ranks with too many tokens that nodes choose from in a step of `fill`, fullest first.
DONORS = 8


@dataclass(eq=False)
class NodeSlots:
    """Ranks and their slots, a row for each node of each layer; changed by `pack` and `level`.

    Steps write through flat views, so all tables are contiguous.

    Shape letters: N rows (layers times nodes), W ranks of the largest node, S slots of a rank.

    Attributes:
        num_slots: replicas that a rank may get.
        layer_N: (N,) int64, layer of each row.
        rank_NW: (N, W) int64, the ranks of each node; R where it has fewer.
        load_NW: (N, W) int64, tokens of each rank; FULL where there is none.
        used_NW: (N, W) int64, replicas that each rank has.
        expert_NWS, tokens_NWS: (N, W, S) int64, owned ones, then replicas; EMPTY and 0 elsewhere.
        owner_LE: (L, E) int64.
    """

    num_slots: int
    layer_N: Int64Array
    rank_NW: Int64Array
    load_NW: Int64Array
    used_NW: Int64Array
    expert_NWS: Int64Array
    tokens_NWS: Int64Array
    owner_LE: Int64Array

    @classmethod
    def build(
        cls,
        kept_LE: Int64Array,
        owner_LE: Int64Array,
        topology: Topology,
        size_M: Int64Array,
        num_slots: int,
    ) -> NodeSlots:
        """Begin with the owners and the tokens that they keep, (L, E)."""
        num_layers, num_nodes, width = len(kept_LE), len(size_M), int(size_M.max())
        num_ranks = topology.num_ranks
        none = np.zeros((0, 3), dtype=np.int64)
        # The ranks of each node, padded with rank R, which is full.
        rank_MW = np.full((num_nodes, width), num_ranks)
        rank_MW[np.arange(width) < size_M[:, None]] = np.argsort(topology.node_R, kind="stable")
        # Most layers share one sharding: K is 1 then, and L otherwise.
        is_same = bool((owner_LE == owner_LE[:1]).all())
        expert_KRS = build_slots(owner_LE[: 1 if is_same else None], none, num_ranks, num_slots)
        no_rank = np.full((len(expert_KRS), 1, expert_KRS.shape[2]), EMPTY)
        expert_KMWS = np.concatenate([expert_KRS, no_rank], axis=1)[:, rank_MW]
        # EMPTY, as an index, reads the last column of the layer before: no tokens.
        tokens_LX = np.concatenate([kept_LE, np.zeros((num_layers, 1), dtype=np.int64)], axis=1)
        start_L = np.arange(num_layers) * tokens_LX.shape[1]
        tokens_LMWS = tokens_LX.take(start_L[:, None, None, None] + expert_KMWS)
        load_LMW = np.where(rank_MW == num_ranks, FULL, tokens_LMWS.sum(axis=3))
        shape, num_all = (num_layers * num_nodes, width), expert_KMWS.shape[3]
        expert_LMWS = np.broadcast_to(expert_KMWS, tokens_LMWS.shape)
        return cls(
            num_slots=num_slots,
            layer_N=np.repeat(np.arange(num_layers), num_nodes),
            rank_NW=np.tile(rank_MW, (num_layers, 1)),
            load_NW=load_LMW.copy(order="C").reshape(shape),
            used_NW=np.zeros(shape, dtype=np.int64),
            expert_NWS=expert_LMWS.copy(order="C").reshape(*shape, num_all),
            tokens_NWS=tokens_LMWS.copy(order="C").reshape(*shape, num_all),
            owner_LE=owner_LE,
        )

    def replicas(self) -> Int64Array:
        """(N, 3) layer, expert and rank of all replicas; of each rank in the order of its slots."""
        expert_NWS = self.expert_NWS[:, :, -self.num_slots :]
        row, rank, slot = np.nonzero(expert_NWS != EMPTY)
        values = self.layer_N[row], expert_NWS[row, rank, slot], self.rank_NW[row, rank]
        return np.stack(values, axis=1)

    def load_by_rank(self, num_ranks: int) -> Int64Array:
        """(L, R) tokens of each rank."""
        load_LR = np.zeros((len(self.owner_LE), num_ranks + 1), dtype=np.int64)
        load_LR[self.layer_N[:, None], self.rank_NW] = self.load_NW
        return load_LR[:, :-1]

    def pack(self, expert_LMF: Int64Array, tokens_LMF: Int64Array) -> None:
        """Put instances on their node's emptiest rank with a free slot, one after the other.

        Tokens of an instance that finds no slot stay with the owner.

        Args:
            expert_LMF: (L, M, F) int64, experts that each node gets, in this order.
            tokens_LMF: (L, M, F) int64, tokens that come with each; EMPTY: there is none.
        """
        expert_FN = np.ascontiguousarray(expert_LMF.reshape(len(self.layer_N), -1).T)
        tokens_FN = np.ascontiguousarray(tokens_LMF.reshape(len(self.layer_N), -1).T)
        owner_FN = self.owner_LE[self.layer_N, expert_FN]
        open_NW = np.where(self.used_NW < self.num_slots, self.load_NW, FULL)
        # Each slot by itself: comparing what lies together is faster.
        held_SNW = self.expert_NWS[:, :, -self.num_slots :].transpose(2, 0, 1).copy()
        width, opened, held = open_NW.shape[1], open_NW.reshape(-1), held_SNW.reshape(-1)
        load, used = self.load_NW.reshape(-1), self.used_NW.reshape(-1)
        start_N = np.arange(len(self.layer_N)) * width
        for expert_N, tokens_N, owner_N in zip(expert_FN, tokens_FN, owner_FN, strict=True):
            is_held_NW = self.rank_NW == owner_N[:, None]
            for held_NW in held_SNW:
                is_held_NW |= held_NW == expert_N[:, None]
            free_NW = np.where(is_held_NW, FULL, open_NW)
            at = start_N + free_NW.argmin(axis=1)
            is_put_N = (free_NW.take(at) < FULL) & (tokens_N != EMPTY)
            is_all = bool(is_put_N.all())
            put = at, expert_N, tokens_N
            at, expert, tokens = put if is_all else (values[is_put_N] for values in put)
            held[used[at] * used.size + at] = expert
            self._put(at, expert, tokens)
            opened[at] = np.where(used[at] < self.num_slots, load[at], FULL)
            if is_all:
                continue
            for lost in np.flatnonzero(~is_put_N & (tokens_N > 0)).tolist():
                self._give_back(lost, int(expert_N[lost]), int(owner_N[lost]), int(tokens_N[lost]))

    def _give_back(self, row: int, expert: int, owner: int, tokens: int) -> None:
        """Let an owner, somewhere in the layer of this row, keep tokens of its expert."""
        is_owner_NW = (self.layer_N == self.layer_N[row])[:, None] & (self.rank_NW == owner)
        at, column = np.nonzero(is_owner_NW)
        slot = (self.expert_NWS[at[0], column[0]] == expert).argmax()
        self.load_NW[at[0], column[0]] += tokens
        self.tokens_NWS[at[0], column[0], slot] += tokens

    def level_nodes(self, target_L: Int64Array) -> None:
        """Let each layer's fullest node pass tokens on to its emptiest, until none has too many.

        Tokens go to an instance that is there already, which costs nothing; if there is none, with
        a replica to the emptiest rank. Layers without a free slot are left as they are: only
        tokens could move there, and those are the quotas' to choose.

        Args:
            target_L: (L,) int64, tokens that a rank may have.
        """
        num_layers, width = len(target_L), self.load_NW.shape[1]
        is_rank_LMW = (self.load_NW < FULL).reshape(num_layers, -1, width)
        limit_LM = target_L[:, None] * is_rank_LMW.sum(axis=2)
        load_LMW = np.where(is_rank_LMW, self.load_NW.reshape(is_rank_LMW.shape), 0)
        over_LM = load_LMW.sum(axis=2) - limit_LM
        num_nodes = over_LM.shape[1]
        is_free_LMW = (self.used_NW < self.num_slots).reshape(is_rank_LMW.shape) & is_rank_LMW
        layer = np.flatnonzero(is_free_LMW.any(axis=(1, 2)))
        for _ in range(NODE_TURNS * num_nodes):
            if not len(layer):
                break
            number = np.arange(len(layer))
            donor, to = over_LM[layer].argmax(axis=1), over_LM[layer].argmin(axis=1)
            amount = np.minimum(over_LM[layer, donor], -over_LM[layer, to])
            from_row, to_row = layer * num_nodes + donor, layer * num_nodes + to
            giver, slot = self._gift(from_row, to_row)
            expert = self.expert_NWS[from_row, giver, slot]
            moved = np.minimum(amount, self.tokens_NWS[from_row, giver, slot])
            is_there = (self.expert_NWS[to_row] == expert[:, None, None]).reshape(len(layer), -1)
            has, at = is_there.any(axis=1), is_there.argmax(axis=1)
            free = np.where(self.used_NW[to_row] < self.num_slots, self.load_NW[to_row], FULL)
            taker = np.where(has, at // self.expert_NWS.shape[2], free.argmin(axis=1))
            is_open = (moved > 0) & (has | (free[number, free.argmin(axis=1)] < FULL))
            moved = np.where(is_open, moved, 0)
            over_LM[layer, donor] -= moved
            over_LM[layer, to] += moved
            self.load_NW[from_row, giver] -= moved
            self.tokens_NWS[from_row, giver, slot] -= moved
            old, new = is_open & has, is_open & ~has
            self.load_NW[to_row[old], taker[old]] += moved[old]
            at = at % self.expert_NWS.shape[2]
            self.tokens_NWS[to_row[old], taker[old], at[old]] += moved[old]
            self._put((to_row * width + taker)[new], expert[new], moved[new])
            layer = layer[is_open]

    def _gift(self, from_row: Int64Array, to_row: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Choose what one node passes on to another: the rank and its slot.

        The most tokens of an expert that both have; if there is none, the fullest rank's most.
        """
        num_all = self.expert_NWS.shape[2]
        shape = (len(from_row), -1)
        given = self.expert_NWS[from_row].reshape(shape)
        is_shared = (given[:, :, None] == self.expert_NWS[to_row].reshape(shape)[:, None]).any(
            axis=2
        )
        tokens = self.tokens_NWS[from_row].reshape(shape)
        shared = np.where(is_shared, tokens, 0)
        load = np.where(self.load_NW[from_row] < FULL, self.load_NW[from_row], -1)
        is_full = np.repeat(load == load.max(axis=1)[:, None], num_all, axis=1)
        has_shared = (shared > 0).any(axis=1)[:, None]
        best = np.where(has_shared, shared, np.where(is_full, tokens, 0)).argmax(axis=1)
        giver, slot = np.divmod(best, num_all)
        return giver, slot

    def fill(self, near_LME: Int64Array, least_tokens: int, target_L: Int64Array) -> None:
        """Let all nodes take tokens from ranks that have too many, wherever they are.

        In a step, each node's emptiest rank takes what saves most: the tokens that the node itself
        has for an expert, less the price of its weights if the node lacks it, and less half of
        what the donor would then lack. With its last slot a rank is filled up; the donor is then
        below the target and takes from others. So ranks form few and large trees, along which
        quotas follow drift.

        Args:
            near_LME: (L, M, E) int64, the tokens that each node has for each expert.
            least_tokens: tokens that pay for the weights of a replica on a node that lacks it.
            target_L: (L,) int64, tokens that a rank may have.
        """
        num_layers, num_nodes, num_experts = near_LME.shape
        width = self.load_NW.shape[1]
        is_full_NWS = self.expert_NWS != EMPTY
        held = np.nonzero(is_full_NWS)[0] * num_experts + self.expert_NWS[is_full_NWS]
        # What is left of a node's own tokens for an expert, and whether the node lacks it.
        unmet = near_LME.ravel().copy()
        np.subtract.at(unmet, held, self.tokens_NWS[is_full_NWS])
        is_lacking = np.ones(unmet.size, dtype=bool)
        is_lacking[held] = False
        layer = np.arange(num_layers)
        while len(layer):
            row_LM = layer[:, None] * num_nodes + np.arange(num_nodes)
            donor = self._donors(row_LM, target_L[layer])
            taker = self._takers(row_LM, target_L[layer])
            key_LMD = row_LM[:, :, None] * num_experts + donor.expert_LD[:, None]
            amount_LMD = np.minimum(taker.room_LM[:, :, None], donor.tokens_LD[:, None])
            score_LMD = np.minimum(amount_LMD, np.maximum(unmet[key_LMD], 0))
            score_LMD -= np.where(is_lacking[key_LMD], least_tokens, 0)
            score_LMD -= np.maximum(amount_LMD - donor.excess_LD[:, None], 0) // 2
            held_LMS = self.expert_NWS[row_LM, taker.rank_LM]
            is_held_LMD = (held_LMS[:, :, None] == donor.expert_LD[:, None, :, None]).any(axis=3)
            score_LMD[is_held_LMD | _is_unfit(amount_LMD, donor, taker)] = NONE
            at, node, choice, moved = _agree(score_LMD, amount_LMD, donor, taker)
            expert = donor.expert_LD[at, choice]
            giver, to_row = (donor.row_LD[at, choice], donor.rank_LD[at, choice]), row_LM[at, node]
            np.subtract.at(self.load_NW, giver, moved)
            np.subtract.at(self.tokens_NWS, (*giver, donor.slot_LD[at, choice]), moved)
            self._put(to_row * width + taker.rank_LM[at, node], expert, moved)
            np.add.at(unmet, giver[0] * num_experts + expert, moved)
            np.subtract.at(unmet, to_row * num_experts + expert, moved)
            is_lacking[to_row * num_experts + expert] = False
            layer = layer[np.bincount(at, minlength=len(layer)) > 0]

    def _donors(self, row_LM: Int64Array, target_L: Int64Array) -> _Donors:
        """The fullest ranks of each layer, and what each has most tokens of."""
        num_layers, width = len(row_LM), self.load_NW.shape[1]
        load = self.load_NW[row_LM].reshape(num_layers, -1)
        excess = np.where(load < FULL, load - target_L[:, None], -FULL)
        order_LD = np.argsort(-excess, axis=1, kind="stable")[:, :DONORS]
        row_LD = np.take_along_axis(row_LM, order_LD // width, axis=1)
        tokens_LDS = self.tokens_NWS[row_LD, order_LD % width]
        slot_LD = tokens_LDS.argmax(axis=2)
        return _Donors(
            row_LD=row_LD,
            rank_LD=order_LD % width,
            slot_LD=slot_LD,
            expert_LD=self.expert_NWS[row_LD, order_LD % width, slot_LD],
            tokens_LD=tokens_LDS.max(axis=2),
            excess_LD=np.take_along_axis(excess, order_LD, axis=1),
        )

    def _takers(self, row_LM: Int64Array, target_L: Int64Array) -> _Takers:
        """Each node's emptiest rank with a free slot."""
        free_LMW = np.where(self.used_NW[row_LM] < self.num_slots, self.load_NW[row_LM], FULL)
        rank_LM = free_LMW.argmin(axis=2)
        room_LM = target_L[:, None] - free_LMW.min(axis=2)
        is_last_LM = self.used_NW[row_LM, rank_LM] == self.num_slots - 1
        return _Takers(rank_LM, np.maximum(room_LM, 0), is_last_LM)

    def level(self, target_N: Int64Array) -> None:
        """Let each node's fullest rank pass tokens on to its emptiest, until none has too many.

        Args:
            target_N: (N,) int64, tokens that a rank may have; its node's mean is allowed too.
        """
        is_rank_NW = self.load_NW < FULL
        total_N = np.where(is_rank_NW, self.load_NW, 0).sum(axis=1)
        target_N = np.maximum(target_N, -(-total_N // is_rank_NW.sum(axis=1)))
        row = np.flatnonzero((is_rank_NW & (self.used_NW < self.num_slots)).any(axis=1))
        while len(row):
            load = self.load_NW[row]
            donor = np.where(load < FULL, load, -1).argmax(axis=1)
            to = np.where(self.used_NW[row] < self.num_slots, load, FULL).argmin(axis=1)
            excess = load[np.arange(len(row)), donor] - target_N[row]
            room = target_N[row] - load[np.arange(len(row)), to]
            expert = self.expert_NWS[row, donor]
            is_shared = (expert[:, :, None] == self.expert_NWS[row, to][:, None]).any(axis=2)
            tokens = np.where(is_shared, 0, self.tokens_NWS[row, donor])
            slot = tokens.argmax(axis=1)
            most = tokens[np.arange(len(row)), slot]
            is_open = (excess > 0) & (room > 0) & (most > 0)
            is_open &= self.used_NW[row, to] < self.num_slots
            # With its last slot a rank is filled up, as far as the expert's tokens go.
            is_last = self.used_NW[row, to] == self.num_slots - 1
            moved = np.minimum(np.where(is_last, room, np.minimum(room, excess)), most)
            expert = expert[np.arange(len(row)), slot]
            row, donor, to, slot, moved, expert = (
                values[is_open] for values in (row, donor, to, slot, moved, expert)
            )
            self.load_NW[row, donor] -= moved
            self.tokens_NWS[row, donor, slot] -= moved
            self._put(row * self.load_NW.shape[1] + to, expert, moved)

    def _put(self, at: Int64Array, expert: Int64Array, tokens: Int64Array) -> None:
        """Put an expert with tokens into a free slot of each of these ranks, row * W + column."""
        used, num_all = self.used_NW.reshape(-1), self.expert_NWS.shape[2]
        slot = at * num_all + num_all - self.num_slots + used[at]
        self.expert_NWS.reshape(-1)[slot] = expert
        self.tokens_NWS.reshape(-1)[slot] = tokens
        used[at] += 1
        self.load_NW.reshape(-1)[at] += tokens


@dataclass(frozen=True)
class _Donors:
    """Ranks with most tokens, fullest first: (L, D) int64 each.

    Attributes:
        row_LD, rank_LD, slot_LD: where in the tables of `NodeSlots` their largest instance is.
        expert_LD, tokens_LD: what it is, and how many tokens it has.
        excess_LD: tokens above the target.
    """

    row_LD: Int64Array
    rank_LD: Int64Array
    slot_LD: Int64Array
    expert_LD: Int64Array
    tokens_LD: Int64Array
    excess_LD: Int64Array


@dataclass(frozen=True)
class _Takers:
    """(L, M) each: a rank of each node, its room below the target, whether it has one slot only."""

    rank_LM: Int64Array
    room_LM: Int64Array
    is_last_LM: BoolArray


def _is_unfit(amount_LMD: Int64Array, donor: _Donors, taker: _Takers) -> BoolArray:
    """(L, M, D) bool, where nothing should be moved.

    A small donor is not worth a rank's last slot, unless it is the fullest of all.
    """
    is_small_LMD = (2 * donor.excess_LD[:, None] < amount_LMD) & taker.is_last_LM[:, :, None]
    is_small_LMD[:, :, 0] = False
    return is_small_LMD | (amount_LMD <= 0) | (donor.excess_LD <= 0)[:, None]


def _agree(
    score_LMD: Int64Array, amount_LMD: Int64Array, donor: _Donors, taker: _Takers
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Let nodes choose donors; of those that choose the same, the best come first.

    A choice that costs more than it saves counts only where no node has a better one.

    Returns:
        (N,) int64 each: layer, node, donor and tokens of each choice that the donor can meet.
    """
    choice_LM = score_LMD.argmax(axis=2)
    best_LM = score_LMD.max(axis=2)
    is_made_LM = (best_LM > NONE) & ((best_LM >= 0) | (best_LM.max(axis=1) < 0)[:, None])
    order_LM = np.argsort(
        np.where(is_made_LM, (choice_LM << 42) - best_LM, FULL), axis=1, kind="stable"
    )
    choice_LM = np.take_along_axis(choice_LM, order_LM, axis=1)
    is_made_LM = np.take_along_axis(is_made_LM, order_LM, axis=1)
    is_last_LM = np.take_along_axis(taker.is_last_LM, order_LM, axis=1)
    amount_LM = amount_LMD[np.arange(len(order_LM))[:, None], order_LM, choice_LM]
    run_LM = np.cumsum(amount_LM, axis=1) - amount_LM
    is_first_LM = np.ones(choice_LM.shape, dtype=bool)
    is_first_LM[:, 1:] = choice_LM[:, 1:] != choice_LM[:, :-1]
    before_LM = run_LM - np.maximum.accumulate(np.where(is_first_LM, run_LM, 0), axis=1)
    left_LM = np.take_along_axis(donor.excess_LD, choice_LM, axis=1) - before_LM
    has_LM = np.take_along_axis(donor.tokens_LD, choice_LM, axis=1) - before_LM
    moved_LM = np.minimum(amount_LM, has_LM)
    moved_LM = np.where(is_last_LM, moved_LM, np.minimum(moved_LM, left_LM))
    layer, place = np.nonzero(is_made_LM & (left_LM > 0) & (moved_LM > 0))
    return layer, order_LM[layer, place], choice_LM[layer, place], moved_LM[layer, place]

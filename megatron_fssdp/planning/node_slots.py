# SPDX-License-Identifier: Apache-2.0

"""The slots of all nodes of all layers, filled in whole-array steps: one step, one slot a node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.plan import EMPTY, Int64Array, build_slots
from megatron_fssdp.planning.topology import Topology

FULL = 1 << 61
# Times the number of nodes: the most moves between nodes.
NODE_TURNS = 3


@dataclass(eq=False)
class NodeSlots:
    """Ranks and their slots, a row for each node of each layer; changed by `pack` and `level`.

    Shape letters: N rows (layers times nodes), W ranks of the largest node, S slots of a rank.

    Attributes:
        num_slots: replicas that a rank may get.
        layer_N: (N,) int64, layer of each row.
        rank_NW: (N, W) int64, the ranks of each node; R where it has fewer.
        load_NW: (N, W) int64, tokens of each rank; FULL where there is none.
        owned_NW: (N, W) int64, experts that each rank owns.
        used_NW: (N, W) int64, replicas that each rank has.
        expert_NWS, tokens_NWS: (N, W, S) int64, owned ones, then replicas; EMPTY and 0 elsewhere.
        owner_LE: (L, E) int64.
        found: (3, .) layer, expert and rank of the replicas of each step.
    """

    num_slots: int
    layer_N: Int64Array
    rank_NW: Int64Array
    load_NW: Int64Array
    owned_NW: Int64Array
    used_NW: Int64Array
    expert_NWS: Int64Array
    tokens_NWS: Int64Array
    owner_LE: Int64Array
    found: list[Int64Array]

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
        expert_LRS = build_slots(owner_LE, none, num_ranks, num_slots)
        num_all = expert_LRS.shape[2]
        tokens_LRS = np.take_along_axis(kept_LE, expert_LRS.reshape(num_layers, -1), axis=1)
        tokens_LRS = np.where(expert_LRS == EMPTY, 0, tokens_LRS.reshape(expert_LRS.shape))
        # The ranks of each node, padded with rank R, which is full.
        rank_MW = np.full((num_nodes, width), num_ranks)
        rank_MW[np.arange(width) < size_M[:, None]] = np.argsort(topology.node_R, kind="stable")
        pad = ((0, 0), (0, 1))
        load_LR = np.pad(tokens_LRS.sum(axis=2), pad, constant_values=FULL)
        owned_LR = np.pad((expert_LRS != EMPTY).sum(axis=2), pad)
        expert_LRS = np.pad(expert_LRS, (*pad, (0, 0)), constant_values=EMPTY)
        tokens_LRS = np.pad(tokens_LRS, (*pad, (0, 0)))
        shape = (num_layers * num_nodes, width)
        return cls(
            num_slots=num_slots,
            layer_N=np.repeat(np.arange(num_layers), num_nodes),
            rank_NW=np.tile(rank_MW, (num_layers, 1)),
            load_NW=load_LR[:, rank_MW].reshape(shape),
            owned_NW=owned_LR[:, rank_MW].reshape(shape),
            used_NW=np.zeros(shape, dtype=np.int64),
            expert_NWS=expert_LRS[:, rank_MW].reshape(*shape, num_all),
            tokens_NWS=tokens_LRS[:, rank_MW].reshape(*shape, num_all),
            owner_LE=owner_LE,
            found=[np.zeros((3, 0), dtype=np.int64)],
        )

    def replicas(self) -> Int64Array:
        """(N, 3) layer, expert and rank of all replicas."""
        return np.concatenate(self.found, axis=1).T

    def by_rank(self, num_ranks: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(L, R) tokens and replicas of each rank, and (L, E) tokens that stay with the owners."""
        num_layers, num_experts = self.owner_LE.shape
        load_LR, used_LR = np.zeros((2, num_layers, num_ranks + 1), dtype=np.int64)
        layer_N1 = self.layer_N[:, None]
        load_LR[layer_N1, self.rank_NW] = self.load_NW
        used_LR[layer_N1, self.rank_NW] = self.used_NW
        kept_LE = np.zeros((num_layers, num_experts + 1), dtype=np.int64)
        last = self.expert_NWS.shape[2] - self.num_slots
        kept_LE[layer_N1[..., None], self.expert_NWS[..., :last]] = self.tokens_NWS[..., :last]
        return load_LR[:, :-1], used_LR[:, :-1], kept_LE[:, :-1]

    def pack(self, expert_LMF: Int64Array, tokens_LMF: Int64Array) -> None:
        """Put instances on their node's emptiest rank with a free slot, one after the other.

        Args:
            expert_LMF: (L, M, F) int64, experts that each node gets, in this order.
            tokens_LMF: (L, M, F) int64, tokens that come with each; EMPTY: there is none.
        """
        expert_FN = expert_LMF.reshape(len(self.layer_N), -1).T
        tokens_FN = tokens_LMF.reshape(len(self.layer_N), -1).T
        for expert_N, tokens_N, owner_N in zip(
            expert_FN, tokens_FN, self.owner_LE[self.layer_N, expert_FN], strict=True
        ):
            is_held_NW = self.rank_NW == owner_N[:, None]
            first = self.expert_NWS.shape[2] - self.num_slots
            for slot in range(first, self.expert_NWS.shape[2]):
                is_held_NW |= self.expert_NWS[:, :, slot] == expert_N[:, None]
            is_held_NW |= self.used_NW == self.num_slots
            open_NW = np.where(is_held_NW, FULL, self.load_NW)
            to_N = open_NW.argmin(axis=1)
            row = np.flatnonzero((open_NW.min(axis=1) < FULL) & (tokens_N != EMPTY))
            self._put(row, to_N[row], expert_N[row], tokens_N[row])

    def level_nodes(self, target_L: Int64Array) -> None:
        """Let each layer's fullest node pass tokens on to its emptiest, until none has too many.

        Tokens go to an instance that is there already, or with a replica to the emptiest rank.

        Args:
            target_L: (L,) int64, tokens that a rank may have.
        """
        shape = (len(target_L), -1, self.load_NW.shape[1])
        is_rank_LMW = (self.load_NW < FULL).reshape(shape)
        limit_LM = target_L[:, None] * is_rank_LMW.sum(axis=2)
        over_LM = np.where(is_rank_LMW, self.load_NW.reshape(shape), 0).sum(axis=2) - limit_LM
        num_nodes = over_LM.shape[1]
        layer = np.arange(len(target_L))
        for _ in range(NODE_TURNS * num_nodes):
            over = over_LM[layer]
            donor, to = over.argmax(axis=1), over.argmin(axis=1)
            number = np.arange(len(layer))
            amount = np.minimum(over[number, donor], -over[number, to])
            from_row, to_row = layer * num_nodes + donor, layer * num_nodes + to
            load = self.load_NW[from_row]
            giver = np.where(load < FULL, load, -1).argmax(axis=1)
            tokens = self.tokens_NWS[from_row, giver]
            slot = tokens.argmax(axis=1)
            expert = self.expert_NWS[from_row, giver, slot]
            moved = np.minimum(amount, tokens[number, slot])
            is_there = self.expert_NWS[to_row] == expert[:, None, None]
            flat = is_there.reshape(len(layer), -1)
            has = flat.any(axis=1)
            open_W = np.where(self.used_NW[to_row] < self.num_slots, self.load_NW[to_row], FULL)
            taker = np.where(has, flat.argmax(axis=1) // is_there.shape[2], open_W.argmin(axis=1))
            is_open = (moved > 0) & (has | (open_W.min(axis=1) < FULL))
            if not is_open.any():
                break
            layer, donor, to, from_row, to_row, giver, slot, expert, moved, has, taker, at = (
                values[is_open]
                for values in (
                    layer,
                    donor,
                    to,
                    from_row,
                    to_row,
                    giver,
                    slot,
                    expert,
                    moved,
                    has,
                    taker,
                    flat.argmax(axis=1) % is_there.shape[2],
                )
            )
            over_LM[layer, donor] -= moved
            over_LM[layer, to] += moved
            self.load_NW[from_row, giver] -= moved
            self.tokens_NWS[from_row, giver, slot] -= moved
            self.load_NW[to_row[has], taker[has]] += moved[has]
            self.tokens_NWS[to_row[has], taker[has], at[has]] += moved[has]
            new = ~has
            self._put(to_row[new], taker[new], expert[new], moved[new])

    def level(self, target_N: Int64Array) -> None:
        """Let each node's fullest rank pass tokens on to its emptiest, until none has too many.

        Args:
            target_N: (N,) int64, tokens that a rank may have; its node's mean is allowed too.
        """
        is_rank_NW = self.load_NW < FULL
        total_N = np.where(is_rank_NW, self.load_NW, 0).sum(axis=1)
        target_N = np.maximum(target_N, -(-total_N // is_rank_NW.sum(axis=1)))
        row = np.arange(len(target_N))
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
            self._put(row, to, expert, moved)

    def _put(self, row: Int64Array, to: Int64Array, expert: Int64Array, tokens: Int64Array) -> None:
        """Put an expert with tokens into a free slot of one rank of each of these rows."""
        used = self.used_NW[row, to]
        slot = self.expert_NWS.shape[2] - self.num_slots + used
        self.expert_NWS[row, to, slot] = expert
        self.tokens_NWS[row, to, slot] = tokens
        self.used_NW[row, to] = used + 1
        self.load_NW[row, to] += tokens
        self.found.append(np.stack([self.layer_N[row], expert, self.rank_NW[row, to]]))

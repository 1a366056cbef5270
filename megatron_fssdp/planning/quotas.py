# SPDX-License-Identifier: Apache-2.0

"""Quotas: how many tokens of each expert every instance computes, and whose.

Whole numbers only: every rank computes the same quotas from the same counts. The paper keeps a
token on its rank or node wherever an instance is (section 4.4), which can overload that rank;
here the fullest rank comes first, locality second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_fssdp.planning.equalize import equalize, instance_loads
from megatron_fssdp.planning.localize import localize
from megatron_fssdp.planning.plan import EMPTY, Int64Array, LayerPlan
from megatron_fssdp.planning.quota_tables import QuotaTables, quota_tables

# Steps of `equalize` if `turns` does not say: it stops at the optimum, long before this.
MAX_STEPS = 1000
# A fullest rank of one token in 2^11 more than the mean is good enough, if that is no more than one
# token per replica.
GOOD_ENOUGH_SHIFT = 11
# From this number of ranks on, a fullest rank twice as far off is good enough for twice the ranks:
# the last tokens take most of the steps there.
MANY_RANKS = 256


def good_enough_shift(num_ranks: int) -> int:
    """Return the power of two of which part of the mean is good enough; 7 (0.8 %) at least."""
    return max(GOOD_ENOUGH_SHIFT - (num_ranks // MANY_RANKS + 1).bit_length() + 1, 7)


def rank_loads(quota_EI: Int64Array, plan: LayerPlan) -> Int64Array:
    """Return the (R,) int64 tokens that each rank computes under these quotas."""
    is_instance = plan.instance_rank_EI != EMPTY
    # Sums of whole numbers below 2^53: exact as floats.
    load_R = np.bincount(
        plan.instance_rank_EI[is_instance],
        weights=quota_EI[is_instance],
        minlength=plan.num_ranks,
    )
    return load_R.astype(np.int64)


def balance(
    counts_RE: Int64Array,
    plan: LayerPlan,
    node_of_rank: Sequence[int],
    tolerance: float = 0.0,
    turns: int | None = None,
) -> Int64Array:
    """Split every expert's tokens over its instances so that the fullest rank has the fewest.

    Quotas start where no token would leave its node, as far as the plan allows, and are changed
    only as far as balance needs. See `equalize` for why the result is within one token per replica
    of the least possible; it is never worse than owners alone.

    Args:
        counts_RE: (R, E) integers, tokens of each source rank for each expert.
        plan: where the instances are.
        node_of_rank: (R,) the node of each rank.
        tolerance: a fullest rank of (1 + tolerance) times the mean tokens is good enough, and
            what is left of that is spent on keeping tokens on their node.
        turns: turns of every forest (see `equalize`), at most 2; None: until nothing is gained.
            The device routine takes two, and equals this one with two to the token.

    Returns:
        (E, I) int64, tokens of each expert (of all sources) that each instance computes; zero
        where `instance_rank_EI` is EMPTY. Each row sums to the expert's tokens.

    Example: 2 ranks on one node own an expert each; expert 0 has a replica on rank 1. Counts
    [[6, 1], [2, 1]] make quotas [[5, 3], [2, 0]]: five tokens on each rank.
    """
    quota_EI = np.zeros(plan.instance_rank_EI.shape, dtype=np.int64)
    tables = quota_tables(plan, node_of_rank)
    counts_ME = _sum_by_node(counts_RE, tables)
    load_E = counts_ME.sum(axis=0)
    quota_EI[:, 0] = load_E
    if not len(tables.expert_X):
        return quota_EI
    base_R = np.bincount(
        tables.owner_E, weights=load_E * tables.single_E, minlength=tables.num_ranks
    ).astype(np.int64)
    share_N, quota_N = _node_shares(counts_ME, load_E[tables.expert_X], tables)
    total = int(load_E.sum())
    mean = -(-total // tables.num_ranks)
    num_replicas = len(tables.rank_N) - len(tables.expert_X)
    good_enough = min(mean >> good_enough_shift(tables.num_ranks), num_replicas)
    goal = mean + max(good_enough, int(tolerance * total / tables.num_ranks))
    steps = MAX_STEPS if turns is None else turns * len(tables.forests)
    is_relaxed = turns is None and tables.num_ranks >= MANY_RANKS
    quota_N = equalize(quota_N, base_R, tables, goal, steps, is_relaxed)
    quota_N = localize(quota_N, share_N, base_R, tables, goal)
    owners_load_R = np.bincount(plan.owner_E, weights=load_E, minlength=plan.num_ranks)
    if instance_loads(quota_N, base_R, tables).max() <= owners_load_R.max():
        quota_EI[tables.expert_X[tables.expert_N], tables.column_N] = quota_N
    return quota_EI


def _sum_by_node(counts_RE: Int64Array, tables: QuotaTables) -> Int64Array:
    """(M, E) tokens of each node: the one pass over the input, which has R * E numbers."""
    if not tables.is_by_node:
        counts_RE = counts_RE[tables.by_node_R]
    num_ranks, num_experts = counts_RE.shape
    start, num_nodes = tables.node_start, len(tables.node_start)
    if (start * num_nodes == np.arange(num_nodes) * num_ranks).all():
        by_node = counts_RE.reshape(num_nodes, -1, num_experts)
        return by_node.sum(axis=1, dtype=np.int64)
    # Several times faster than `reduceat`.
    parts = np.split(counts_RE, start[1:])
    return np.stack([part.sum(axis=0, dtype=np.int64) for part in parts])


def _node_shares(
    counts_ME: Int64Array, load_X: Int64Array, tables: QuotaTables
) -> tuple[Int64Array, Int64Array]:
    """Share each node's tokens among its instances; tokens of other nodes among all instances.

    Returns:
        (N,) int64 the shares of the own node's tokens, (N,) int64 all tokens of each instance.
    """
    share_N = counts_ME[tables.node_N, tables.expert_X[tables.expert_N]] // tables.peers_N
    rest_X = load_X - np.add.reduceat(share_N, tables.first_X)
    mean_X, left_X = np.divmod(rest_X, tables.count_X)
    is_extra_N = tables.column_N < left_X[tables.expert_N]
    return share_N, share_N + mean_X[tables.expert_N] + is_extra_N


def split_source(
    counts_RE: Int64Array,
    quota_EI: Int64Array,
    plan: LayerPlan,
    node_of_rank: Sequence[int],
    source: int,
) -> Int64Array:
    """Split one source rank's tokens over the instances, as the quotas say.

    Tokens stay on their rank where it has an instance with quota left, else on their node; the
    rest fill what is left in the order of nodes and ranks. All sources together meet the quotas
    exactly.

    Args:
        counts_RE: (R, E) integers, tokens of each source rank for each expert.
        quota_EI: (E, I) int64, as `balance` returns it for these counts.
        plan: where the instances are.
        node_of_rank: (R,) the node of each rank.
        source: the rank whose tokens to split.

    Returns:
        (E, I) int64; each row sums to `counts_RE[source]`.

    Example: with `balance`'s, rank 0 keeps 5 of its 6 tokens for expert 0 and sends 1 to rank 1:
    [[5, 1], [1, 0]]; rank 1 keeps its own: [[0, 2], [1, 0]].
    """
    tables = quota_tables(plan, node_of_rank)
    split_N = _sent(counts_RE, _rooms(counts_RE, quota_EI, tables), tables, source)
    return _split(counts_RE[source], split_N, tables, quota_EI.shape[1])


def split_sources(
    counts_RE: Int64Array, quota_EI: Int64Array, plan: LayerPlan, node_of_rank: Sequence[int]
) -> Int64Array:
    """Return `split_source` of all sources, for the instances of replicated experts.

    Args:
        counts_RE: (R, E) integers, tokens of each source rank for each expert.
        quota_EI: (E, I) int64, as `balance` returns it for these counts.
        plan: where the instances are.
        node_of_rank: (R,) the node of each rank.

    Returns:
        (R, N) int64; the N instances are in the order of `quota_tables`.
    """
    tables = quota_tables(plan, node_of_rank)
    rooms = _rooms(counts_RE, quota_EI, tables)
    return _split_sources(counts_RE, rooms, tables, np.arange(len(tables.rank_N)))


@dataclass(frozen=True, eq=False)
class Messages:
    """What one rank sends in the dispatch, and what arrives there: `messages_of` makes it.

    Each part is worked out when it is first asked for, as the split is what the device waits for.
    """

    _counts_RE: Int64Array
    _plan: LayerPlan
    _tables: QuotaTables
    _rooms: _Rooms
    _rank: int
    _split_N: Int64Array

    @cached_property
    def split_EI(self) -> Int64Array:
        """(E, I) int64, the rank's tokens for each instance, as `split_source` returns them."""
        width = self._plan.instance_rank_EI.shape[1]
        return _split(self._counts_RE[self._rank], self._split_N, self._tables, width)

    @cached_property
    def sent_R(self) -> Int64Array:
        """(R,) int64, the rank's tokens for each rank."""
        tables, mine_E = self._tables, self._counts_RE[self._rank]
        sent_R = np.bincount(tables.owner_E, mine_E * tables.single_E, tables.num_ranks)
        sent_R += np.bincount(tables.rank_N, self._split_N, tables.num_ranks)
        return sent_R.astype(np.int64)

    @cached_property
    def received_RS(self) -> Int64Array:
        """(R, S) int64, each source rank's tokens for each of the rank's slots."""
        tables, plan, rank = self._tables, self._plan, self._rank
        slot_expert_S = plan.slot_expert_RS[rank]
        received_RS = np.zeros((plan.num_ranks, plan.num_slots), dtype=np.int64)
        np.multiply(self._counts_RE[:, slot_expert_S], slot_expert_S != EMPTY, out=received_RS)
        at_K = np.flatnonzero(tables.rank_N == rank)
        if len(at_K):
            expert_K = tables.expert_X[tables.expert_N[at_K]]
            physical_K = plan.instance_physical_EI[expert_K, tables.column_N[at_K]]
            slot_K = physical_K - rank * plan.num_slots
            received_RS[:, slot_K] = _split_sources(self._counts_RE, self._rooms, tables, at_K)
        return received_RS


def messages_of(
    counts_RE: Int64Array,
    quota_EI: Int64Array,
    plan: LayerPlan,
    node_of_rank: Sequence[int],
    rank: int,
) -> Messages:
    """Return what a rank sends and receives, as `split_source` of all ranks says.

    Its arguments are those of `split_source`. Needs no array of [R, E, I]: of the other sources
    only what comes to this rank's slots is worked out.
    """
    tables = quota_tables(plan, node_of_rank)
    rooms = _rooms(counts_RE, quota_EI, tables)
    split_N = _sent(counts_RE, rooms, tables, rank)
    return Messages(counts_RE, plan, tables, rooms, rank, split_N)


def _split(
    tokens_E: Int64Array, split_N: Int64Array, tables: QuotaTables, width: int
) -> Int64Array:
    """(E, width) a source's tokens for each instance; an expert's only one takes them all."""
    split_EI = np.zeros((len(tokens_E), width), dtype=np.int64)
    split_EI[:, 0] = tokens_E
    split_EI[tables.expert_X[tables.expert_N], tables.column_N] = split_N
    return split_EI


@dataclass(frozen=True, eq=False)
class _Rooms:
    """The instances' quotas, as what is sent from near and far fills them up.

    A source's tokens for an expert fill first the instance on its rank, then those on its node,
    then any: each time all sources' tokens are laid end to end against the instances' room.

    Attributes:
        local_N: (N,) int64, tokens of the instance's own rank.
        near_N, near_start_N: (N,) int64, room for other tokens of its node, and where that begins.
        far_N, far_start_N: (N,) int64, what is then left for any token, and where that begins.
        sent_MX: (M, X) int64, tokens of each node without an instance with quota on their rank.
        room_MX: (M, X) int64, what its instances have for them.
    """

    local_N: Int64Array
    near_N: Int64Array
    near_start_N: Int64Array
    far_N: Int64Array
    far_start_N: Int64Array
    sent_MX: Int64Array
    room_MX: Int64Array


def _rooms(counts_RE: Int64Array, quota_EI: Int64Array, tables: QuotaTables) -> _Rooms:
    expert_N, node_N = tables.expert_N, tables.node_N
    quota_N = quota_EI[tables.expert_X[expert_N], tables.column_N]
    local_N = np.minimum(counts_RE[tables.rank_N, tables.expert_X[expert_N]], quota_N)
    local_N = local_N.astype(np.int64)
    sent_MX = _sum_by_node(counts_RE, tables)[:, tables.expert_X]
    np.subtract.at(sent_MX, (node_N, expert_N), local_N)
    near_N = quota_N - local_N
    near_start_N = _room_before(near_N, tables)
    room_MX = np.zeros_like(sent_MX)
    np.add.at(room_MX, (node_N, expert_N), near_N)
    far_N = near_N - _overlap(0, sent_MX[node_N, expert_N], near_start_N, near_N)
    run_N = np.cumsum(far_N) - far_N
    far_start_N = run_N - run_N[tables.first_X][expert_N]
    return _Rooms(local_N, near_N, near_start_N, far_N, far_start_N, sent_MX, room_MX)


def _sent(counts_RE: Int64Array, rooms: _Rooms, tables: QuotaTables, source: int) -> Int64Array:
    """(N,) tokens of the source for each instance."""
    expert_N = tables.expert_N
    node, is_own_N = int(tables.node_R[source]), tables.rank_N == source
    start = tables.node_start[node]
    ahead = tables.by_node_R[start : int(np.flatnonzero(tables.by_node_R == source)[0])]
    is_ahead_R = np.zeros(tables.num_ranks, dtype=bool)
    is_ahead_R[ahead] = True

    def left(tokens_E: Int64Array, is_here_N: Int64Array) -> Int64Array:
        kept_X = np.bincount(expert_N, rooms.local_N * is_here_N, len(tables.first_X))
        left_X: Int64Array = tokens_E[tables.expert_X] - kept_X.astype(np.int64)
        return left_X

    mine_X = left(counts_RE[source].astype(np.int64), is_own_N)
    before_X = left(counts_RE[ahead].sum(axis=0, dtype=np.int64), is_ahead_R[tables.rank_N])
    # 1. Own rank. 2. Own node: its sources in rank order. 3. Anywhere: node after node.
    split_N = np.where(is_own_N, rooms.local_N, 0)
    near_N = _overlap(before_X[expert_N], mine_X[expert_N], rooms.near_start_N, rooms.near_N)
    split_N += (tables.node_N == node) * near_N
    far_MX = np.maximum(rooms.sent_MX[:node] - rooms.room_MX[:node], 0)
    room_X = rooms.room_MX[node]
    before_far_X = far_MX.sum(axis=0) + np.maximum(before_X - room_X, 0)
    far_X = mine_X - _overlap(before_X, mine_X, 0, room_X)
    split_N += _overlap(before_far_X[expert_N], far_X[expert_N], rooms.far_start_N, rooms.far_N)
    return split_N


def _split_sources(
    counts_RE: Int64Array, rooms: _Rooms, tables: QuotaTables, at_K: Int64Array
) -> Int64Array:
    """(R, K) tokens of every source for some instances, `at_K`, of replicated experts."""
    # Of each expert once: u_K says which of them an instance's is.
    x_U, u_K = np.unique(tables.expert_N[at_K], return_inverse=True)
    number_X = np.full(len(tables.first_X), EMPTY)
    number_X[x_U] = np.arange(len(x_U))
    # What of each source's tokens does not stay on its rank; as everything below, by node.
    left_RU = counts_RE[:, tables.expert_X[x_U]].astype(np.int64)
    u_N = number_X[tables.expert_N]
    is_asked_N = u_N != EMPTY
    left_RU[tables.rank_N[is_asked_N], u_N[is_asked_N]] -= rooms.local_N[is_asked_N]
    left_RU, node_R = left_RU[tables.by_node_R], tables.node_R[tables.by_node_R]
    run_RU = np.cumsum(left_RU, axis=0) - left_RU
    before_RU = run_RU - run_RU[tables.node_start][node_R]

    is_near_RK = node_R[:, None] == tables.node_N[at_K]
    near_start_K, near_K = rooms.near_start_N[at_K], rooms.near_N[at_K]
    split_RK: Int64Array = _overlap(before_RU[:, u_K], left_RU[:, u_K], near_start_K, near_K)
    split_RK *= is_near_RK
    room_MU = rooms.room_MX[:, x_U]
    far_MU = np.maximum(rooms.sent_MX[:, x_U] - room_MU, 0)
    if far_MU.any():
        room_RU, ahead_MU = room_MU[node_R], np.cumsum(far_MU, axis=0) - far_MU
        before_far_RU = ahead_MU[node_R] + np.maximum(before_RU - room_RU, 0)
        far_RU = left_RU - _overlap(before_RU, left_RU, 0, room_RU)
        far_start_K, far_K = rooms.far_start_N[at_K], rooms.far_N[at_K]
        split_RK += _overlap(before_far_RU[:, u_K], far_RU[:, u_K], far_start_K, far_K)
    if not tables.is_by_node:
        split_RK = split_RK[np.argsort(tables.by_node_R)]
    split_RK[tables.rank_N[at_K], np.arange(len(at_K))] += rooms.local_N[at_K]
    return split_RK


def _room_before(room_N: Int64Array, tables: QuotaTables) -> Int64Array:
    """(N,) room of the instances before each one within its expert and node."""
    run_N = np.concatenate([[0], np.cumsum(room_N[tables.by_node_N])])
    place_N = np.empty_like(room_N)
    place_N[tables.by_node_N] = np.arange(len(room_N))
    before_N: Int64Array = run_N[place_N] - run_N[tables.group_start_N]
    return before_N


def _overlap(
    start_a: Int64Array | int,
    length_a: Int64Array,
    start_b: Int64Array | int,
    length_b: Int64Array,
) -> Int64Array:
    """Length of the overlap of the intervals [start, start + length)."""
    end = np.minimum(start_a + length_a, start_b + length_b)
    overlap: Int64Array = np.maximum(end - np.maximum(start_a, start_b), 0)
    return overlap

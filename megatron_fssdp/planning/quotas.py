# SPDX-License-Identifier: Apache-2.0

"""Quotas: how many tokens of each expert every instance computes, and whose.

Whole numbers only: every rank computes the same quotas from the same counts. The paper keeps a
token on its rank or node wherever an instance is (section 4.4), which can overload that rank;
here the fullest rank comes first, locality second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    split_EI = np.zeros_like(quota_EI)
    split_EI[:, 0] = counts_RE[source]
    tables = quota_tables(plan, node_of_rank)
    if not len(tables.expert_X):
        return split_EI
    expert_N, node = tables.expert_N, int(tables.node_R[source])
    room_N = quota_EI[tables.expert_X[expert_N], tables.column_N]

    # 1. Own rank.
    local_N = np.minimum(counts_RE[tables.rank_N, tables.expert_X[expert_N]], room_N)
    local_N = local_N.astype(np.int64)
    left = _without_local(counts_RE, local_N, tables, source)
    room_N = room_N - local_N
    split_N = np.where(tables.rank_N == source, local_N, 0)

    # 2. Own node: its sources' tokens laid end to end in rank order, against its instances' room.
    offset_N = _room_before(room_N, tables)
    room_MX = np.zeros_like(left.sent_MX)
    np.add.at(room_MX, (tables.node_N, expert_N), room_N)
    is_near_N = tables.node_N == node
    mine_X, before_X = left.mine_X, left.before_X
    split_N += is_near_N * _overlap(before_X[expert_N], mine_X[expert_N], offset_N, room_N)
    room_N = room_N - _overlap(0, left.sent_MX[tables.node_N, expert_N], offset_N, room_N)

    # 3. Anywhere: what the nodes could not keep, node after node.
    far_MX = np.maximum(left.sent_MX - room_MX, 0)
    before_far_X = far_MX[:node].sum(axis=0) + np.maximum(before_X - room_MX[node], 0)
    far_X = mine_X - _overlap(before_X, mine_X, 0, room_MX[node])
    run_N = np.cumsum(room_N) - room_N
    offset_N = run_N - run_N[tables.first_X][expert_N]
    split_N += _overlap(before_far_X[expert_N], far_X[expert_N], offset_N, room_N)

    split_EI[tables.expert_X[expert_N], tables.column_N] = split_N
    return split_EI


@dataclass(frozen=True)
class _Left:
    """Tokens for replicated experts that have no instance with quota on their own rank.

    Attributes:
        sent_MX: (M, X) int64, of each node.
        mine_X: (X,) int64, of the source.
        before_X: (X,) int64, of the source's node, of ranks before the source.
    """

    sent_MX: Int64Array
    mine_X: Int64Array
    before_X: Int64Array


def _without_local(
    counts_RE: Int64Array, local_N: Int64Array, tables: QuotaTables, source: int
) -> _Left:
    expert_N, rank_N = tables.expert_N, tables.rank_N
    sent_MX = _sum_by_node(counts_RE, tables)[:, tables.expert_X]
    np.subtract.at(sent_MX, (tables.node_N, expert_N), local_N)
    start = tables.node_start[tables.node_R[source]]
    at = int(np.flatnonzero(tables.by_node_R == source)[0])
    ahead = tables.by_node_R[start:at]
    mine_X = counts_RE[source, tables.expert_X].astype(np.int64)
    before_X = counts_RE[ahead].sum(axis=0, dtype=np.int64)[tables.expert_X]
    is_ahead_R = np.zeros(tables.num_ranks, dtype=bool)
    is_ahead_R[ahead] = True
    num_replicated = len(tables.expert_X)
    for values_X, is_here_N in ((mine_X, rank_N == source), (before_X, is_ahead_R[rank_N])):
        here = np.bincount(expert_N, weights=local_N * is_here_N, minlength=num_replicated)
        values_X -= here.astype(np.int64)
    return _Left(sent_MX, mine_X, before_X)


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

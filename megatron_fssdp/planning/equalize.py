# SPDX-License-Identifier: Apache-2.0

"""Make ranks equally full by moving tokens between the instances of experts.

[Note: why this is the least possible] A quota vector is settled when no expert has tokens on a
rank that is more than one token fuller than another of that expert's ranks. Take the fullest rank
of a settled vector, all ranks reached from it through experts with tokens there, and so on: each
step loses at most one token of load, and there are at most as many steps as replicas. Experts with
tokens on these ranks have no instance outside them, so no split can bring their mean down: the
fullest rank is within one token per replica of the least possible.

Three kinds of steps lead there. Spreading evens out neighbours, all experts at once: cheap, and
slow only over long distances. Levelling a forest (see `quota_tables`) does the rest in one step
if no edge is asked for more tokens than it has, which is likely after spreading; among many ranks
it is not, and relaxing comes first. Sweeping splits one expert after the other: slow, but it always
gets there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.quota_tables import Forest, QuotaTables

BoolArray = npt.NDArray[np.bool_]

# Steps of spreading inside the nodes, then over all ranks, before the first forest, each overdone
# by half: measured on plans with all slots filled (E = 64 and 256, R = 16 and 64, loads that
# drifted by 3 and 10 %), they take the levelling steps from 2-10 to 1-2.
NEAR_SPREADS = 6
SPREADS = 6
# Times a forest may be cut up before its remaining trees are left as they are.
PASSES = 3
# Steps of relaxing, at most, and the part of a step that is taken again in the next.
RELAXATIONS = 48
MOMENTUM = 0.3
# Forest steps after which a sweep is due: the forests have had two turns each.
TURNS_PER_SWEEP = 2
FAR = 1 << 60


def instance_loads(quota_N: Int64Array, base_R: Int64Array, tables: QuotaTables) -> Int64Array:
    """Return the (R,) int64 tokens of each rank: `base_R` and its replicated experts'."""
    # Sums of whole numbers below 2^53: exact as floats.
    added_R = np.bincount(tables.rank_N, weights=quota_N, minlength=tables.num_ranks)
    return base_R + added_R.astype(np.int64)


def equalize(
    quota_N: Int64Array,
    base_R: Int64Array,
    tables: QuotaTables,
    goal: int,
    steps: int,
    is_relaxed: bool = False,
) -> Int64Array:
    """Move tokens until no rank has more than `goal`, or the quotas are settled.

    Args:
        quota_N: (N,) int64, tokens of each instance to begin with.
        base_R: (R,) int64, tokens of experts without replicas.
        tables: of the layer's plan; with at least one replica.
        goal: tokens of the fullest rank that are good enough.
        steps: the most steps. A finite number can stop short of the optimum; every step leaves
            valid quotas.
        is_relaxed: relax before the first forest.

    Returns:
        (N,) int64 quotas; each expert's sum is unchanged.
    """
    num_forests = len(tables.forests)
    if num_forests > 1:
        quota_N = spread_near(quota_N, base_R, tables)
        quota_N = spread(quota_N, base_R, tables)
        if is_relaxed:
            quota_N = relax(quota_N, base_R, tables, goal)
    load_R = instance_loads(quota_N, base_R, tables)
    for step in range(steps):
        if load_R.max() <= goal or _is_settled(quota_N, load_R, tables):
            break
        turn = step % (num_forests * TURNS_PER_SWEEP + 1)
        if turn < num_forests * TURNS_PER_SWEEP:
            forest = tables.forests[turn % num_forests]
            quota_N = level_forest(quota_N, base_R, load_R, tables, forest)
        else:
            quota_N = sweep(quota_N, load_R, tables)
        load_R = instance_loads(quota_N, base_R, tables)
    return quota_N


def _is_settled(quota_N: Int64Array, load_R: Int64Array, tables: QuotaTables) -> bool:
    load_N = load_R[tables.rank_N]
    low_X = np.minimum.reduceat(load_N, tables.first_X)
    is_loose_N = (quota_N > 0) & (load_N > low_X[tables.expert_N] + 1)
    return not bool(is_loose_N.any())


def spread_near(quota_N: Int64Array, base_R: Int64Array, tables: QuotaTables) -> Int64Array:
    """Spread tokens over the ranks of a node only, as `spread` does over all; no token leaves it.

    What is even inside the nodes need not be evened out across them.
    """
    near_N, first_G, group_K = tables.near_N, tables.near_first_G, tables.near_group_K
    if not len(near_N):
        return quota_N
    rank_K, busy_K = tables.rank_N[near_N], tables.near_busy_K * 2
    near_K = quota_N[near_N]
    rest_R = instance_loads(quota_N, base_R, tables)
    rest_R = rest_R - np.bincount(rank_K, weights=near_K, minlength=len(rest_R)).astype(np.int64)
    total_G: Int64Array = np.add.reduceat(near_K, first_G)
    count_G = np.bincount(group_K)
    for _ in range(NEAR_SPREADS):
        load_R = rest_R + np.bincount(rank_K, weights=near_K, minlength=len(rest_R)).astype(
            np.int64
        )
        load_K = load_R[rank_K]
        mean_G = np.add.reduceat(load_K, first_G) // count_G
        moved_K = np.maximum(near_K + (mean_G[group_K] - load_K) * 3 // busy_K, 0)
        moved_K[first_G] = 0
        head_G = total_G - np.add.reduceat(moved_K, first_G)
        moved_K[first_G] = head_G
        near_K = np.where((head_G >= 0)[group_K], moved_K, near_K)
    quota_N = quota_N.copy()
    quota_N[near_N] = near_K
    return quota_N


def spread(quota_N: Int64Array, base_R: Int64Array, tables: QuotaTables) -> Int64Array:
    """Move each expert's tokens towards the mean load of its ranks, all experts at once.

    A rank divides the step by its number of replicated experts. The owner takes what is left; an
    expert whose owner would need more tokens than it has waits.
    """
    total_X: Int64Array = np.add.reduceat(quota_N, tables.first_X)
    for _ in range(SPREADS):
        load_N = instance_loads(quota_N, base_R, tables)[tables.rank_N]
        mean_X = np.add.reduceat(load_N, tables.first_X) // tables.count_X
        step_N = (mean_X[tables.expert_N] - load_N) * 3 // (tables.busy_N * 2)
        moved_N = np.maximum(quota_N + step_N, 0)
        moved_N[tables.first_X] = 0
        owner_X = total_X - np.add.reduceat(moved_N, tables.first_X)
        moved_N[tables.first_X] = owner_X
        quota_N = np.where((owner_X >= 0)[tables.expert_N], moved_N, quota_N)
    return quota_N


def relax(quota_N: Int64Array, base_R: Int64Array, tables: QuotaTables, goal: int) -> Int64Array:
    """Spread with momentum until no rank has more than the goal, or for `RELAXATIONS` steps.

    Each expert's tokens are scaled to what it has; the owner takes what rounding leaves. Among many
    ranks this takes fewer steps than forests, whose long paths ask single edges for too much. Sums
    are of whole numbers that floats hold exactly; from 2^50 tokens on they may not.
    """
    if quota_N.sum() >> 50:
        return quota_N
    first_X, expert_N = tables.first_X, tables.expert_N
    total_X = np.add.reduceat(quota_N, first_X).astype(np.float64)
    step_N = 1.5 / tables.busy_N
    now_N, gone_N = quota_N.astype(np.float64), np.zeros(len(quota_N))
    for _ in range(RELAXATIONS):
        load_R = base_R + np.bincount(tables.rank_N, weights=now_N, minlength=tables.num_ranks)
        if load_R.max() <= goal:
            break
        load_N = load_R[tables.rank_N]
        mean_X = np.add.reduceat(load_N, first_X) / tables.count_X
        moved_N = now_N + np.floor((mean_X[expert_N] - load_N) * step_N + MOMENTUM * gone_N)
        moved_N = np.maximum(moved_N, 0)
        scale_X = total_X / np.maximum(np.add.reduceat(moved_N, first_X), 1)
        moved_N = np.floor(moved_N * scale_X[expert_N])
        moved_N[first_X] += total_X - np.add.reduceat(moved_N, first_X)
        gone_N, now_N = moved_N - now_N, moved_N
    return now_N.astype(np.int64)


def level_forest(
    quota_N: Int64Array,
    base_R: Int64Array,
    load_R: Int64Array,
    tables: QuotaTables,
    forest: Forest,
) -> Int64Array:
    """Make all ranks of each tree equally full (to one token) by moving tokens along its edges.

    An edge without tokens is cut unless its rank has room for the expert. An edge that would need
    fewer than none gives its tokens to another instance and is cut, and the smaller trees are
    levelled instead. A tree that still asks for the impossible after `PASSES` is left alone.
    """
    load_N = load_R[tables.rank_N]
    top_X = np.maximum.reduceat(np.where(quota_N > 0, load_N, -1), tables.first_X)
    cut_N = (quota_N == 0) & (load_N >= top_X[tables.expert_N])
    for number in range(PASSES):
        if number:
            quota_N = _give_up_cut(quota_N, cut_N, tables)
            load_R = instance_loads(quota_N, base_R, tables)
        root_V = _roots(cut_N, forest)
        need_R = _needs(root_V[forest.preorder_R], load_R[forest.preorder_R], len(root_V))
        below = np.concatenate([[0], np.cumsum(need_R)])
        moved_N: Int64Array = forest.sign_N * (below[forest.to_N] - below[forest.from_N])
        short_N = quota_N + moved_N < 0
        if not short_N.any():
            return quota_N + moved_N
        cut_N |= short_N
    root_N = root_V[tables.rank_N]
    short_V = np.bincount(root_N, weights=short_N, minlength=len(root_V)) > 0
    levelled_N: Int64Array = np.where(short_V[root_N], quota_N, quota_N + moved_N)
    return levelled_N


def _roots(cut_N: BoolArray, forest: Forest) -> Int64Array:
    """(V,) the root of each node's tree, without the cut edges."""
    # The root's own edge has number N, which is always cut.
    is_cut_V = np.append(cut_N, True)[forest.parent_edge_V]
    root_V = np.where(is_cut_V, np.arange(len(is_cut_V)), forest.parent_V)
    for _ in range(forest.doublings):
        root_V = root_V[root_V]
    return root_V


def _needs(tree_R: Int64Array, load_R: Int64Array, num_trees: int) -> Int64Array:
    """(R,) tokens that each rank lacks of its tree's mean; the remainder goes to the first."""
    by_tree = np.argsort(tree_R, kind="stable")
    tree = tree_R[by_tree]
    size_T = np.bincount(tree_R, minlength=num_trees)
    total_T = np.bincount(tree_R, weights=load_R, minlength=num_trees).astype(np.int64)
    position = np.arange(len(tree)) - (np.cumsum(size_T) - size_T)[tree]
    mean, rest = np.divmod(total_T[tree], size_T[tree])
    need_R = np.empty_like(load_R)
    need_R[by_tree] = mean + (position < rest)
    return need_R - load_R


def _give_up_cut(quota_N: Int64Array, cut_N: BoolArray, tables: QuotaTables) -> Int64Array:
    """Move the tokens on cut edges to the expert's first instance that is not cut."""
    # An expert without tokens may have all its edges cut; it has nothing to move.
    number_N = np.where(cut_N, len(quota_N) - 1, np.arange(len(quota_N)))
    heir_X = np.minimum.reduceat(number_N, tables.first_X)
    given_X = np.add.reduceat(np.where(cut_N, quota_N, 0), tables.first_X)
    quota_N = np.where(cut_N, 0, quota_N)
    np.add.at(quota_N, heir_X, given_X)
    return quota_N


def sweep(quota_N: Int64Array, load_R: Int64Array, tables: QuotaTables) -> Int64Array:
    """Split each expert anew, the lowest rank first, given the others; a color class at a time."""
    quota_N = np.append(quota_N, 0)
    rank_N = np.append(tables.rank_N, tables.num_ranks)
    load_R = np.append(load_R, 0)
    for instance_CI in tables.colors:
        is_pad = instance_CI == len(tables.rank_N)
        rank_CI, old_CI = rank_N[instance_CI], quota_N[instance_CI]
        other_CI = np.where(is_pad, FAR, load_R[rank_CI] - old_CI)
        new_CI = _pour(other_CI, old_CI.sum(axis=1))
        quota_N[instance_CI] = new_CI
        load_R[rank_CI] = np.where(is_pad, 0, other_CI + new_CI)
    return quota_N[:-1]


def _pour(level_CI: Int64Array, tokens_C: Int64Array) -> Int64Array:
    """Pour whole tokens into each row's vessels, lowest level first; FAR is no vessel."""
    order_CI = np.argsort(level_CI, axis=1, kind="stable")
    level_CI = np.take_along_axis(level_CI, order_CI, axis=1)
    is_vessel = level_CI < FAR
    sum_CI = np.cumsum(np.where(is_vessel, level_CI, 0), axis=1)
    count_I = np.arange(1, level_CI.shape[1] + 1)
    # The first k vessels are used if raising them to the k-th's level takes no more than all.
    used_CI = is_vessel & (level_CI * count_I - sum_CI <= tokens_C[:, None])
    used_C = used_CI.sum(axis=1)
    below_C = np.take_along_axis(sum_CI, used_C[:, None] - 1, axis=1)[:, 0]
    mean_C, rest_C = np.divmod(tokens_C + below_C, used_C)
    poured_CI = mean_C[:, None] - level_CI + (count_I <= rest_C[:, None])
    result_CI = np.empty_like(level_CI)
    np.put_along_axis(result_CI, order_CI, np.where(used_CI, poured_CI, 0), axis=1)
    return result_CI

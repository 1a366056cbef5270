"""Quotas: how many tokens of each expert every instance computes, and whose.

Whole numbers only: every rank computes the same quotas from the same counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.planning.plan import EMPTY, Int64Array, LayerPlan

MAX_SWEEPS = 200


def rank_loads(quota_EI: Int64Array, plan: LayerPlan) -> Int64Array:
    """Return the (R,) int64 tokens that each rank computes under these quotas."""
    valid = plan.instance_rank_EI != EMPTY
    load_R = np.zeros(plan.num_ranks, dtype=np.int64)
    np.add.at(load_R, plan.instance_rank_EI[valid], quota_EI[valid])
    return load_R


def balance(counts_RE: Int64Array, plan: LayerPlan, node_of_rank: Sequence[int]) -> Int64Array:
    """Split every expert's tokens over its instances so that the fullest rank has the fewest.

    Args:
        counts_RE: (R, E) int64, tokens of each source rank for each expert.
        plan: where the instances are.
        node_of_rank: (R,) the node of each rank.

    Returns:
        (E, I) int64, tokens of each expert (of all sources) that each instance computes; zero
        where `instance_rank_EI` is EMPTY. Each row sums to the expert's tokens.
    """
    del node_of_rank
    load_E = counts_RE.sum(axis=0, dtype=np.int64)
    rank_EI = plan.instance_rank_EI
    quota_EI = np.zeros(rank_EI.shape, dtype=np.int64)
    quota_EI[:, 0] = load_E
    load_R = rank_loads(quota_EI, plan)
    replicated = np.flatnonzero((rank_EI != EMPTY).sum(axis=1) > 1)
    for _ in range(MAX_SWEEPS):
        changed = False
        for expert in replicated:
            size = int((rank_EI[expert] != EMPTY).sum())
            ranks = rank_EI[expert, :size]
            old = quota_EI[expert, :size].copy()
            others = load_R[ranks] - old
            new = _fill(others, int(load_E[expert]))
            if (new != old).any():
                changed = True
                quota_EI[expert, :size] = new
                load_R[ranks] = others + new
        if not changed:
            break
    return quota_EI


def _fill(others: Int64Array, tokens: int) -> Int64Array:
    """Pour whole tokens into vessels already filled to `others`, lowest first."""
    order = np.argsort(others, kind="stable")
    level = others[order]
    count = np.arange(1, len(level) + 1)
    room = level * count - np.cumsum(level)
    used = int(np.flatnonzero(room <= tokens)[-1]) + 1
    share, remainder = divmod(tokens + int(level[:used].sum()), used)
    filled = np.zeros(len(level), dtype=np.int64)
    filled[:used] = share - level[:used]
    filled[:remainder] += 1
    result = np.empty(len(level), dtype=np.int64)
    result[order] = filled
    return result


def split_source(
    counts_RE: Int64Array,
    quota_EI: Int64Array,
    plan: LayerPlan,
    node_of_rank: Sequence[int],
    source: int,
) -> Int64Array:
    """Split one source rank's tokens over the instances, as the quotas say.

    Tokens stay on their rank where it has an instance with quota left, else on their node; the
    rest fill what is left in rank order. All sources together meet the quotas exactly.

    Args:
        counts_RE: (R, E) int64, tokens of each source rank for each expert.
        quota_EI: (E, I) int64, as `balance` returns it for these counts.
        plan: where the instances are.
        node_of_rank: (R,) the node of each rank.
        source: the rank whose tokens to split.

    Returns:
        (E, I) int64; each row sums to `counts_RE[source]`.
    """
    node_R = np.asarray(node_of_rank)
    rank_EI = plan.instance_rank_EI
    expert = np.flatnonzero((rank_EI != EMPTY).sum(axis=1) > 1)
    split_EI = np.zeros_like(quota_EI)
    split_EI[:, 0] = counts_RE[source]
    # Ranks in the order of their nodes, so that a node is one interval of every running sum.
    by_node_R = np.argsort(node_R, kind="stable")
    sent_RX = np.array(counts_RE[:, expert], dtype=np.int64)
    rank_XI, quota_XI = rank_EI[expert], quota_EI[expert].copy()
    used_XI = rank_XI != EMPTY
    node_XI = np.where(used_XI, node_R[rank_XI], EMPTY)

    # 1. Own rank.
    column_X1 = np.arange(len(expert))[:, None]
    local_XI = np.where(used_XI, np.minimum(sent_RX[rank_XI, column_X1], quota_XI), 0)
    quota_XI -= local_XI
    row, position = np.nonzero(used_XI)
    sent_RX[rank_XI[row, position], row] -= local_XI[row, position]
    split_XI = np.where(rank_XI == source, local_XI, 0)

    # 2. Own node: sources and instances of a node laid end to end, each in its order.
    left_RX, room_XI = sent_RX[by_node_R], quota_XI
    node_sorted_R = node_R[by_node_R]
    start_RX = np.cumsum(left_RX, axis=0) - left_RX
    first_R = np.searchsorted(node_sorted_R, node_sorted_R)
    within_RX = start_RX - start_RX[first_R]
    same_XII = (node_XI[:, :, None] == node_XI[:, None, :]) & used_XI[:, :, None]
    before_II = np.tri(rank_XI.shape[1], k=-1, dtype=np.int64)
    offset_XI = (same_XII * before_II * room_XI[:, None, :]).sum(axis=2)
    node_room_XN = np.zeros((len(expert), int(node_R.max()) + 1), dtype=np.int64)
    np.add.at(node_room_XN, (row, node_XI[row, position]), room_XI[row, position])
    node_left_XN = np.zeros_like(node_room_XN)
    np.add.at(node_left_XN.T, node_sorted_R, left_RX)
    mine = int(np.flatnonzero(by_node_R == source)[0])
    in_node_XI = _overlap(within_RX[mine][:, None], left_RX[mine][:, None], offset_XI, room_XI) * (
        node_XI == node_R[source]
    )
    split_XI += in_node_XI
    taken_RX = _overlap(within_RX, left_RX, 0, node_room_XN.T[node_sorted_R])
    node_left_XI = np.take_along_axis(node_left_XN, np.maximum(node_XI, 0), axis=1)
    given_XI = np.where(used_XI, _overlap(0, node_left_XI, offset_XI, room_XI), 0)

    # 3. Anywhere.
    left_RX = left_RX - taken_RX
    room_XI = room_XI - given_XI
    start_RX = np.cumsum(left_RX, axis=0) - left_RX
    offset_XI = np.cumsum(room_XI, axis=1) - room_XI
    split_XI += _overlap(start_RX[mine][:, None], left_RX[mine][:, None], offset_XI, room_XI)
    split_EI[expert] = split_XI
    return split_EI


def _overlap(
    start_a: Int64Array | int,
    length_a: Int64Array,
    start_b: Int64Array | int,
    length_b: Int64Array,
) -> Int64Array:
    """Length of the overlap of intervals [start, start + length)."""
    end = np.minimum(start_a + length_a, start_b + length_b)
    overlap: Int64Array = np.maximum(end - np.maximum(start_a, start_b), 0)
    return overlap

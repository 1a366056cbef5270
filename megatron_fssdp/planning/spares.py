"""Spare replicas: what the slots that are left can do against drift.

The fewest replicas that balance the predicted loads have nothing left when the loads differ from
the prediction. Spares make the ranks one well connected pool. They are sent while the network would
idle, so they cost bytes, not time, within the budget.

All layers at once, in whole-array steps: this is called for every layer of a model.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.plan import Int64Array

# More spares of one expert than this are not considered in one call.
MOST_OF_ONE = 4
# Times that copies and slots that do not fit together are paired anew.
PASSES = 3


def place_spares(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    replicas_N3: Int64Array,
    free_LR: Int64Array,
    import_LR: Int64Array,
    least_tokens: int,
) -> Int64Array:
    """Fill free slots with the experts that have the most tokens per instance.

    Slots are filled where a rank has most of them free, and among equals on the ranks that
    computed most tokens of others: these have most to give back when their own load rises.

    Args:
        load_LE: (L, E) int64, the predicted tokens.
        owner_LE: (L, E) int64.
        replicas_N3: (N, 3) int64, layer, expert and rank of the replicas there are.
        free_LR: (L, R) int64, slots to fill; 0 for a layer that needs none.
        import_LR: (L, R) int64, tokens that each rank computes of other ranks' experts.
        least_tokens: tokens per instance below which a spare is not worth its bytes.

    Returns:
        (N, 3) int64 spares. A few slots may stay empty.
    """
    num_experts = load_LE.shape[1]
    num_ranks = free_LR.shape[1]
    wanted_L = free_LR.sum(axis=1)
    most = int(wanted_L.max(initial=0))
    if most == 0:
        return np.zeros((0, 3), dtype=np.int64)
    expert_LW, is_wanted_LW = _hottest(load_LE, replicas_N3, wanted_L, num_ranks, least_tokens)
    rank_LW = _slots(free_LR, import_LR, expert_LW.shape[1])
    layer, at = np.nonzero(is_wanted_LW)
    expert, rank = expert_LW[layer, at], rank_LW[layer, at]

    owned = np.arange(owner_LE.size) * num_ranks + owner_LE.ravel()
    is_held = np.zeros(owner_LE.size * num_ranks, dtype=bool)
    is_held[owned] = True
    is_held[
        (replicas_N3[:, 0] * num_experts + replicas_N3[:, 1]) * num_ranks + replicas_N3[:, 2]
    ] = True
    placed = []
    for number in range(PASSES):
        code = (layer * num_experts + expert) * num_ranks + rank
        fits = np.zeros(len(code), dtype=bool)
        fits[np.unique(code, return_index=True)[1]] = True
        fits &= ~is_held[code]
        is_held[code[fits]] = True
        placed.append(np.stack([layer[fits], expert[fits], rank[fits]], axis=1))
        layer, expert, rank = layer[~fits], expert[~fits], rank[~fits]
        # Pair what is left the other way round, then in a mixed order, within its layer.
        index = np.arange(len(layer))
        mixed = -index if number == 0 else index * 7919 % max(len(layer), 1)
        rank = rank[np.lexsort((mixed, layer))]
    return np.concatenate(placed)


def _hottest(
    load_LE: Int64Array,
    replicas_N3: Int64Array,
    wanted_L: Int64Array,
    num_ranks: int,
    least_tokens: int,
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Choose each layer's experts for its spares, W at most, most tokens per instance first.

    Returns:
        (L, W) int64 experts, (L, W) bool where there is one.
    """
    num_layers, num_experts = load_LE.shape
    pair = replicas_N3[:, 0] * num_experts + replicas_N3[:, 1]
    count_LE = 1 + np.bincount(pair, minlength=load_LE.size).reshape(load_LE.shape)
    # Column j: the expert's tokens per instance when it already has j spares.
    copies = min(MOST_OF_ONE, num_ranks)
    count_LEJ = count_LE[:, :, None] + np.arange(copies)
    share_LEJ = load_LE[:, :, None] // count_LEJ
    share_LEJ[(count_LEJ >= num_ranks) | (share_LEJ < max(least_tokens, 1))] = 0
    share = share_LEJ.reshape(num_layers, -1)
    most = min(int(wanted_L.max()), share.shape[1])
    # Made distinct, lower experts first, so that the partition is the same everywhere.
    key = share * share.shape[1] - np.arange(share.shape[1])
    top_LW = np.argpartition(-key, most - 1, axis=1)[:, :most]
    order_LW = np.take_along_axis(
        top_LW, np.argsort(-np.take_along_axis(key, top_LW, axis=1), axis=1), axis=1
    )
    is_wanted_LW = np.arange(most) < wanted_L[:, None]
    is_wanted_LW &= np.take_along_axis(share, order_LW, axis=1) > 0
    return order_LW // copies, is_wanted_LW


def _slots(free_LR: Int64Array, import_LR: Int64Array, number: int) -> Int64Array:
    """List `number` free slots of each layer as (L, W) ranks, in the order of filling."""
    by_import_LR = np.argsort(-import_LR, axis=1, kind="stable")
    free_LR = np.take_along_axis(free_LR, by_import_LR, axis=1)
    level_M = np.arange(int(free_LR.max()), 0, -1)
    is_free = (free_LR[:, None, :] >= level_M[:, None]).reshape(len(free_LR), -1)
    order_LW = np.argsort(~is_free, axis=1, kind="stable")[:, :number]
    return np.take_along_axis(by_import_LR, order_LW % free_LR.shape[1], axis=1)

"""Spare replicas: what the slots that are left can do against drift and for traffic.

The fewest replicas that balance the predicted loads have nothing left when the loads differ from
the prediction. Spares make the ranks one well connected pool, and keep tokens on their node. They
are sent while the network would idle, so they cost bytes, not time, within the budget.

Half of a node's free slots take the hottest experts that the node lacks: their tokens stay on it.
The other half takes the experts with most tokens per instance: many different ones, so that any
rank can pass on what it has too much. An expert with instances on all nodes keeps the tokens of
each node there, load / nodes of them: `least_tokens` is compared with that. Spares of the second
kind may keep half as many; the other half of their price buys balance.

All layers at once, in whole-array steps: this is called for every layer of a model.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.plan import Int64Array

# More spares of one expert than this are not considered in one call.
MOST_OF_ONE = 4
# A node looks for experts that it lacks among this many times its free slots, hottest first.
NODE_REACH = 4
# Times that copies and slots that do not fit together are paired anew.
PASSES = 3


def place_spares(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    replicas_N3: Int64Array,
    free_LR: Int64Array,
    import_LR: Int64Array,
    node_R: Int64Array,
    least_tokens: int,
) -> Int64Array:
    """Fill free slots.

    Slots are filled where a rank has most of them free, and among equals on the ranks that
    computed most tokens of others: these have most to give back when their own load rises.

    Args:
        load_LE: (L, E) int64, the predicted tokens.
        owner_LE: (L, E) int64.
        replicas_N3: (N, 3) int64, layer, expert and rank of the replicas there are.
        free_LR: (L, R) int64, slots to fill; 0 for a layer that needs none.
        import_LR: (L, R) int64, tokens that each rank computes of other ranks' experts.
        node_R: (R,) int64, node of each rank.
        least_tokens: tokens that a spare must keep on its node to be worth its bytes.

    Returns:
        (N, 3) int64 spares. A few slots may stay empty.
    """
    most = int(free_LR.sum(axis=1).max(initial=0))
    if most == 0:
        return np.zeros((0, 3), dtype=np.int64)
    num_nodes = int(node_R.max()) + 1
    least_load = max(least_tokens * num_nodes, 2)
    near_N3 = replicas_N3[:0]
    if num_nodes > 1:
        near_N3 = _near(load_LE, owner_LE, replicas_N3, free_LR, import_LR, node_R, least_tokens)
        replicas_N3 = np.concatenate([replicas_N3, near_N3])
        used = near_N3[:, 0] * free_LR.shape[1] + near_N3[:, 2]
        free_LR = free_LR - np.bincount(used, minlength=free_LR.size).reshape(free_LR.shape)
    return np.concatenate(
        [near_N3, _varied(load_LE, owner_LE, replicas_N3, free_LR, import_LR, least_load // 2)]
    )


def _near(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    replicas_N3: Int64Array,
    free_LR: Int64Array,
    import_LR: Int64Array,
    node_R: Int64Array,
    least_load: int,
) -> Int64Array:
    """Give half of each node's free slots the hottest experts that it lacks."""
    num_layers, num_experts = load_LE.shape
    num_nodes = int(node_R.max()) + 1
    layer_L1 = np.arange(num_layers)[:, None]
    is_here_LME = np.zeros((num_layers, num_nodes, num_experts), dtype=bool)
    is_here_LME[layer_L1, node_R[owner_LE], np.arange(num_experts)] = True
    is_here_LME[replicas_N3[:, 0], node_R[replicas_N3[:, 2]], replicas_N3[:, 1]] = True
    by_node = np.bincount(
        (layer_L1 * num_nodes + node_R).ravel(),
        weights=free_LR.ravel(),
        minlength=num_layers * num_nodes,
    )
    wanted_LM = by_node.reshape(num_layers, num_nodes).astype(np.int64)
    wanted_LM = (wanted_LM + 1) // 2
    reach = min(num_experts, NODE_REACH * int(wanted_LM.max()))
    hottest_LK = np.argsort(-load_LE, axis=1, kind="stable")[:, :reach]
    is_lacking_LMK = ~np.take_along_axis(is_here_LME, hottest_LK[:, None, :], axis=2)
    is_hot_LK = np.take_along_axis(load_LE, hottest_LK, axis=1) >= least_load
    is_lacking_LMK &= is_hot_LK[:, None, :]
    number_LMK = np.cumsum(is_lacking_LMK, axis=2)
    is_taken_LMK = is_lacking_LMK & (number_LMK <= wanted_LM[:, :, None])
    layer, node, place = np.nonzero(is_taken_LMK)
    slot = number_LMK[layer, node, place] - 1
    # Each node's free slots in the order of filling: layer, node, most slots free, most imports.
    level_M = np.arange(int(free_LR.max()), 0, -1)
    of_layer, at_level, of_rank = np.nonzero(free_LR[:, None, :] >= level_M[:, None])
    group = of_layer * num_nodes + node_R[of_rank]
    order = np.lexsort((-import_LR[of_layer, of_rank], at_level, group))
    first = np.searchsorted(group[order], layer * num_nodes + node)
    return np.stack([layer, hottest_LK[layer, place], of_rank[order][first + slot]], axis=1)


def _varied(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    replicas_N3: Int64Array,
    free_LR: Int64Array,
    import_LR: Int64Array,
    least_load: int,
) -> Int64Array:
    """Fill free slots with the experts that have the most tokens per instance."""
    num_experts, num_ranks = load_LE.shape[1], free_LR.shape[1]
    wanted_L = free_LR.sum(axis=1)
    if not wanted_L.any():
        return replicas_N3[:0]
    expert_LW, is_wanted_LW = _hottest(load_LE, replicas_N3, wanted_L, num_ranks, least_load)
    rank_LW = _slots(free_LR, import_LR, expert_LW.shape[1])
    layer, at = np.nonzero(is_wanted_LW)
    expert, rank = expert_LW[layer, at], rank_LW[layer, at]
    is_held = np.zeros(owner_LE.size * num_ranks, dtype=bool)
    is_held[np.arange(owner_LE.size) * num_ranks + owner_LE.ravel()] = True
    pair = replicas_N3[:, 0] * num_experts + replicas_N3[:, 1]
    is_held[pair * num_ranks + replicas_N3[:, 2]] = True
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
    least_load: int,
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
    share_LEJ[count_LEJ >= num_ranks] = 0
    share_LEJ[load_LE < least_load] = 0
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

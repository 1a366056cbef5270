# SPDX-License-Identifier: Apache-2.0

"""Spare replicas: what the slots that are left can do against drift and for traffic.

The fewest replicas that balance the predicted loads have nothing left when the loads differ from
the prediction. Spares make the ranks one well connected pool, and keep tokens on their node. How
many slots they may fill, and how many tokens one must keep, `cost.with_paying_spares` says.

Half of a node's free slots take the hottest experts that the node lacks (all of them, if there is
room for every one): their tokens stay on the node. The other half takes the experts with most
tokens per instance: many different ones, so that any rank can pass on what it has too much. An
expert with instances on all nodes keeps the tokens of each node there, load / nodes of them:
`least_tokens` is compared with that. Experts with fewer get spares only on nodes that have them:
those cross no network.

All layers at once, in whole-array steps: this is called for every layer of a model. What a layer
gets does not depend on the others: a layer that is planned again alone must get the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.arrays import descending
from megatron_fssdp.planning.plan import Int64Array

BoolArray = npt.NDArray[np.bool_]

# More spares of one expert than this are not considered in one call.
MOST_OF_ONE = 4
# A node looks for experts that it lacks among this many times its free slots, hottest first.
NODE_REACH = 2
# The experts with most tokens per instance are looked for among this many times the free slots,
# hottest first.
LOAD_REACH = 2
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
    if not free_LR.any():
        return replicas_N3[:0]
    num_nodes = int(node_R.max()) + 1
    least_load = max(least_tokens * num_nodes, 2)
    # Hottest first, and of equal ranks those with most imports first.
    hottest_LE = descending(load_LE)
    by_import_LR = descending(import_LR)
    near_N3 = replicas_N3[:0]
    if num_nodes > 1:
        near_N3 = _near(
            load_LE, hottest_LE, owner_LE, replicas_N3, free_LR, by_import_LR, node_R, least_load
        )
        replicas_N3 = np.concatenate([replicas_N3, near_N3])
        used = near_N3[:, 0] * free_LR.shape[1] + near_N3[:, 2]
        free_LR = free_LR - np.bincount(used, minlength=free_LR.size).reshape(free_LR.shape)
    varied_N3 = _varied(
        load_LE, hottest_LE, owner_LE, replicas_N3, free_LR, by_import_LR, node_R, least_load
    )
    return np.concatenate([near_N3, varied_N3])


def _holders(owner_LE: Int64Array, replicas_N3: Int64Array, group_R: Int64Array) -> BoolArray:
    """(L, E, G) bool, whether some rank of a group has an instance of an expert."""
    shape = (*owner_LE.shape, int(group_R.max()) + 1)
    is_held_LEG = np.zeros(shape, dtype=bool)
    np.put_along_axis(is_held_LEG, group_R[owner_LE][..., None], True, axis=2)
    is_held_LEG[replicas_N3[:, 0], replicas_N3[:, 1], group_R[replicas_N3[:, 2]]] = True
    return is_held_LEG


def _near(
    load_LE: Int64Array,
    hottest_LE: Int64Array,
    owner_LE: Int64Array,
    replicas_N3: Int64Array,
    free_LR: Int64Array,
    by_import_LR: Int64Array,
    node_R: Int64Array,
    least_load: int,
) -> Int64Array:
    """Give half of each node's free slots the hottest experts that it lacks."""
    num_layers, num_nodes = len(load_LE), int(node_R.max()) + 1
    layer_L1 = np.arange(num_layers)[:, None]
    is_here_LEM = _holders(owner_LE, replicas_N3, node_R)
    by_node = np.bincount(
        (layer_L1 * num_nodes + node_R).ravel(),
        weights=free_LR.ravel(),
        minlength=num_layers * num_nodes,
    )
    free_LM = by_node.reshape(num_layers, num_nodes).astype(np.int64)
    reach_L = NODE_REACH * free_LM.max(axis=1)
    hottest_LK = hottest_LE[:, : int(reach_L.max())]
    is_lacking_LMK = ~is_here_LEM[layer_L1, hottest_LK].transpose(0, 2, 1)
    is_hot_LK = np.take_along_axis(load_LE, hottest_LK, axis=1) >= least_load
    is_hot_LK &= np.arange(hottest_LK.shape[1]) < reach_L[:, None]
    is_lacking_LMK &= is_hot_LK[:, None, :]
    number_LMK = np.cumsum(is_lacking_LMK, axis=2)
    # A node with room for all that it lacks takes all: no token leaves it then.
    wanted_LM = np.where(number_LMK[:, :, -1] <= free_LM, free_LM, (free_LM + 1) // 2)
    is_taken_LMK = is_lacking_LMK & (number_LMK <= wanted_LM[:, :, None])
    layer, node, place = np.nonzero(is_taken_LMK)
    slot = number_LMK[layer, node, place] - 1
    # Each node's free slots in the order of filling: layer by layer, node by node.
    rank_LW, is_slot_LW = _slots(free_LR, by_import_LR)
    group_LW = np.where(is_slot_LW, node_R[rank_LW], num_nodes)
    in_node_LW = np.argsort(group_LW, axis=1, kind="stable")
    rank_LW = np.take_along_axis(rank_LW, in_node_LW, axis=1)
    first_LM = np.cumsum(free_LM, axis=1) - free_LM
    rank = rank_LW[layer, first_LM[layer, node] + slot]
    return np.stack([layer, hottest_LK[layer, place], rank], axis=1)


def _varied(
    load_LE: Int64Array,
    hottest_LE: Int64Array,
    owner_LE: Int64Array,
    replicas_N3: Int64Array,
    free_LR: Int64Array,
    by_import_LR: Int64Array,
    node_R: Int64Array,
    least_load: int,
) -> Int64Array:
    """Fill free slots with the experts that have the most tokens per instance."""
    num_experts, num_ranks = load_LE.shape[1], free_LR.shape[1]
    wanted_L = free_LR.sum(axis=1)
    if not wanted_L.any():
        return replicas_N3[:0]
    expert_LW, is_wanted_LW = _hottest(load_LE, hottest_LE, replicas_N3, wanted_L, num_ranks)
    # Whether an expert pays for a replica on a node, or has one there already.
    pays_LEM = _holders(owner_LE, replicas_N3, node_R) | (load_LE >= least_load)[..., None]
    is_held = _holders(owner_LE, replicas_N3, np.arange(num_ranks)).ravel()
    rank_LW, _ = _slots(free_LR, by_import_LR)
    layer, at = np.nonzero(is_wanted_LW)
    expert, rank = expert_LW[layer, at], rank_LW[layer, at]
    placed = []
    for number in range(PASSES):
        code = (layer * num_experts + expert) * num_ranks + rank
        fits = np.zeros(len(code), dtype=bool)
        fits[np.unique(code, return_index=True)[1]] = True
        fits &= ~is_held[code] & pays_LEM[layer, expert, node_R[rank]]
        is_held[code[fits]] = True
        placed.append(np.stack([layer[fits], expert[fits], rank[fits]], axis=1))
        layer, expert, rank = layer[~fits], expert[~fits], rank[~fits]
        # Pair what is left the other way round, then in a mixed order, within its layer.
        place = np.arange(len(layer)) - np.searchsorted(layer, layer)
        mixed = -place if number == 0 else place * 7919 % np.bincount(layer)[layer]
        rank = rank[np.lexsort((mixed, layer))]
    return np.concatenate(placed)


def _hottest(
    load_LE: Int64Array,
    hottest_LE: Int64Array,
    replicas_N3: Int64Array,
    wanted_L: Int64Array,
    num_ranks: int,
) -> tuple[Int64Array, BoolArray]:
    """Choose each layer's experts for its spares, W at most, most tokens per instance first.

    Returns:
        (L, W) int64 experts, (L, W) bool where there is one.
    """
    num_layers, num_experts = load_LE.shape
    most = int(wanted_L.max())
    hottest_LK = hottest_LE[:, : LOAD_REACH * most]
    load_LK = np.take_along_axis(load_LE, hottest_LK, axis=1)
    pair = replicas_N3[:, 0] * num_experts + replicas_N3[:, 1]
    count_LE = 1 + np.bincount(pair, minlength=load_LE.size).reshape(load_LE.shape)
    count_LK = np.take_along_axis(count_LE, hottest_LK, axis=1)
    # Column j: the expert's tokens per instance when it already has j spares.
    copies = min(MOST_OF_ONE, num_ranks)
    count_LKJ = count_LK[:, :, None] + np.arange(copies)
    share_LKJ = load_LK[:, :, None] // count_LKJ
    share_LKJ[count_LKJ >= num_ranks] = 0
    share_LKJ[np.arange(hottest_LK.shape[1]) >= LOAD_REACH * wanted_L[:, None]] = 0
    share = share_LKJ.reshape(num_layers, -1)
    order_LW = descending(share)[:, :most]
    is_wanted_LW = np.arange(order_LW.shape[1]) < wanted_L[:, None]
    is_wanted_LW &= np.take_along_axis(share, order_LW, axis=1) > 0
    return np.take_along_axis(hottest_LK, order_LW // copies, axis=1), is_wanted_LW


def _slots(free_LR: Int64Array, by_import_LR: Int64Array) -> tuple[Int64Array, BoolArray]:
    """List each layer's free slots in the order of filling.

    Returns:
        (L, W) int64 ranks, (L, W) bool where there is a slot.
    """
    num_ranks = free_LR.shape[1]
    free_LR = np.take_along_axis(free_LR, by_import_LR, axis=1)
    level_M = np.arange(int(free_LR.max()), 0, -1)
    is_free = (free_LR[:, None, :] >= level_M[:, None]).reshape(len(free_LR), -1)
    number = int(is_free.sum(axis=1).max())
    order_LW = np.argsort(~is_free, axis=1, kind="stable")[:, :number]
    rank_LW = np.take_along_axis(by_import_LR, order_LW % num_ranks, axis=1)
    return rank_LW, np.take_along_axis(is_free, order_LW, axis=1)

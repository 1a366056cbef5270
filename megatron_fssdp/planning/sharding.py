# SPDX-License-Identifier: Apache-2.0

"""Sharding: which rank owns each expert's parameters and optimizer state.

`shard_evenly` is Megatron's own layout, where training starts. `shard_by_load` is the paper's
algorithm 2. `shard_for_replicas` is ours: it swaps a few experts, only where that saves replicas.
"""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.topology import Topology


def shard_evenly(num_layers: int, num_experts: int, num_ranks: int) -> Int64Array:
    """Return Megatron's own layout: expert e is owned by rank e // (E / R), in every layer.

    Returns:
        (L, E) int64. `shard_evenly(1, 4, 2)` is `[[0, 0, 1, 1]]`.

    Raises:
        ValueError: if E is not a multiple of R.
    """
    if num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(
            f"{num_experts} experts cannot be owned evenly by {num_ranks} ranks: "
            "choose an expert-parallel size that divides the number of experts"
        )
    owner_E = np.arange(num_experts, dtype=np.int64) // (num_experts // num_ranks or 1)
    return np.tile(owner_E, (num_layers, 1))


def shard_by_load(
    load_LE: Int64Array, owner_LE: Int64Array, topology: Topology, overlap_degree: int
) -> Int64Array:
    """Place all layers' experts together: algorithm 2 of the paper (section 4.3).

    1. In each layer the t most loaded experts are left to materialization; the rest are cold. A
       rank has L * E / R slots for all layers together: per layer it may own any number of experts.
    2. Layers in the order of their most loaded cold expert, cold experts by load: each goes to the
       least loaded node of the layer (tie: fewer free slots), there to the least loaded rank.
    3. The t most loaded ones fill the slots that are left.

    Readings where the paper is silent: loads count per layer, only ranks with free slots are
    candidates, and an expert of step 3 stays with its owner if it has a free slot, or goes where
    the layer's owned load is lowest.

    Args:
        load_LE: (L, E) int64, the predicted tokens.
        owner_LE: (L, E) int64, the owners now.
        topology: the ranks and their nodes.
        overlap_degree: t.

    Returns:
        (L, E) int64 owners.

    Raises:
        ValueError: if the experts of all layers do not divide by the ranks.
    """
    num_ranks, node_R = topology.num_ranks, topology.node_R
    if load_LE.size % num_ranks:
        raise ValueError(
            f"{load_LE.size} experts of all layers cannot be owned evenly by {num_ranks} ranks"
        )
    order_LE = np.argsort(-load_LE, axis=1, kind="stable")
    cold_first = min(overlap_degree, load_LE.shape[1])
    free_R = np.full(num_ranks, load_LE.size // num_ranks)
    result_LE = np.full_like(owner_LE, -1)
    load_LR = np.zeros((len(load_LE), num_ranks), dtype=np.int64)
    cold_L = [
        int(load_LE[layer, order[cold_first]]) if cold_first < len(order) else 0
        for layer, order in enumerate(order_LE)
    ]
    for layer in np.argsort(-np.array(cold_L), kind="stable").tolist():
        for expert in order_LE[layer, cold_first:].tolist():
            rank = _least_loaded(load_LR[layer], free_R, node_R)
            result_LE[layer, expert] = rank
            load_LR[layer, rank] += load_LE[layer, expert]
            free_R[rank] -= 1
    for layer, order in enumerate(order_LE):
        for expert in order[:cold_first].tolist():
            rank = int(owner_LE[layer, expert])
            if not free_R[rank]:
                open_R = np.flatnonzero(free_R)
                rank = int(open_R[np.argmin(load_LR[layer, open_R])])
            result_LE[layer, expert] = rank
            load_LR[layer, rank] += load_LE[layer, expert]
            free_R[rank] -= 1
    return result_LE


def _least_loaded(load_R: Int64Array, free_R: Int64Array, node_R: Int64Array) -> int:
    """The least loaded rank with a free slot, in the least loaded node that has one."""
    load_M = np.bincount(node_R, weights=load_R)
    free_M = np.bincount(node_R, weights=free_R)
    nodes = np.flatnonzero(free_M)
    node = nodes[np.lexsort((free_M[nodes], load_M[nodes]))[0]]
    ranks = np.flatnonzero((node_R == node) & (free_R > 0))
    return int(ranks[np.lexsort((free_R[ranks], load_R[ranks]))[0]])


def shard_for_replicas(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    num_ranks: int,
    most_swaps: int = 4,
    gain: float = 0.005,
) -> Int64Array:
    """Swap owners of a few experts so that fewer and smaller replicas are needed.

    Replicas can take any load off a rank, but each costs bytes every iteration; a swap costs
    parameters and optimizer state, once. In each layer the fullest rank swaps an expert with the
    emptiest, the pair that comes closest to levelling both, until a swap would move less than
    `gain` of the mean load. A rank keeps its number of experts in every layer.

    Args:
        load_LE: (L, E) int64, tokens over a long window.
        owner_LE: (L, E) int64, the owners now.
        num_ranks: R.
        most_swaps: swaps of one layer, at most.
        gain: least part of the mean rank load that a swap must move.

    Returns:
        (L, E) int64 owners.
    """
    result_LE = owner_LE.copy()
    for load_E, owner_E in zip(load_LE, result_LE, strict=True):
        load_R = np.bincount(owner_E, weights=load_E, minlength=num_ranks).astype(np.int64)
        least = max(int(gain * int(load_E.sum()) / num_ranks), 1)
        # Ranks full of one hot expert are left to materialization once no swap helps them.
        is_open_R = np.ones(num_ranks, dtype=bool)
        for _ in range(most_swaps):
            swap = None
            while swap is None and is_open_R.any():
                high = int(np.where(is_open_R, load_R, -1).argmax())
                low = int(load_R.argmin())
                swap = _best_swap(load_E, owner_E, load_R, high, low, least)
                is_open_R[high] = swap is not None
            if swap is None:
                break
            give, take = swap
            moved = load_E[give] - load_E[take]
            owner_E[give], owner_E[take] = low, high
            load_R[high] -= moved
            load_R[low] += moved
    return result_LE


def _best_swap(
    load_E: Int64Array, owner_E: Int64Array, load_R: Int64Array, high: int, low: int, least: int
) -> tuple[int, int] | None:
    """Return the experts of two ranks whose swap comes closest to levelling them, if any helps."""
    ours, theirs = np.flatnonzero(owner_E == high), np.flatnonzero(owner_E == low)
    gap = int(load_R[high] - load_R[low])
    moved = load_E[ours][:, None] - load_E[theirs]
    # Neither rank may end outside the two's old range, or the swap only turns them round.
    error = np.where((moved >= least) & (moved < gap), np.abs(2 * moved - gap), gap)
    if not error.size or error.min() >= gap:
        return None
    best = int(error.argmin())
    return int(ours[best // len(theirs)]), int(theirs[best % len(theirs)])

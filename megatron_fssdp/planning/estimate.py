# SPDX-License-Identifier: Apache-2.0

"""A quick look at what the best quotas make of a plan, all layers at once."""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.plan import Int64Array

# Part of a step that is taken again in the next: halves the rounds that are needed.
MOMENTUM = 0.3


def estimate(
    load_LE: Int64Array, owner_LE: Int64Array, replicas_N3: Int64Array, num_ranks: int, rounds: int
) -> Int64Array:
    """Return the (L,) tokens of each layer's fullest rank, at most, under good quotas.

    The experts' tokens are spread over their instances as in `equalize.spread`, but scaled to what
    each has, and a part of the last step is taken again: less exact, and better in a few steps.
    Sums are of whole numbers that floats hold exactly, and the rest is elementwise: all ranks see
    the same.
    """
    num_layers, num_experts = load_LE.shape
    # Floats divide faster than whole numbers, and hold those below 2^53.
    total = load_LE.ravel().astype(np.float64)
    pair = replicas_N3[:, 0] * num_experts + replicas_N3[:, 1]
    count = np.bincount(pair, minlength=load_LE.size)
    expert_X = np.flatnonzero(count)
    count_X = count[expert_X] + 1
    first_X = np.cumsum(count_X) - count_X
    size = num_layers * num_ranks
    row = (np.arange(num_layers)[:, None] * num_ranks + owner_LE).ravel()
    rank_N = np.empty(len(pair) + len(expert_X), dtype=np.int64)
    is_replica_N = np.ones(len(rank_N), dtype=bool)
    is_replica_N[first_X] = False
    rank_N[first_X] = row[expert_X]
    by_pair = np.sort(pair * num_ranks + replicas_N3[:, 2])
    rank_N[is_replica_N] = by_pair // (num_ranks * num_experts) * num_ranks + by_pair % num_ranks
    expert_N = np.repeat(np.arange(len(expert_X)), count_X)
    total_X = total[expert_X]
    total[expert_X] = 0
    base = np.bincount(row, weights=total, minlength=size)
    rate_N = 1.5 / np.bincount(rank_N, minlength=size)[rank_N]
    quota_N = np.floor(total_X / count_X)[expert_N]
    quota_N[first_X] += total_X % count_X
    gone_N = np.zeros_like(quota_N)
    # In place, and `bincount` for `reduceat`: this loop is a large part of planning.
    for _ in range(rounds):
        load_N = (base + np.bincount(rank_N, weights=quota_N, minlength=size)).take(rank_N)
        next_N = (np.bincount(expert_N, weights=load_N) / count_X).take(expert_N)
        next_N -= load_N
        next_N *= rate_N
        gone_N *= MOMENTUM
        next_N += gone_N
        np.floor(next_N, out=next_N)
        next_N += quota_N
        np.maximum(next_N, 0, out=next_N)
        sum_X = np.maximum(np.bincount(expert_N, weights=next_N), 1)
        next_N *= (total_X / sum_X).take(expert_N)
        np.floor(next_N, out=next_N)
        gone_N, quota_N = next_N - quota_N, next_N
    # What rounding took; the next round's scale gives it back.
    quota_N[first_X] += total_X - np.bincount(expert_N, weights=quota_N)
    load = base + np.bincount(rank_N, weights=quota_N, minlength=size)
    fullest_L: Int64Array = load.reshape(num_layers, -1).max(axis=1).astype(np.int64)
    return fullest_L

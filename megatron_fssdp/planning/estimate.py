# SPDX-License-Identifier: Apache-2.0

"""A quick look at what the best quotas make of a plan, all layers at once."""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.plan import Int64Array


def estimate(
    load_LE: Int64Array, owner_LE: Int64Array, replicas_N3: Int64Array, num_ranks: int, rounds: int
) -> Int64Array:
    """Return the (L,) tokens of each layer's fullest rank, at most, under good quotas.

    The experts' tokens are spread over their instances as in `equalize.spread`, but scaled to what
    each has: less exact, and better in a few steps. Whole numbers only: all ranks see the same.
    """
    num_layers, num_experts = load_LE.shape
    # Products of two loads must fit: of more than 2^30 tokens a layer drops the last places.
    shift_L1 = np.maximum(np.frexp(load_LE.sum(axis=1))[1] - 30, 0)[:, None].astype(np.int64)
    load_LE = load_LE >> shift_L1
    layer_L1 = np.arange(num_layers)[:, None]
    pair = replicas_N3[:, 0] * num_experts + replicas_N3[:, 1]
    count = np.bincount(pair, minlength=load_LE.size)
    expert_X = np.flatnonzero(count)
    count_X = count[expert_X] + 1
    end_X = np.cumsum(count_X)
    first_X = end_X - count_X
    rank_N = np.empty(int(count_X.sum()), dtype=np.int64)
    is_replica_N = np.ones(len(rank_N), dtype=bool)
    is_replica_N[first_X] = False
    width = num_ranks
    row_LE = layer_L1 * width + owner_LE
    rank_N[first_X] = row_LE.ravel()[expert_X]
    by_pair = np.sort(pair * width + replicas_N3[:, 2])
    rank_N[is_replica_N] = by_pair // width // num_experts * width + by_pair % width
    expert_N = np.repeat(np.arange(len(expert_X)), count_X)
    single = np.where(count == 0, load_LE.ravel(), 0)
    size = num_layers * width
    base = np.bincount(row_LE.ravel(), weights=single, minlength=size).astype(np.int64)
    busy_N = np.bincount(rank_N, minlength=size)[rank_N] * 2
    total_X = load_LE.ravel()[expert_X]
    quota_N = (total_X // count_X)[expert_N]
    quota_N[first_X] += total_X % count_X
    # Sums of whole numbers below 2^53: exact as floats.
    for _ in range(rounds):
        load = base + np.bincount(rank_N, weights=quota_N, minlength=size).astype(np.int64)
        load_N = load[rank_N]
        mean_X = np.add.reduceat(load_N, first_X) // count_X
        moved_N = np.maximum(quota_N + (mean_X[expert_N] - load_N) * 3 // busy_N, 0)
        sum_X = np.maximum(np.add.reduceat(moved_N, first_X), 1)
        quota_N = moved_N * total_X[expert_N] // sum_X[expert_N]
        quota_N[first_X] += total_X - np.add.reduceat(quota_N, first_X)
    load = base + np.bincount(rank_N, weights=quota_N, minlength=size).astype(np.int64)
    fullest_L: Int64Array = load.reshape(num_layers, -1).max(axis=1)
    fullest_L = (fullest_L + (shift_L1[:, 0] > 0)) << shift_L1[:, 0]
    return fullest_L

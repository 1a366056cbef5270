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
    total_LE = load_LE.astype(np.float64)
    pair = replicas_N3[:, 0] * num_experts + replicas_N3[:, 1]
    count = np.bincount(pair, minlength=load_LE.size)
    expert_X = np.flatnonzero(count)
    count_X = count[expert_X] + 1
    first_X = np.cumsum(count_X) - count_X
    size = num_layers * num_ranks
    row_LE = np.arange(num_layers)[:, None] * num_ranks + owner_LE
    rank_N = np.empty(int(count_X.sum()), dtype=np.int64)
    is_replica_N = np.ones(len(rank_N), dtype=bool)
    is_replica_N[first_X] = False
    rank_N[first_X] = row_LE.ravel()[expert_X]
    by_pair = np.sort(pair * num_ranks + replicas_N3[:, 2])
    rank_N[is_replica_N] = by_pair // (num_ranks * num_experts) * num_ranks + by_pair % num_ranks
    expert_N = np.repeat(np.arange(len(expert_X)), count_X)
    single = np.where(count == 0, total_LE.ravel(), 0)
    base = np.bincount(row_LE.ravel(), weights=single, minlength=size)
    step_N = 1.5 / np.bincount(rank_N, minlength=size)[rank_N]
    total_X = total_LE.ravel()[expert_X]
    quota_N = np.floor(total_X / count_X)[expert_N]
    quota_N[first_X] += total_X % count_X
    gone_N = np.zeros_like(quota_N)
    for _ in range(rounds):
        load_N = (base + np.bincount(rank_N, weights=quota_N, minlength=size))[rank_N]
        mean_X = np.add.reduceat(load_N, first_X) / count_X
        step = (mean_X[expert_N] - load_N) * step_N + MOMENTUM * gone_N
        moved_N = np.maximum(quota_N + np.floor(step), 0)
        scale_X = total_X / np.maximum(np.add.reduceat(moved_N, first_X), 1)
        gone_N = -quota_N
        quota_N = np.floor(moved_N * scale_X[expert_N])
        gone_N += quota_N
    # What rounding took; the next round's scale gives it back.
    quota_N[first_X] += total_X - np.add.reduceat(quota_N, first_X)
    load = base + np.bincount(rank_N, weights=quota_N, minlength=size)
    fullest_L: Int64Array = load.reshape(num_layers, -1).max(axis=1).astype(np.int64)
    return fullest_L

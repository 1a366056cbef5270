# SPDX-License-Identifier: Apache-2.0

"""Keep tokens on their node where the balance leaves room for it."""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.equalize import instance_loads
from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.quota_tables import QuotaTables

# The second pass uses the room that the first made, and what it left where an expert lacked less
# than its part.
LOCAL_PASSES = 2


def localize(
    quota_N: Int64Array,
    share_N: Int64Array,
    base_R: Int64Array,
    tables: QuotaTables,
    goal: int,
) -> Int64Array:
    """Move an expert's tokens from instances with others' tokens to those that lack their own.

    The fullest rank gets no fuller, and no rank gets fuller than that or the goal. An instance's
    own tokens are its share of its node's; in a pass, every instance that lacks some may take an
    even part of the room of its rank, so that all experts move at once.

    Args:
        quota_N: (N,) int64, balanced quotas.
        share_N: (N,) int64, the share of its own node's tokens that an instance could compute.
        base_R: (R,) int64, tokens of experts without replicas.
        tables: of the layer's plan.
        goal: tokens that any rank may have.

    Returns:
        (N,) int64 quotas; each expert's sum is unchanged.
    """
    load_R = instance_loads(quota_N, base_R, tables)
    most = max(goal, int(load_R.max()))
    for number in range(LOCAL_PASSES):
        if number:
            load_R = instance_loads(quota_N, base_R, tables)
        lack_N = np.maximum(share_N - quota_N, 0)
        takers_R = np.bincount(tables.rank_N, weights=lack_N > 0, minlength=tables.num_ranks)
        part_R = (most - load_R) // np.maximum(takers_R.astype(np.int64), 1)
        take_N = np.minimum(lack_N, part_R[tables.rank_N])
        give_N = np.maximum(quota_N - share_N, 0)
        moved_X = np.minimum(
            np.add.reduceat(take_N, tables.first_X), np.add.reduceat(give_N, tables.first_X)
        )
        quota_N = quota_N + _first(take_N, moved_X, tables) - _first(give_N, moved_X, tables)
    return quota_N


def _first(amount_N: Int64Array, total_X: Int64Array, tables: QuotaTables) -> Int64Array:
    """Take each expert's total from its instances' amounts in order, until it is used up."""
    run_N = np.cumsum(amount_N) - amount_N
    before_N = run_N - run_N[tables.first_X][tables.expert_N]
    taken_N: Int64Array = np.clip(total_X[tables.expert_N] - before_N, 0, amount_N)
    return taken_N

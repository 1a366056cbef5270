# SPDX-License-Identifier: Apache-2.0

"""Calibration: when the gate has decided, add what the plan lacks (section 4.2 of the paper).

The extra replicas travel on the critical path, so they are accepted only where the layer gets
faster with their time counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.planning.gain import place_replicas
from megatron_fssdp.planning.plan import EMPTY, Int64Array, LayerPlan, build_slots
from megatron_fssdp.planning.planner import PlanSettings
from megatron_fssdp.planning.quotas import balance, rank_loads


def calibrate_layer(
    counts_RE: Int64Array,
    plan: LayerPlan,
    node_of_rank: Sequence[int],
    settings: PlanSettings,
    least_tokens: int = 0,
) -> tuple[LayerPlan, int]:
    """Improve a layer's plan for the true counts, if that pays.

    Replicas that have tokens under the best quotas stay where they are, at no cost. Others make
    room, and the fewest new ones are added that bring the fullest rank to the tolerance.

    Args:
        counts_RE: (R, E) int64, the true counts.
        plan: what was materialized for the predicted loads.
        node_of_rank: (R,) the node of each rank.
        settings: slots and tolerance.
        least_tokens: tokens that the fullest rank must lose to pay for the time that the new
            replicas of one rank take (`extra_s / time per token`; see `cost.saved_s`).

    Returns:
        The plan to use, `plan` itself if nothing pays, and how many replicas are new in it.
    """
    quota_EI = balance(counts_RE, plan, node_of_rank)
    load_R = rank_loads(quota_EI, plan)
    total = int(load_R.sum())
    target = max(
        int(total / plan.num_ranks * (1 + settings.balance_tolerance)), -(-total // plan.num_ranks)
    )
    if load_R.max() <= target or not settings.num_replica_slots:
        return plan, 0
    best, best_load, best_new = plan, int(load_R.max()) - max(least_tokens, 1) + 1, 0
    for keep_used in (True, False):
        candidate, num_new = _extend(counts_RE, quota_EI, plan, settings, target, keep_used)
        reached = int(rank_loads(balance(counts_RE, candidate, node_of_rank), candidate).max())
        if reached < best_load:
            best, best_load, best_new = candidate, reached, num_new
        if best_load <= target:
            break
    return best, best_new


def _extend(
    counts_RE: Int64Array,
    quota_EI: Int64Array,
    plan: LayerPlan,
    settings: PlanSettings,
    target: int,
    keep_used: bool,
) -> tuple[LayerPlan, int]:
    """Add replicas; keep those there are if they have tokens, or plan anew for the true counts.

    Planned anew, old replicas still fill the slots that are left.
    """
    num_ranks = plan.num_ranks
    replicas = _list_replicas(plan)
    load_E: list[int] = counts_RE.sum(axis=0, dtype=np.int64).tolist()
    load_R = np.bincount(plan.owner_E, weights=load_E, minlength=num_ranks).astype(np.int64)
    kept: list[tuple[int, int]] = []
    if keep_used:
        kept = [(e, r) for e, r, column in replicas if quota_EI[e, column] > 0]
        load_E = quota_EI[:, 0].tolist()
        load_R = rank_loads(quota_EI, plan)
    owned_R: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert, rank in enumerate(plan.owner_E.tolist()):
        owned_R[rank].append(expert)
    free_R = [settings.num_replica_slots] * num_ranks
    for _, rank in kept:
        free_R[rank] -= 1
    added = place_replicas(load_E, owned_R, load_R.tolist(), target, free_R, kept)
    held = set(kept) | set(added)
    for expert, rank, _ in replicas:
        if (expert, rank) not in held and free_R[rank] > 0:
            kept.append((expert, rank))
            free_R[rank] -= 1
    rows = np.array([(0, expert, rank) for expert, rank in added + kept], dtype=np.int64)
    most_owned = max(map(len, owned_R))
    slots_LRS = build_slots(
        plan.owner_E[None], rows.reshape(-1, 3), num_ranks, plan.num_slots - most_owned
    )
    old = {(expert, rank) for expert, rank, _ in replicas}
    return LayerPlan(plan.owner_E, slots_LRS[0]), sum(pair not in old for pair in added)


def _list_replicas(plan: LayerPlan) -> list[tuple[int, int, int]]:
    """List (expert, rank, column in (E, I)) of each replica."""
    expert, column = np.nonzero(plan.instance_rank_EI != EMPTY)
    rank = plan.instance_rank_EI[expert, column]
    is_replica = column > 0
    return list(
        zip(
            expert[is_replica].tolist(),
            rank[is_replica].tolist(),
            column[is_replica].tolist(),
            strict=True,
        )
    )

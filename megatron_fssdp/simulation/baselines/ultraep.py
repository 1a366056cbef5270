# SPDX-License-Identifier: Apache-2.0

"""UltraEP (Dots-Infra, its quota planner): search the least target that a greedy can meet.

For a target T, the fullest rank exports its hottest expert to the rank with most room, as much as
takes the rank down to T, and so on. T starts 1 % above the mean; the least T that works is found by
bisection (the original tries two steps, then four warps search).
"""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines.common import with_replicas

START = 1.01
SEARCH_STEPS = 8


def plan(load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int) -> LayerPlan:
    """Search the target; return the replicas of the least one met."""
    num_ranks = topology.num_ranks
    load_R = np.bincount(owner_E, weights=load_E, minlength=num_ranks).astype(np.int64)
    low = target = int(START * load_E.sum() / num_ranks)
    high = int(load_R.max())
    best: list[tuple[int, int]] = []
    for _ in range(SEARCH_STEPS):
        replicas = _export(load_E, owner_E, load_R.copy(), target, num_slots)
        if replicas is None:
            low = target
        else:
            best, high = replicas, target
            if target == low:
                break
        target = (low + high) // 2
    return with_replicas(owner_E, best, num_ranks, num_slots)


def _export(
    load_E: Int64Array, owner_E: Int64Array, load_R: Int64Array, target: int, num_slots: int
) -> list[tuple[int, int]] | None:
    """Export from the fullest rank until none exceeds the target; None if that fails."""
    left_E = load_E.copy()
    free_R = np.full(len(load_R), num_slots)
    replicas: list[tuple[int, int]] = []
    held = {(expert, int(rank)) for expert, rank in enumerate(owner_E)}
    for source in np.argsort(-load_R, kind="stable").tolist():
        owned = np.flatnonzero(owner_E == source)
        for expert in owned[np.argsort(-load_E[owned], kind="stable")].tolist():
            while load_R[source] > target and left_E[expert]:
                room_R = np.where(free_R > 0, target - load_R, 0)
                room_R[[r for r in range(len(load_R)) if (expert, r) in held]] = 0
                to = int(room_R.argmax())
                moved = min(int(left_E[expert]), int(load_R[source]) - target, int(room_R[to]))
                if moved <= 0:
                    break
                left_E[expert] -= moved
                load_R[source] -= moved
                load_R[to] += moved
                free_R[to] -= 1
                held.add((expert, to))
                replicas.append((expert, to))
        if load_R[source] > target:
            return None
    return replicas

# SPDX-License-Identifier: Apache-2.0

"""Scale-EPLB (ZhuJc-done/EP_balance): repair the fullest rank, again and again.

The fullest rank moves min(tokens of the expert, half the gap) of the (expert, rank) pair for which
that is most; within its node first, and to another node only where the tokens outweigh the copy.
"""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines.common import with_replicas

# The original repairs until nothing moves; its GPU version stops at 64 repairs of a node.
MOST_REPAIRS = 64
GOOD_ENOUGH = 1.0005


def plan(load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int) -> LayerPlan:
    """Repair until all ranks are at the mean, slots are used up, or the repairs are."""
    num_ranks = topology.num_ranks
    load_R = np.bincount(owner_E, weights=load_E, minlength=num_ranks).astype(np.int64)
    tokens_ER = np.zeros((len(load_E), num_ranks), dtype=np.int64)
    tokens_ER[np.arange(len(load_E)), owner_E] = load_E
    held_ER = tokens_ER.astype(bool)
    held_ER[np.arange(len(load_E)), owner_E] = True
    free_R = np.full(num_ranks, num_slots)
    replicas: list[tuple[int, int]] = []
    stuck_R = np.zeros(num_ranks, dtype=bool)
    goal = GOOD_ENOUGH * load_E.sum() / num_ranks
    for _ in range(MOST_REPAIRS * topology.num_nodes):
        busiest = int(np.where(stuck_R, -1, load_R).argmax())
        if stuck_R.all() or load_R[busiest] <= goal:
            break
        gap_R = np.maximum(load_R[busiest] - load_R, 0) // 2
        moved_ER = np.minimum(tokens_ER[:, busiest][:, None], gap_R)
        moved_ER[~held_ER & (free_R == 0)] = 0
        expert, to = divmod(int(moved_ER.argmax()), num_ranks)
        moved = int(moved_ER[expert, to])
        if moved <= 0:
            stuck_R[busiest] = True
            continue
        if not held_ER[expert, to]:
            held_ER[expert, to] = True
            free_R[to] -= 1
            replicas.append((expert, to))
        tokens_ER[expert, busiest] -= moved
        tokens_ER[expert, to] += moved
        load_R[busiest] -= moved
        load_R[to] += moved
    return with_replicas(owner_E, replicas, num_ranks, num_slots)

# SPDX-License-Identifier: Apache-2.0

"""FlexMoE (SIGMOD 2023): expand, shrink and migrate "vExperts" until the balance is good enough.

An expert's tokens are split evenly over its vExperts. While the fullest rank exceeds `RATIO` times
the mean, the expert with most tokens per vExpert is expanded to the least loaded rank with a free
slot; without one, the vExpert that would cost least is shrunk first. The original prices each
step with profiled times and searches until no step gains; its threshold is used here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines.common import with_replicas

RATIO = 1.2


def plan(load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int) -> LayerPlan:
    """Expand hot experts into the slots that there are."""
    num_ranks = topology.num_ranks
    holders: list[list[int]] = [[int(rank)] for rank in owner_E]
    free_R = np.full(num_ranks, num_slots)
    mean = load_E.sum() / num_ranks
    best = (np.inf, [list(ranks) for ranks in holders])
    for _ in range(2 * num_ranks * max(num_slots, 1)):
        share_E = load_E / [len(ranks) for ranks in holders]
        load_R = np.zeros(num_ranks)
        for expert, ranks in enumerate(holders):
            load_R[ranks] += share_E[expert]
        if load_R.max() < best[0]:
            best = (load_R.max(), [list(ranks) for ranks in holders])
        if load_R.max() <= RATIO * mean or not num_slots:
            break
        hot = int(np.where([len(ranks) < num_ranks for ranks in holders], share_E, -1).argmax())
        if not free_R.any() and not _shrink(holders, share_E, free_R, hot):
            break
        open_R = (free_R > 0) & ~np.isin(np.arange(num_ranks), holders[hot])
        if not open_R.any():
            break
        rank = int(np.where(open_R, load_R, np.inf).argmin())
        holders[hot].append(rank)
        free_R[rank] -= 1
    replicas = [(expert, rank) for expert, ranks in enumerate(best[1]) for rank in ranks[1:]]
    return with_replicas(owner_E, replicas, num_ranks, num_slots)


def _shrink(
    holders: list[list[int]], share_E: npt.NDArray[np.float64], free_R: Int64Array, spared: int
) -> bool:
    """Take the youngest vExpert of the expert with the least tokens on each; False if none can."""
    shrinkable = [e for e, ranks in enumerate(holders) if len(ranks) > 1 and e != spared]
    if not shrinkable:
        return False
    cold = min(shrinkable, key=lambda expert: share_E[expert])
    free_R[holders[cold].pop()] += 1
    return True

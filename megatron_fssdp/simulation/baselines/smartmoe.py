# SPDX-License-Identifier: Apache-2.0

"""SmartMoE (ATC 2023): exchange experts between ranks, no replicas.

Online it picks, from the loads, an assignment of experts to ranks with the same number on each:
experts by load, hottest first, to the least loaded rank that has room.
"""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines.common import with_replicas


def plan(load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int) -> LayerPlan:
    """Assign the experts anew, if that is better than where they are."""
    num_ranks = topology.num_ranks
    free_R = np.bincount(owner_E, minlength=num_ranks)
    load_R = np.zeros(num_ranks)
    new_owner_E = np.empty_like(owner_E)
    for expert in np.argsort(-load_E, kind="stable").tolist():
        rank = int(np.where(free_R > 0, load_R, np.inf).argmin())
        new_owner_E[expert] = rank
        load_R[rank] += load_E[expert]
        free_R[rank] -= 1
    if load_R.max() >= np.bincount(owner_E, weights=load_E, minlength=num_ranks).max():
        new_owner_E = owner_E
    return with_replicas(new_owner_E, [], num_ranks, num_slots)

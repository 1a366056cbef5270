# SPDX-License-Identifier: Apache-2.0

"""FasterMoE (PPoPP 2022): "shadow" the hottest experts on every rank.

Hottest first, an expert is shadowed while that lowers the modelled time of the fullest rank by more
than the broadcast of its parameters takes. Here a rank has as many slots as for everyone else, so
that many experts at most are shadowed; the original has no limit.
"""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines.common import with_replicas


def plan(load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int) -> LayerPlan:
    """Shadow experts; each rank computes its own tokens of a shadowed expert."""
    num_ranks = topology.num_ranks
    load_R = np.bincount(owner_E, weights=load_E, minlength=num_ranks)
    shadowed: list[int] = []
    for expert in np.argsort(-load_E, kind="stable")[:num_slots].tolist():
        spread_R = load_R + load_E[expert] / num_ranks
        spread_R[owner_E[expert]] -= load_E[expert]
        if spread_R.max() >= load_R.max():
            break
        load_R = spread_R
        shadowed.append(expert)
    replicas = [(expert, rank) for expert in shadowed for rank in range(num_ranks)]
    return with_replicas(owner_E, replicas, num_ranks, num_slots)

# SPDX-License-Identifier: Apache-2.0

"""ECHO (Megatron-LM#2368), its one-shot greedy planner: match spilled tokens with room, in order.

Each rank keeps its small experts and spills what exceeds the mean. The spills of all ranks laid end
to end, and the rooms of all ranks likewise, overlap in pieces: each piece sends an expert to a
rank. A rank takes its largest pieces, as many as it has slots.
"""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines.common import with_replicas


def plan(load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int) -> LayerPlan:
    """Match spills and rooms, largest first."""
    num_ranks = topology.num_ranks
    mean = int(load_E.sum()) // num_ranks
    spill_E = np.zeros_like(load_E)
    room_R = np.zeros(num_ranks, dtype=np.int64)
    for rank in range(num_ranks):
        owned = np.flatnonzero(owner_E == rank)
        owned = owned[np.argsort(load_E[owned], kind="stable")]
        kept = np.minimum(np.cumsum(load_E[owned]), mean)
        spill_E[owned] = load_E[owned] - np.diff(kept, prepend=0)
        room_R[rank] = mean - (kept[-1] if len(kept) else 0)
    experts = np.argsort(-spill_E, kind="stable")
    experts = experts[spill_E[experts] > 0]
    ranks = np.argsort(-room_R, kind="stable")
    ranks = ranks[room_R[ranks] > 0]
    spill_end, room_end = np.cumsum(spill_E[experts]), np.cumsum(room_R[ranks])
    pieces = np.minimum(spill_end[:, None], room_end) - np.maximum(
        (spill_end - spill_E[experts])[:, None], room_end - room_R[ranks]
    )
    replicas: list[tuple[int, int]] = []
    for column, rank in enumerate(ranks.tolist()):
        largest = np.argsort(-pieces[:, column], kind="stable")[:num_slots]
        replicas += [(int(experts[i]), rank) for i in largest if pieces[i, column] > 0]
    return with_replicas(owner_E, replicas, num_ranks, num_slots)

# SPDX-License-Identifier: Apache-2.0

"""MoonEP (MoonshotAI; Megatron-LM#7450): pair the fullest rank with the emptiest.

The receiver's whole lack comes from that one sender, which may end below the mean and receive in
turn; so every receiver has one sender, and all ranks end at the mean. Then the largest transfer
takes from the sender's largest expert, and so on. A receiver needs one slot for each expert that
its transfer touches: E / R at most, which the original reserves. Here slots are limited as for all.
"""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines.common import with_replicas


def plan(load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int) -> LayerPlan:
    """Pair ranks, then experts with transfers."""
    num_ranks = topology.num_ranks
    load_R = np.bincount(owner_E, weights=load_E, minlength=num_ranks).astype(np.int64)
    mean = int(load_E.sum()) // num_ranks
    transfers: list[tuple[int, int, int]] = []
    waiting = set(range(num_ranks))
    while waiting:
        sender = int(load_R.argmax())
        receiver = min(waiting, key=lambda r: (load_R[r], r))
        lack = mean - int(load_R[receiver])
        waiting.discard(receiver)
        if lack <= 0 or sender == receiver:
            break
        transfers.append((lack, sender, receiver))
        load_R[sender] -= lack
        load_R[receiver] += lack
    left_E = load_E.copy()
    free_R = np.full(num_ranks, num_slots)
    replicas: list[tuple[int, int]] = []
    for lack, sender, receiver in sorted(transfers, key=lambda t: -t[0]):
        owned = np.flatnonzero(owner_E == sender)
        while lack > 0 and free_R[receiver]:
            expert = int(owned[left_E[owned].argmax()])
            moved = min(lack, int(left_E[expert]))
            if moved <= 0:
                break
            left_E[expert] -= moved
            lack -= moved
            free_R[receiver] -= 1
            replicas.append((expert, receiver))
    return with_replicas(owner_E, replicas, num_ranks, num_slots)

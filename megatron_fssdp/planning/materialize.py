# SPDX-License-Identifier: Apache-2.0

"""Materialization: which ranks get replicas of which experts for one iteration.

Algorithm 1 of the paper is here; ours is in `by_gain`.
"""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.by_gain import materialize_by_gain
from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.topology import Topology

__all__ = ["assign_slots_by_load", "materialize_by_gain", "materialize_by_load"]


def materialize_by_load(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    topology: Topology,
    num_replica_slots: int,
    overlap_degree: int | None = None,
) -> Int64Array:
    """Place replicas in proportion to load: algorithm 1 of the paper (section 4.2).

    1. t = min(t, E), m = min(m, t); the candidates are the t most loaded experts.
    2. If t <= m, every candidate goes to every rank.
    3. Otherwise R * m slots are shared among the candidates by load, most loaded first, and an
       expert's replicas go to nodes that do not hold it yet, where most slots are free.

    Readings where the paper is silent: a candidate gets at least 1 and at most R - 1 new copies,
    left-over slots go to the largest load per copy, experts without tokens get none, and owned
    experts use no replica slots. All ties go to the lower number.

    Args:
        load_LE: (L, E) int64, the predicted tokens of each expert.
        owner_LE: (L, E) int64.
        topology: the ranks and their nodes.
        num_replica_slots: m, replicas that fit on a rank, per layer.
        overlap_degree: t, experts that can be sent within the layer's non-MoE time; None: all.

    Returns:
        (N, 3) int64: layer, expert and rank of each replica.
    """
    num_experts = owner_LE.shape[1]
    degree = num_experts if overlap_degree is None else min(overlap_degree, num_experts)
    slots = min(num_replica_slots, degree)
    replicas: list[tuple[int, int, int]] = []
    for layer in range(len(owner_LE)):
        order = np.argsort(-load_LE[layer], kind="stable")[:degree]
        candidates = order[load_LE[layer, order] > 0]
        if degree <= slots:
            copies = np.full(len(candidates), topology.num_ranks - 1)
        else:
            copies = assign_slots_by_load(
                load_LE[layer, candidates], topology.num_ranks * slots, topology.num_ranks - 1
            )
        placed = _spread(candidates, copies, owner_LE[layer], topology, slots)
        replicas += [(layer, expert, rank) for expert, rank in placed]
    return np.array(replicas, dtype=np.int64).reshape(-1, 3)


def assign_slots_by_load(load_X: Int64Array, num_slots: int, most_copies: int) -> Int64Array:
    """Share slots among candidates by load (`assignSlotsByLoad` of algorithm 1).

    Args:
        load_X: (X,) int64, candidates' tokens, most loaded first.
        num_slots: slots to share.
        most_copies: the most new copies that one candidate can use.

    Returns:
        (X,) int64 new copies of each candidate. Loads 6, 3, 1 with 5 slots and at most 3 copies:
        shares 3, 1, 0 become 3, 1, 1.
    """
    total = int(load_X.sum())
    copies = np.zeros(len(load_X), dtype=np.int64)
    left = num_slots
    for index, load in enumerate(load_X.tolist()):
        share = min(max(num_slots * load // total, 1), most_copies, left)
        copies[index] = share
        left -= share
    while left and (copies < most_copies).any():
        # Largest load per instance; whole numbers, the same everywhere.
        open_X = np.flatnonzero(copies < most_copies)
        best = max(open_X.tolist(), key=lambda x: (int(load_X[x]) << 32) // (1 + int(copies[x])))
        copies[best] += 1
        left -= 1
    return copies


def _spread(
    candidates: Int64Array,
    copies: Int64Array,
    owner_E: Int64Array,
    topology: Topology,
    num_slots: int,
) -> list[tuple[int, int]]:
    """Put each candidate's copies on nodes with the fewest of it, then where slots are free."""
    node_R = topology.node_R
    free_R = np.full(topology.num_ranks, num_slots)
    placed: list[tuple[int, int]] = []
    for expert, count in zip(candidates.tolist(), copies.tolist(), strict=True):
        holds_R = np.zeros(topology.num_ranks, dtype=bool)
        held_N = np.zeros(topology.num_nodes, dtype=np.int64)
        holds_R[owner_E[expert]] = True
        held_N[node_R[owner_E[expert]]] += 1
        for _ in range(count):
            fits = np.flatnonzero(~holds_R & (free_R > 0))
            if not len(fits):
                break
            order = np.lexsort((fits, -free_R[fits], held_N[node_R[fits]]))
            rank = int(fits[order[0]])
            holds_R[rank] = True
            held_N[node_R[rank]] += 1
            free_R[rank] -= 1
            placed.append((expert, rank))
    return placed

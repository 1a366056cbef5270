"""Materialization: which ranks get replicas of which experts for one iteration."""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.topology import Topology

# Replicas as (layer, expert, rank), three (N,) int64 arrays.
Replicas = tuple[Int64Array, Int64Array, Int64Array]


def materialize_by_load(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    topology: Topology,
    num_replica_slots: int,
    overlap_degree: int | None = None,
) -> Replicas:
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
        The replicas.
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
    columns = np.array(replicas, dtype=np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


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
        # Largest load per instance; cross-multiplied floats would not be the same everywhere.
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


def materialize_by_gain(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    topology: Topology,
    num_replica_slots: int,
    tolerance: float = 0.01,
) -> Replicas:
    """Add replicas one at a time where they lower the fullest rank most; stop when none pays.

    The fullest rank gives the tokens of its most loaded expert to a rank that takes all the
    excess with the least room to spare, or else to the emptiest.

    Args:
        load_LE: (L, E) int64, the predicted tokens of each expert.
        owner_LE: (L, E) int64.
        topology: the ranks and their nodes.
        num_replica_slots: replicas that fit on a rank, per layer.
        tolerance: a layer is balanced when its fullest rank has at most (1 + tolerance) times the
            mean tokens.

    Returns:
        The replicas. Balanced loads give none.
    """
    replicas: list[tuple[int, int, int]] = []
    for layer in range(len(owner_LE)):
        placed = _add_by_gain(
            load_LE[layer], owner_LE[layer], topology, num_replica_slots, tolerance
        )
        replicas += [(layer, expert, rank) for expert, rank in placed]
    columns = np.array(replicas, dtype=np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _add_by_gain(
    load_E: Int64Array, owner_E: Int64Array, topology: Topology, slots: int, tolerance: float
) -> list[tuple[int, int]]:
    num_ranks = topology.num_ranks
    load_R = np.bincount(owner_E, weights=load_E, minlength=num_ranks).astype(np.int64)
    target = max(int((1 + tolerance) * int(load_E.sum()) / num_ranks), 1)
    left_E = load_E.copy()
    free_R = np.full(num_ranks, slots)
    holds = {(int(expert), int(rank)) for expert, rank in enumerate(owner_E)}
    placed: list[tuple[int, int]] = []
    stuck_R = np.zeros(num_ranks, dtype=bool)
    while True:
        donor = int(np.argmax(np.where(stuck_R, -1, load_R)))
        excess = int(load_R[donor]) - target
        if stuck_R[donor] or excess <= 0:
            return placed
        owned = np.flatnonzero(owner_E == donor)
        expert = int(owned[np.argmax(left_E[owned])])
        room_R = np.where(free_R > 0, target - load_R, 0)
        for rank in range(num_ranks):
            if (expert, rank) in holds:
                room_R[rank] = 0
        want = min(excess, int(left_E[expert]))
        fits = np.flatnonzero(room_R >= want)
        rank = int(fits[np.argmin(room_R[fits])]) if len(fits) else int(np.argmax(room_R))
        moved = min(want, int(room_R[rank]))
        if moved <= 0:
            stuck_R[donor] = True
            continue
        load_R[donor] -= moved
        load_R[rank] += moved
        left_E[expert] -= moved
        free_R[rank] -= 1
        holds.add((expert, rank))
        placed.append((expert, rank))

"""Materialization: which ranks get replicas of which experts for one iteration."""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.gain import place_replicas
from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.spares import place_spares
from megatron_fssdp.planning.topology import Topology

# With spares, replicas first aim at this tolerance if the wanted one is looser: slots are filled
# anyway, and ranks that end nearer the mean stand more drift.
SPARE_TOLERANCE = 0.003
# Targets tried when the wanted one cannot be met within the budget.
TARGET_TRIES = 6


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


def materialize_by_gain(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    topology: Topology,
    num_replica_slots: int,
    tolerance: float = 0.01,
    most_replicas: int | None = None,
    spare_tokens: int | None = None,
) -> Int64Array:
    """Add the fewest replicas that balance each layer; then, if asked, spares against drift.

    Args:
        load_LE: (L, E) int64, the predicted tokens of each expert.
        owner_LE: (L, E) int64.
        topology: the ranks and their nodes.
        num_replica_slots: replicas that fit on a rank, per layer.
        tolerance: a layer is balanced when its fullest rank has at most (1 + tolerance) times the
            mean tokens; a balanced layer gets no replica at all.
        most_replicas: replicas of a layer that its budget allows; None: any number.
        spare_tokens: slots that are left get experts with at least this many tokens per instance;
            None: no spares.

    Returns:
        (N, 3) int64: layer, expert and rank of each replica; of each rank, those that balance the
        predicted loads first.
    """
    num_layers, num_ranks = len(owner_LE), topology.num_ranks
    limit = num_ranks * num_replica_slots if most_replicas is None else most_replicas
    aim = tolerance if spare_tokens is None else min(tolerance, SPARE_TOLERANCE)
    load_LR = _sum_by_owner(load_LE, owner_LE, num_ranks)
    placed_LR = load_LR.copy()
    placed_L: list[list[tuple[int, int]]] = []
    free_LR = np.full((num_layers, num_ranks), num_replica_slots)
    owned_by: dict[bytes, list[list[int]]] = {}
    for layer, (load, load_R) in enumerate(zip(load_LE.tolist(), load_LR.tolist(), strict=True)):
        owner_E = owner_LE[layer]
        owned_R = owned_by.get(owner_E.tobytes()) or _owned(owner_E, num_ranks)
        # Most layers share one sharding; listing what each rank owns is made once for them.
        owned_by[owner_E.tobytes()] = owned_R
        placed, placed_R = _materialize_layer(
            load, owned_R, load_R, num_replica_slots, tolerance, aim, limit
        )
        placed_L.append(placed)
        if placed:
            placed_LR[layer] = placed_R
        else:
            free_LR[layer] = 0
    replicas_N3 = _join(placed_L)
    if spare_tokens is None:
        return replicas_N3
    free_LR = _free_slots(free_LR, replicas_N3, limit)
    import_LR = np.maximum(placed_LR - load_LR, 0)
    spares_N3 = place_spares(
        load_LE, owner_LE, replicas_N3, free_LR, import_LR, topology.node_R, spare_tokens
    )
    return np.concatenate([replicas_N3, spares_N3])


def _sum_by_owner(load_LE: Int64Array, owner_LE: Int64Array, num_ranks: int) -> Int64Array:
    """(L, R) tokens of each rank without replicas."""
    num_layers = len(load_LE)
    row = np.arange(num_layers)[:, None] * num_ranks + owner_LE
    # Sums of whole numbers below 2^53: exact as floats.
    load = np.bincount(row.ravel(), weights=load_LE.ravel(), minlength=num_layers * num_ranks)
    return load.astype(np.int64).reshape(num_layers, num_ranks)


def _free_slots(free_LR: Int64Array, replicas_N3: Int64Array, limit: int) -> Int64Array:
    """(L, R) slots that replicas leave, and no more of a layer than its budget leaves."""
    used = replicas_N3[:, 0] * free_LR.shape[1] + replicas_N3[:, 2]
    used_LR = np.bincount(used, minlength=free_LR.size).reshape(free_LR.shape)
    free_LR = np.maximum(free_LR - used_LR, 0)
    left_L = limit - used_LR.sum(axis=1)
    before_LR = np.cumsum(free_LR, axis=1) - free_LR
    return np.clip(left_L[:, None] - before_LR, 0, free_LR)


def _join(placed_L: list[list[tuple[int, int]]]) -> Int64Array:
    """(N, 3) layer, expert and rank of all layers' replicas; from one flat list, for speed."""
    flat = [number for placed in placed_L for pair in placed for number in pair]
    layer = np.repeat(np.arange(len(placed_L)), [len(placed) for placed in placed_L])
    return np.column_stack([layer, np.array(flat, dtype=np.int64).reshape(-1, 2)])


def _owned(owner_E: Int64Array, num_ranks: int) -> list[list[int]]:
    """List each rank's experts."""
    owned_R: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert, rank in enumerate(owner_E.tolist()):
        owned_R[rank].append(expert)
    return owned_R


def _materialize_layer(
    load_E: list[int],
    owned_R: list[list[int]],
    load_R: list[int],
    num_slots: int,
    tolerance: float,
    aim: float,
    limit: int,
) -> tuple[list[tuple[int, int]], list[int]]:
    """Place one layer's replicas; relax the target as far as slots and budget demand.

    Returns:
        The replicas, and the tokens of each rank with them.
    """
    total = sum(load_R)
    fullest = max(load_R)
    balanced, wanted = (
        max(int(total / len(load_R) * (1 + part)), -(-total // len(load_R)))
        for part in (tolerance, aim)
    )
    if fullest <= balanced or not num_slots or not limit:
        return [], load_R
    low, high, target = wanted, fullest, wanted
    best: tuple[int, list[tuple[int, int]], list[int]] = (fullest, [], load_R)
    for _ in range(TARGET_TRIES):
        placed_R = load_R.copy()
        free_R = [num_slots] * len(load_R)
        placed = place_replicas(load_E.copy(), owned_R, placed_R, target, free_R)
        reached = max(placed_R)
        is_met = reached <= target and len(placed) <= limit
        if len(placed) <= limit and reached < best[0]:
            best = (reached, placed, placed_R)
        if is_met:
            high = target
        else:
            low = target
        if (is_met and target == wanted) or high - low <= 1:
            break
        target = (low + high) // 2
    return best[1], best[2]

# SPDX-License-Identifier: Apache-2.0

"""LAER-MoE (arXiv 2602.11686): a new layout from the loads, greedily.

FSEP can restore any layout at the same cost, so it plans freely: copies by tokens per copy from a
heap, where the plan with a first copy on every node is tried too; copies are placed by load, each
on the node that has fewest of its expert, there on the least loaded rank; the layout with the
lesser modelled time (fullest rank, and tokens that leave their node) is taken.
"""

from __future__ import annotations

import heapq

import numpy as np

from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines.common import from_slots


def plan(load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int) -> LayerPlan:
    """Plan the layout of one layer."""
    num_experts, num_ranks = len(load_E), topology.num_ranks
    capacity = num_experts // num_ranks + num_slots
    total = capacity * num_ranks
    starts = [1]
    if num_experts * topology.num_nodes <= total:
        starts.append(topology.num_nodes)
    best: tuple[float, list[list[int]]] | None = None
    for start in starts:
        counts = _copies(load_E, total, start, num_ranks)
        slots, fullest = _place(load_E, counts, topology, capacity)
        missing = sum(
            int(load_E[e]) * max(topology.num_nodes - counts[e], 0) for e in range(num_experts)
        )
        # Dispatch and combine, forward and backward, against three products forward and backward:
        # the weights 4 and 3 of the released planner, in tokens.
        time = 4 * missing / (topology.num_nodes * num_ranks) + 3 * fullest
        if best is None or time < best[0]:
            best = (time, slots)
    assert best is not None
    return from_slots(best[1], owner_E)


def _copies(load_E: Int64Array, total: int, start: int, num_ranks: int) -> list[int]:
    counts = [start] * len(load_E)
    heap = [(-int(load) / start, expert) for expert, load in enumerate(load_E)]
    heapq.heapify(heap)
    left = total - sum(counts)
    while left and heap:
        _, expert = heapq.heappop(heap)
        if counts[expert] < num_ranks:
            counts[expert] += 1
            left -= 1
            heapq.heappush(heap, (-int(load_E[expert]) / counts[expert], expert))
    return counts


def _place(
    load_E: Int64Array, counts: list[int], topology: Topology, capacity: int
) -> tuple[list[list[int]], float]:
    slots: list[list[int]] = [[] for _ in range(topology.num_ranks)]
    # Each node's ranks with an open slot, the least loaded first: (load, rank).
    open_M: list[list[tuple[float, int]]] = [[] for _ in range(topology.num_nodes)]
    for rank, node in enumerate(topology.node_of_rank):
        open_M[node].append((0.0, rank))
    share_E = load_E / counts
    fullest = 0.0
    for expert in np.argsort(-share_E, kind="stable").tolist():
        left, share = counts[expert], float(share_E[expert])
        while left:
            left, taken = _take(open_M, left)
            for load, rank in taken:
                slots[rank].append(expert)
                fullest = max(fullest, load + share)
                if len(slots[rank]) < capacity:
                    heapq.heappush(open_M[topology.node_of_rank[rank]], (load + share, rank))
    return slots, fullest


def _take(
    open_M: list[list[tuple[float, int]]], number: int
) -> tuple[int, list[tuple[float, int]]]:
    """Take ranks for copies of an expert, one of each node in turn, the least loaded first.

    Returns:
        How many are missing because no other rank has a slot, and the ranks with their loads.
    """
    taken: list[tuple[float, int]] = []
    while number and any(open_M):
        nodes = sorted((ranks for ranks in open_M if ranks), key=lambda ranks: ranks[0])[:number]
        taken += [heapq.heappop(ranks) for ranks in nodes]
        number -= len(nodes)
    return number, taken

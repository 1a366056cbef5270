# SPDX-License-Identifier: Apache-2.0

"""DeepSeek's EPLB (its README): replicate hot experts, pack the copies evenly; two policies.

Global: copies go to the experts with most tokens per copy, then to the ranks. Hierarchical: groups
of experts are first packed to the nodes, and each node replicates and packs its own.
"""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines.common import from_slots


def pack(weights: list[float], num_packs: int) -> list[list[int]]:
    """Pack as many items into each pack: heaviest first, into the lightest pack with room."""
    capacity = len(weights) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs
    if capacity == 1:
        return [[item] for item in range(num_packs)]
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        open_packs = [p for p in range(num_packs) if len(packs[p]) < capacity]
        lightest = min(open_packs, key=totals.__getitem__)
        packs[lightest].append(item)
        totals[lightest] += weights[item]
    return packs


def replicate(weights: list[float], num_copies: int) -> list[int]:
    """Return the expert of each copy: one each, then always the one with most weight a copy."""
    counts = [1] * len(weights)
    experts = list(range(len(weights)))
    for _ in range(num_copies - len(weights)):
        expert = max(range(len(weights)), key=lambda e: weights[e] / counts[e])
        counts[expert] += 1
        experts.append(expert)
    return experts


def rebalance(
    weights: list[int], num_copies: int, num_groups: int, num_nodes: int, num_ranks: int
) -> list[list[int]]:
    """Return the experts in each rank's slots. One group and one node make it the global policy."""
    group_size = len(weights) // num_groups
    groups = [float(sum(weights[g * group_size : (g + 1) * group_size])) for g in range(num_groups)]
    ranks_per_node = num_ranks // num_nodes
    result: list[list[int]] = []
    for node_groups in pack(groups, num_nodes):
        experts = [g * group_size + i for g in node_groups for i in range(group_size)]
        node_weights = [float(weights[e]) for e in experts]
        copies = replicate(node_weights, num_copies // num_nodes)
        shares = [node_weights[c] / copies.count(c) for c in copies]
        result += [
            [experts[copies[i]] for i in rank_copies]
            for rank_copies in pack(shares, ranks_per_node)
        ]
    return result


def plan_global(
    load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int
) -> LayerPlan:
    """Global policy."""
    copies = len(load_E) + topology.num_ranks * num_slots
    slots = rebalance(load_E.tolist(), copies, 1, 1, topology.num_ranks)
    return from_slots(slots, owner_E)


def plan_hierarchical(
    load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int
) -> LayerPlan:
    """Hierarchical policy, with as many groups as nodes' ranks; ragged nodes get the global one."""
    num_nodes = topology.num_nodes
    sizes = np.bincount(topology.node_R)
    if sizes.min() != sizes.max() or len(load_E) % topology.num_ranks:
        return plan_global(load_E, owner_E, topology, num_slots)
    copies = len(load_E) + topology.num_ranks * num_slots
    slots = rebalance(load_E.tolist(), copies, topology.num_ranks, num_nodes, topology.num_ranks)
    return from_slots(slots, owner_E)

# SPDX-License-Identifier: Apache-2.0

"""What the quota routine knows of a layer's plan before any token is counted.

Only replicated experts matter here: they are renumbered 0..X-1, and their instances form one flat
list of N, expert by expert.

[Note: the forest] Ranks and replicated experts are the nodes of a graph, instances its edges. A
spanning forest of it is walked in preorder, so that what hangs below an edge is one interval of
ranks: a running sum over ranks then gives the tokens that must cross each edge to make all ranks
of a tree equally full, with no matrix and no rounding. Edges outside the forest keep their tokens
meanwhile; up to three forests, made to cover all edges between them, take turns. The first is made
of owners and of the replicas in the ranks' first slots, where planners put those that carry most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron_fssdp.planning.plan import EMPTY, Int64Array, LayerPlan

MAX_FORESTS = 3


@dataclass(frozen=True, eq=False)
class Forest:
    """A spanning forest of the graph of ranks and experts. All arrays int64.

    V = R + X nodes: ranks first, then experts.

    Attributes:
        preorder_R: (R,) ranks as the walk meets them.
        from_N, to_N: (N,) the interval of `preorder_R` below each edge; empty if not in the forest.
        sign_N: (N,) 1 if the rank is below the expert, -1 if above, 0 if not in the forest.
        parent_V: (V,) the node above each node, itself at a root.
        parent_edge_V: (V,) the instance that links them; N at a root.
        doublings: pointer doublings that take any node to its root.
    """

    preorder_R: Int64Array
    from_N: Int64Array
    to_N: Int64Array
    sign_N: Int64Array
    parent_V: Int64Array
    parent_edge_V: Int64Array
    doublings: int


@dataclass(frozen=True, eq=False)
class QuotaTables:
    """A layer's replicated experts as index tables. All arrays int64.

    Attributes:
        num_ranks: R.
        expert_X: (X,) the replicated experts.
        single_E: (E,) 1 where an expert has one instance only, else 0.
        owner_E: (E,) owner of each expert.
        rank_N: (N,) the rank of each instance.
        expert_N: (N,) its expert, 0..X-1, ascending.
        column_N: (N,) the instance's number within its expert: owner 0, then by rank.
        first_X: (X,) where each expert's instances begin.
        count_X: (X,) instances of each expert.
        busy_N: (N,) replicated experts on the instance's rank.
        by_node_R: (R,) ranks in the order of their nodes.
        node_start: (nodes,) where each node begins in `by_node_R`.
        node_R: (R,) node of each rank.
        node_N: (N,) node of each instance.
        peers_N: (N,) instances of the same expert on the same node.
        by_node_N: (N,) instances by expert, then node.
        group_start_N: (N,) where the (expert, node) of each instance begins in `by_node_N`.
        is_by_node: whether `by_node_R` is 0, 1, 2, ...
        near_N: (K,) instances with others of their expert on their node, by expert and node.
        near_group_K: (K,) their (expert, node), counted from 0.
        near_first_G: (G,) where each (expert, node) begins in `near_N`.
        near_busy_K: (K,) how many of `near_N` are on the instance's rank.
        forests: see the note above.
    """

    num_ranks: int
    expert_X: Int64Array
    single_E: Int64Array
    owner_E: Int64Array
    rank_N: Int64Array
    expert_N: Int64Array
    column_N: Int64Array
    first_X: Int64Array
    count_X: Int64Array
    busy_N: Int64Array
    by_node_R: Int64Array
    node_start: Int64Array
    node_R: Int64Array
    node_N: Int64Array
    peers_N: Int64Array
    by_node_N: Int64Array
    group_start_N: Int64Array
    is_by_node: bool
    near_N: Int64Array
    near_group_K: Int64Array
    near_first_G: Int64Array
    near_busy_K: Int64Array
    forests: tuple[Forest, ...]

    @cached_property
    def colors(self) -> tuple[Int64Array, ...]:
        """Experts in classes, no two of a class on one rank: of each class, the instances.

        Padded with N to (experts of the class, most instances). Made when first asked for: few
        layers need it.
        """
        return _colors(self.rank_N.tolist(), self.count_X.tolist())


def quota_tables(plan: LayerPlan, node_of_rank: Sequence[int]) -> QuotaTables:
    """Return the tables of a layer's plan; built once per plan."""
    nodes = tuple(node_of_rank)
    if nodes not in plan.derived:
        plan.derived[nodes] = _build(plan, nodes)
    tables: QuotaTables = plan.derived[nodes]
    return tables


@lru_cache(maxsize=8)
def _nodes(nodes: tuple[int, ...]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """`node_R`, `by_node_R` and `node_start` of `QuotaTables`: the same for all layers."""
    node_R = np.array(nodes, dtype=np.int64)
    by_node_R = np.argsort(node_R, kind="stable")
    node_start = np.searchsorted(node_R[by_node_R], np.arange(int(node_R.max()) + 1))
    for array in (node_R, by_node_R, node_start):
        array.setflags(write=False)
    return node_R, by_node_R, node_start


def _build(plan: LayerPlan, nodes: tuple[int, ...]) -> QuotaTables:
    node_R, by_node_R, node_start = _nodes(nodes)
    rank_EI = plan.instance_rank_EI
    count_E = np.count_nonzero(rank_EI != EMPTY, axis=1)
    expert_X = np.flatnonzero(count_E > 1)
    count_X = count_E[expert_X]
    rank_XI = rank_EI[expert_X]
    rank_N = rank_XI[rank_XI != EMPTY]
    expert_N = np.repeat(np.arange(len(expert_X)), count_X)
    first_X = np.cumsum(count_X) - count_X
    node_N = node_R[rank_N]
    group_N = expert_N * len(node_start) + node_N
    by_node_N = np.argsort(group_N, kind="stable")
    count_G = np.bincount(group_N)
    peers_N = count_G[group_N]
    group_start_N = (np.cumsum(count_G) - count_G)[group_N]
    near_N = by_node_N[peers_N[by_node_N] > 1]
    is_first_K = np.diff(group_N[near_N], prepend=-1) > 0
    near_first_G, near_group_K = np.flatnonzero(is_first_K), np.cumsum(is_first_K) - 1
    lists = rank_N.tolist(), expert_N.tolist()
    slot_N = plan.instance_physical_EI[expert_X][rank_XI != EMPTY] % plan.num_slots
    owned_R = np.bincount(plan.owner_E, minlength=plan.num_ranks)
    # Owners before all replicas.
    turn_N = np.where(plan.owner_E[expert_X[expert_N]] == rank_N, -1, slot_N - owned_R[rank_N])
    return QuotaTables(
        num_ranks=plan.num_ranks,
        expert_X=expert_X,
        single_E=(count_E == 1).astype(np.int64),
        owner_E=plan.owner_E,
        rank_N=rank_N,
        expert_N=expert_N,
        column_N=np.arange(len(rank_N)) - first_X[expert_N],
        first_X=first_X,
        count_X=count_X,
        busy_N=np.bincount(rank_N, minlength=plan.num_ranks)[rank_N],
        by_node_R=by_node_R,
        node_start=node_start,
        node_R=node_R,
        node_N=node_N,
        peers_N=peers_N,
        by_node_N=by_node_N,
        group_start_N=group_start_N,
        is_by_node=bool((by_node_R == np.arange(len(by_node_R))).all()),
        near_N=near_N,
        near_group_K=near_group_K,
        near_first_G=near_first_G,
        near_busy_K=np.bincount(rank_N[near_N], minlength=plan.num_ranks)[rank_N[near_N]],
        forests=_forests(*lists, -count_X[expert_N], turn_N, plan.num_ranks),
    )


def _forests(
    rank_N: list[int],
    expert_N: list[int],
    coldness_N: Int64Array,
    turn_N: Int64Array,
    num_ranks: int,
) -> tuple[Forest, ...]:
    """Build forests until every edge is in one.

    Edges in no forest yet come first, then those in early slots (`turn_N`), then those of experts
    with many instances (`coldness_N`).
    """
    num_nodes = num_ranks + 1 + max(expert_N, default=-1)
    uses_N = [0] * len(rank_N)
    forests: list[Forest] = []
    while len(forests) < MAX_FORESTS and 0 in uses_N:
        leader, num_trees = list(range(num_nodes)), num_nodes
        edges: list[list[tuple[int, int]]] = [[] for _ in leader]
        for instance in np.lexsort((coldness_N, turn_N, np.array(uses_N))).tolist():
            top = rank = rank_N[instance]
            other = node = num_ranks + expert_N[instance]
            while leader[top] != top:
                leader[top] = top = leader[leader[top]]
            while leader[other] != other:
                leader[other] = other = leader[leader[other]]
            if top != other:
                leader[top] = other
                edges[rank].append((node, instance))
                edges[node].append((rank, instance))
                uses_N[instance] += 1
                num_trees -= 1
                if num_trees == 1:
                    break
        forests.append(_walk(edges, num_ranks, len(rank_N)))
    return tuple(forests)


def _walk(edges: list[list[tuple[int, int]]], num_ranks: int, num_instances: int) -> Forest:
    """Walk a forest in preorder. `edges`: for each node, its (neighbour, instance) pairs."""
    parent, depth = list(range(len(edges))), [0] * len(edges)
    parent_edge = [num_instances] * len(edges)
    order: list[int] = []
    is_seen = [False] * len(edges)
    for root in range(num_ranks):
        if is_seen[root]:
            continue
        is_seen[root] = True
        stack = [root]
        while stack:
            node = stack.pop()
            order.append(node)
            below = depth[node] + 1
            for neighbour, instance in edges[node]:
                if not is_seen[neighbour]:
                    is_seen[neighbour] = True
                    parent[neighbour] = node
                    parent_edge[neighbour] = instance
                    depth[neighbour] = below
                    stack.append(neighbour)
    # Ranks below each node, itself among them: leaves first.
    num_below = [1] * num_ranks + [0] * (len(edges) - num_ranks)
    for node in reversed(order):
        if parent[node] != node:
            num_below[parent[node]] += num_below[node]
    order_V = np.array(order, dtype=np.int64)
    is_rank_V = order_V < num_ranks
    parent_edge_V = np.array(parent_edge, dtype=np.int64)
    start_V = np.cumsum(is_rank_V) - is_rank_V
    # The last entry is the roots', which have no edge.
    from_N, to_N, sign_N = np.zeros((3, num_instances + 1), dtype=np.int64)
    edge_V = parent_edge_V[order_V]
    from_N[edge_V] = start_V
    to_N[edge_V] = start_V + np.array(num_below, dtype=np.int64)[order_V]
    sign_N[edge_V] = np.where(is_rank_V, 1, -1)
    return Forest(
        preorder_R=order_V[is_rank_V],
        from_N=from_N[:-1],
        to_N=to_N[:-1],
        sign_N=sign_N[:-1],
        parent_V=np.array(parent, dtype=np.int64),
        parent_edge_V=parent_edge_V,
        doublings=max(depth).bit_length(),
    )


def _colors(rank_N: list[int], count_X: list[int]) -> tuple[Int64Array, ...]:
    """Sort experts into classes such that no two of a class share a rank, greedily."""
    first, ranks_X = 0, []
    for count in count_X:
        ranks_X.append(rank_N[first : first + count])
        first += count
    taken_R: dict[int, int] = {}
    classes: list[list[int]] = []
    for expert in sorted(range(len(count_X)), key=lambda x: -count_X[x]):
        taken = 0
        for rank in ranks_X[expert]:
            taken |= taken_R.get(rank, 0)
        color = (~taken & (taken + 1)).bit_length() - 1
        for rank in ranks_X[expert]:
            taken_R[rank] = taken_R.get(rank, 0) | 1 << color
        if color == len(classes):
            classes.append([])
        classes[color].append(expert)
    instances_X = np.cumsum([0, *count_X])
    padded = []
    for members in classes:
        table = np.full((len(members), max(count_X[x] for x in members)), len(rank_N))
        for row, expert in enumerate(members):
            table[row, : count_X[expert]] = np.arange(instances_X[expert], instances_X[expert + 1])
        padded.append(table)
    return tuple(padded)

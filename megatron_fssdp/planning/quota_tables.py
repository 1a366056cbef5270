"""What the quota routine knows of a layer's plan before any token is counted.

Only replicated experts matter here: they are renumbered 0..X-1, and their instances form one flat
list of N. [Note: the forest] Ranks and replicated experts are the nodes of a graph, instances its
edges. A spanning forest of it is walked in preorder, so that what hangs below an edge is one
interval of ranks: a running sum over ranks then gives the tokens that must cross each edge for
all ranks of a tree to be equally full, with no matrix and no rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_fssdp.planning.plan import EMPTY, Int64Array, LayerPlan


@dataclass(frozen=True, eq=False)
class QuotaTables:
    """A layer's replicated experts, as index tables. All arrays int64.

    V = R + X nodes of the graph: ranks first, then experts.

    Attributes:
        num_ranks: R.
        expert_X: (X,) the replicated experts.
        single_E: (E,) 1 where an expert has one instance only, else 0.
        owner_E: (E,) owner of each expert.
        rank_N: (N,) the rank of each instance.
        expert_N: (N,) its expert, 0..X-1, ascending.
        first_X: (X,) where each expert's instances begin.
        column_N: (N,) the instance's number within its expert: owner 0, then by rank.
        count_X: (X,) instances of each expert.
        preorder_R: (R,) ranks as the walk meets them.
        from_N, to_N: (N,) the interval of `preorder_R` below each edge; empty if not in the forest.
        sign_N: (N,) 1 if the rank is below the expert, -1 if above.
        parent_V: (V,) the node above each node, itself at a root.
        parent_edge_V: (V,) the instance that links them; N at a root.
        doublings: pointer doublings that take any node to its root.
        colors: experts in classes, no two of a class on one rank: (instances padded to
            (experts of the class, most instances) with N).
    """

    num_ranks: int
    expert_X: Int64Array
    single_E: Int64Array
    owner_E: Int64Array
    rank_N: Int64Array
    expert_N: Int64Array
    first_X: Int64Array
    column_N: Int64Array
    count_X: Int64Array
    preorder_R: Int64Array
    from_N: Int64Array
    to_N: Int64Array
    sign_N: Int64Array
    parent_V: Int64Array
    parent_edge_V: Int64Array
    doublings: int
    colors: tuple[Int64Array, ...]


def build_tables(plan: LayerPlan) -> QuotaTables:
    """Build the tables of a layer's plan."""
    rank_EI = plan.instance_rank_EI
    count_E = np.count_nonzero(rank_EI != EMPTY, axis=1)
    expert_X = np.flatnonzero(count_E > 1)
    count_X = count_E[expert_X]
    rank_XI = rank_EI[expert_X]
    rank_N = rank_XI[rank_XI != EMPTY]
    expert_N = np.repeat(np.arange(len(expert_X)), count_X)
    first_X = np.cumsum(count_X) - count_X
    column_N = np.arange(len(rank_N)) - first_X[expert_N]
    lists = rank_N.tolist(), first_X.tolist(), count_X.tolist()
    walk = _walk(_forest(*lists, plan.num_ranks), plan.num_ranks, len(rank_N))
    return QuotaTables(
        num_ranks=plan.num_ranks,
        expert_X=expert_X,
        single_E=(count_E == 1).astype(np.int64),
        owner_E=plan.owner_E,
        rank_N=rank_N,
        expert_N=expert_N,
        first_X=first_X,
        column_N=column_N,
        count_X=count_X,
        colors=_color(*lists),
        **walk,
    )


def _forest(
    rank_N: list[int], first_X: list[int], count_X: list[int], num_ranks: int
) -> list[list[tuple[int, int]]]:
    """Choose a spanning forest: for each node, its (neighbour, instance) pairs.

    Experts with many instances first: they are the hot ones, whose quotas have most room to move.
    """
    num_experts = len(first_X)
    leader = list(range(num_ranks + num_experts))
    edges: list[list[tuple[int, int]]] = [[] for _ in leader]
    for expert in sorted(range(num_experts), key=lambda x: -count_X[x]):
        node = num_ranks + expert
        for instance in range(first_X[expert], first_X[expert] + count_X[expert]):
            rank = top = rank_N[instance]
            while leader[top] != top:
                leader[top] = top = leader[leader[top]]
            if top != node:
                leader[top] = node
                edges[rank].append((node, instance))
                edges[node].append((rank, instance))
    return edges


def _walk(
    edges: list[list[tuple[int, int]]], num_ranks: int, num_instances: int
) -> dict[str, Any]:
    """Walk the forest in preorder; return the fields of `QuotaTables` that describe it."""
    parent = list(range(len(edges)))
    parent_edge = [num_instances] * len(edges)
    start, end, sign = ([0] * num_instances for _ in range(3))
    preorder: list[int] = []
    seen = [False] * len(edges)
    depth = deepest = 0
    for root in range(num_ranks):
        if seen[root]:
            continue
        seen[root] = True
        stack = [root]
        while stack:
            node = stack.pop()
            if node < 0:
                # All below this node is walked.
                depth -= 1
                end[parent_edge[~node]] = len(preorder)
                continue
            edge = parent_edge[node]
            if edge < num_instances:
                depth += 1
                deepest = max(deepest, depth)
                start[edge] = len(preorder)
                sign[edge] = 1 if node < num_ranks else -1
                stack.append(~node)
            if node < num_ranks:
                preorder.append(node)
            for neighbour, instance in edges[node]:
                if not seen[neighbour]:
                    seen[neighbour] = True
                    parent[neighbour] = node
                    parent_edge[neighbour] = instance
                    stack.append(neighbour)
    return {
        "preorder_R": np.array(preorder, dtype=np.int64),
        "from_N": np.array(start, dtype=np.int64),
        "to_N": np.array(end, dtype=np.int64),
        "sign_N": np.array(sign, dtype=np.int64),
        "parent_V": np.array(parent, dtype=np.int64),
        "parent_edge_V": np.array(parent_edge, dtype=np.int64),
        "doublings": deepest.bit_length(),
    }


def _color(
    rank_N: list[int], first_X: list[int], count_X: list[int]
) -> tuple[Int64Array, ...]:
    """Sort experts into classes such that no two of a class share a rank, greedily."""
    taken_R: dict[int, int] = {}
    classes: list[list[int]] = []
    for expert in sorted(range(len(first_X)), key=lambda x: -count_X[x]):
        ranks = rank_N[first_X[expert] : first_X[expert] + count_X[expert]]
        taken = 0
        for rank in ranks:
            taken |= taken_R.get(rank, 0)
        color = (~taken & (taken + 1)).bit_length() - 1
        for rank in ranks:
            taken_R[rank] = taken_R.get(rank, 0) | 1 << color
        if color == len(classes):
            classes.append([])
        classes[color].append(expert)
    padded = []
    for members in classes:
        table = np.full((len(members), max(count_X[x] for x in members)), len(rank_N))
        for row, expert in enumerate(members):
            table[row, : count_X[expert]] = np.arange(
                first_X[expert], first_X[expert] + count_X[expert]
            )
        padded.append(table)
    return tuple(padded)

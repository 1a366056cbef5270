# SPDX-License-Identifier: Apache-2.0

"""Where a layer's tokens go: which rank computes how many of which expert, and what crosses links.

Shape letters beyond those of `planning.plan`: N instances of the layer, in the order of
`instances`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.plan import EMPTY, Int64Array, LayerPlan
from megatron_fssdp.planning.quota_tables import quota_tables
from megatron_fssdp.planning.quotas import split_sources

Float64Array = npt.NDArray[np.float64]
Number = npt.NDArray[np.float64] | Int64Array


@dataclass(frozen=True, eq=False)
class Flow:
    """One micro-batch's tokens in one layer.

    Attributes:
        rank_N: (N,) int64, the rank of each instance.
        rows_N: (N,) float64, tokens that each instance computes.
        tokens_RR: (R, R) float64, tokens from each source rank (row) to each computing rank.
    """

    rank_N: Int64Array
    rows_N: Float64Array
    tokens_RR: Float64Array

    @cached_property
    def load_R(self) -> Float64Array:
        """(R,) tokens that each rank computes."""
        load_R: Float64Array = self.tokens_RR.sum(axis=0)
        return load_R


def instances(plan: LayerPlan) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return (N,) experts, ranks, and columns in (E, I), by expert, the owner first."""
    expert_N, column_N = np.nonzero(plan.instance_rank_EI != EMPTY)
    return expert_N, plan.instance_rank_EI[expert_N, column_N], column_N


def flow_of_owners(counts_RE: Int64Array, owner_E: Int64Array) -> Flow:
    """Return the flow if every expert is computed by its owner."""
    num_ranks = len(counts_RE)
    to_ER = _one_hot(owner_E, num_ranks)
    return Flow(owner_E, counts_RE.sum(axis=0, dtype=np.float64), counts_RE @ to_ER)


def flow_of_quotas(
    counts_RE: Int64Array, quota_EI: Int64Array, plan: LayerPlan, node_of_rank: Sequence[int]
) -> Flow:
    """Return the flow under this project's quotas.

    Args:
        counts_RE: (R, E) int64, tokens of each source for each expert.
        quota_EI: (E, I) int64, as `quotas.balance` returns it for these counts.
        plan: where the instances are.
        node_of_rank: (R,) the node of each rank.
    """
    tables = quota_tables(plan, node_of_rank)
    num_ranks = len(counts_RE)
    expert_N, rank_N, column_N = instances(plan)
    rows_N = quota_EI[expert_N, column_N].astype(np.float64)
    single_RE = counts_RE * tables.single_E
    tokens_RR = single_RE @ _one_hot(plan.owner_E, num_ranks)
    if len(tables.expert_X):
        split_RN = split_sources(counts_RE, quota_EI, plan, node_of_rank)
        tokens_RR = tokens_RR + split_RN @ _one_hot(tables.rank_N, num_ranks)
    return Flow(rank_N, rows_N, tokens_RR)


def flow_by_locality(
    counts_RE: Int64Array,
    plan: LayerPlan,
    node_of_rank: Sequence[int],
    levels: tuple[str, ...] = ("rank", "node"),
) -> Flow:
    """Return the flow under the paper's dispatch rule (section 4.4), or a part of it.

    A token stays on its rank if its expert is there, else goes to its node's instances, else to all
    instances; evenly among those that qualify, fractions allowed.

    Args:
        counts_RE: (R, E) int64, tokens of each source for each expert.
        plan: where the instances are.
        node_of_rank: (R,) the node of each rank.
        levels: which preferences hold; none: tokens are spread over all instances.
    """
    expert_N, rank_N, _ = instances(plan)
    node_R = np.array(node_of_rank)
    num_ranks, num_experts = counts_RE.shape
    count_E = np.bincount(expert_N, minlength=num_experts)
    weight_RN = np.broadcast_to(1.0 / count_E[expert_N], (num_ranks, len(expert_N)))
    if "node" in levels:
        count_ME = np.zeros((int(node_R.max()) + 1, num_experts))
        np.add.at(count_ME, (node_R[rank_N], expert_N), 1.0)
        on_node_RN = count_ME[node_R][:, expert_N]
        is_near_RN = node_R[:, None] == node_R[rank_N]
        weight_RN = np.where(on_node_RN > 0, is_near_RN / np.maximum(on_node_RN, 1.0), weight_RN)
    if "rank" in levels:
        has_RE = np.zeros((num_ranks, num_experts), dtype=bool)
        has_RE[rank_N, expert_N] = True
        is_here_RN = np.arange(num_ranks)[:, None] == rank_N
        weight_RN = np.where(has_RE[:, expert_N], is_here_RN, weight_RN)
    split_RN = counts_RE[:, expert_N] * weight_RN
    return Flow(rank_N, split_RN.sum(axis=0), split_RN @ _one_hot(rank_N, num_ranks))


def _one_hot(rank_N: Int64Array, num_ranks: int) -> Float64Array:
    """(N, R) ones at the ranks. Products with it are sums of whole numbers that floats hold."""
    one_hot = np.zeros((len(rank_N), num_ranks))
    one_hot[np.arange(len(rank_N)), rank_N] = 1.0
    return one_hot

# SPDX-License-Identifier: Apache-2.0

"""Flows: equal to the planner's split, token by token, and the paper's rule by hand."""

import numpy as np
import pytest

from megatron_fssdp.planning.cost import token_traffic
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.quotas import balance, rank_loads
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines.common import with_replicas
from megatron_fssdp.simulation.flow import flow_by_locality, flow_of_owners, flow_of_quotas
from megatron_fssdp.simulation.loads import zipf_series


@pytest.mark.parametrize(
    "nodes",
    [(0,) * 8, (0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 0, 1, 0, 1, 1, 1), tuple(range(8))],
)
def test_flow_of_quotas_is_the_planners_split(nodes) -> None:
    topology = Topology(nodes)
    owner_LE = shard_evenly(1, 32, 8)
    for seed in range(3):
        counts_RE = zipf_series(32, 8, 1.0, 2, seed=seed, tokens=200)
        plan = plan_layers(
            counts_RE[0].sum(axis=0)[None], owner_LE, topology, PlanSettings()
        ).layer(0)
        quota_EI = balance(counts_RE[1], plan, nodes)
        flow = flow_of_quotas(counts_RE[1], quota_EI, plan, nodes)
        wanted_RR = token_traffic(counts_RE[1], quota_EI, plan, nodes)
        assert plan.num_replicas
        np.testing.assert_array_equal(flow.tokens_RR, wanted_RR)
        np.testing.assert_array_equal(flow.load_R, rank_loads(quota_EI, plan))
        np.testing.assert_array_equal(
            np.bincount(flow.rank_N, weights=flow.rows_N, minlength=8), flow.load_R
        )


def test_owners_alone() -> None:
    flow = flow_of_owners(np.array([[6, 1], [2, 1]]), np.array([0, 1]))
    np.testing.assert_array_equal(flow.tokens_RR, [[6, 1], [2, 1]])
    np.testing.assert_array_equal(flow.rows_N, [8, 2])


def test_locality_by_hand() -> None:
    """4 ranks on 2 nodes; expert 0 at home on rank 0, with replicas on ranks 2 and 3."""
    plan = with_replicas(np.array([0, 1]), [(0, 2), (0, 3)], 4, 1)
    counts_RE = np.array([[10, 0], [6, 0], [4, 0], [8, 2]])
    nodes = (0, 0, 1, 1)
    # Ranks 0, 2 and 3 keep theirs; rank 1's stay on its node, at rank 0; expert 1 is on rank 1.
    flow = flow_by_locality(counts_RE, plan, nodes)
    np.testing.assert_array_equal(
        flow.tokens_RR, [[10, 0, 0, 0], [6, 0, 0, 0], [0, 0, 4, 0], [0, 2, 0, 8]]
    )
    # Nodes only: node 1's instances share its 12 tokens.
    flow = flow_by_locality(counts_RE, plan, nodes, ("node",))
    np.testing.assert_array_equal(flow.load_R, [16, 2, 6, 6])
    # Evenly over all three.
    flow = flow_by_locality(counts_RE, plan, nodes, ())
    np.testing.assert_allclose(flow.load_R, [28 / 3, 2, 28 / 3, 28 / 3])

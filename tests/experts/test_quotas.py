"""The device routine equals the numpy one to the token, without host synchronisation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fssdp.experts.quotas import DEVICE_TURNS, DeviceTables, split_tokens
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.quotas import balance, rank_loads, split_source
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.loads import zipf_series
from tests.planning.cases import random_counts, random_plan


class Operations(TorchDispatchMode):
    """Records every torch operation."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def check_equal(counts_RE, plan, nodes, tolerance=0.0):
    quota_EI = balance(counts_RE, plan, nodes, tolerance, turns=DEVICE_TURNS)
    tables = DeviceTables.build(plan, nodes, "cpu")
    for source in range(plan.num_ranks):
        split_EI, load_R = split_tokens(torch.tensor(counts_RE), tables, source, tolerance)
        assert split_EI.tolist() == split_source(counts_RE, quota_EI, plan, nodes, source).tolist()
        assert load_R.tolist() == rank_loads(quota_EI, plan).tolist()


@pytest.mark.parametrize("seed", range(25))
def test_equal_on_random_plans(seed):
    rng = np.random.default_rng(seed)
    num_ranks, num_experts = int(rng.integers(1, 9)), int(rng.integers(1, 15))
    plan = random_plan(rng, num_experts, num_ranks, int(rng.integers(0, 4)))
    nodes = np.unique(rng.integers(0, 3, num_ranks), return_inverse=True)[1].tolist()
    check_equal(random_counts(rng, num_ranks, num_experts), plan, nodes)


@pytest.mark.parametrize("spare_tokens", [None, 1])
@pytest.mark.parametrize("tolerance", [0.0, 0.02])
def test_equal_on_drifting_loads(spare_tokens, tolerance):
    series = zipf_series(64, 8, 1.0, 4, drift_step=0.1)
    topology = Topology.uniform(8, 4)
    settings = PlanSettings(spare_tokens=spare_tokens)
    plan = plan_layers(
        series[:3].sum(axis=(0, 1))[None] // 3, shard_evenly(1, 64, 8), topology, settings
    ).layer(0)
    check_equal(series[3], plan, topology.node_of_rank, tolerance)


@pytest.mark.parametrize(("spare_tokens", "most"), [(None, 650), (1, 1800)])
def test_operations_are_few_and_never_wait(spare_tokens, most):
    """The number of operations is that of the module's docstring; none asks for a value."""
    series = zipf_series(64, 16, 0.8, 2)
    topology = Topology.uniform(16, 8)
    plan = plan_layers(
        series[0].sum(axis=0)[None],
        shard_evenly(1, 64, 16),
        topology,
        PlanSettings(spare_tokens=spare_tokens),
    ).layer(0)
    tables = DeviceTables.build(plan, topology.node_of_rank, "cpu")
    with Operations() as operations:
        split_tokens(torch.tensor(series[1]), tables, 5)
    waits = ("item", "local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero")
    assert not [name for name in operations.names if any(wait in name for wait in waits)]
    assert len(operations.names) <= most


@pytest.mark.parametrize(("slots", "least", "most"), [(0, 1, 10), (2, 600, 1300), (8, 1301, 1700)])
def test_operations_are_those_of_the_readme(slots, least, most):
    """600 to 1,700 where there are replicas, more with many slots; next to none without."""
    series = zipf_series(64, 16, 0.8, 2)
    topology = Topology.uniform(16, 8)
    settings = PlanSettings(num_replica_slots=slots)
    plan = plan_layers(
        series[0].sum(axis=0)[None], shard_evenly(1, 64, 16), topology, settings
    ).layer(0)
    tables = DeviceTables.build(plan, topology.node_of_rank, "cpu")
    with Operations() as operations:
        split_tokens(torch.tensor(series[1]), tables, 5)
    assert least <= len(operations.names) <= most


def test_no_replicas_means_owners():
    plan = random_plan(np.random.default_rng(0), 6, 3, 0)
    check_equal(np.arange(18).reshape(3, 6), plan, (0, 0, 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_equal_on_the_device_without_synchronisation():
    series = zipf_series(64, 16, 0.8, 2)
    topology = Topology.uniform(16, 8)
    plan = plan_layers(
        series[0].sum(axis=0)[None], shard_evenly(1, 64, 16), topology, PlanSettings()
    ).layer(0)
    tables = DeviceTables.build(plan, topology.node_of_rank, "cuda")
    counts_RE = torch.tensor(series[1], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        split_EI, _ = split_tokens(counts_RE, tables, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    quota_EI = balance(series[1], plan, topology.node_of_rank, turns=DEVICE_TURNS)
    expected = split_source(series[1], quota_EI, plan, topology.node_of_rank, 5)
    assert split_EI.tolist() == expected.tolist()

"""Replicas node by node: what keeps tokens near, what levels, and the quick look at a plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_fssdp.planning.by_node import fill_by_node, place_by_node
from megatron_fssdp.planning.cost import tokens_between_nodes
from megatron_fssdp.planning.estimate import estimate
from megatron_fssdp.planning.plan import Plan, build_slots
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.quotas import balance, rank_loads
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.loads import zipf_series
from tests.planning.cases import make_plan, seeds


def place(load_E, topology, num_slots, least_tokens, **options):
    load_LE = np.array([load_E], dtype=np.int64)
    owner_LE = shard_evenly(1, len(load_E), topology.num_ranks)
    target_L = -(-load_LE.sum(axis=1) // topology.num_ranks)
    slots = place_by_node(load_LE, owner_LE, topology, num_slots, least_tokens, target_L, **options)
    return [tuple(row) for row in slots.replicas()[:, 1:].tolist()]


def test_by_hand():
    """Two nodes of two ranks, one expert each, loads 80, 20, 10, 10, one slot a rank.

    Each node has half of the tokens: 40 of expert 0. Node 1 lacks experts 0 and 1 (worth 40 and 10
    a token kept), node 0 lacks 2 and 3 (5 each); a second instance of expert 0 on node 0 is worth
    3/8 of 40 / 2 tokens: 7.5, more than 5. So node 1 gets experts 0 and 1, the hotter one on its
    emptier rank, the lower one; node 0 gets expert 0 again and one that it lacks.
    """
    placed = place([80, 20, 10, 10], Topology.uniform(4, 2), 1, 1)
    assert sorted(pair for pair in placed if pair[1] >= 2) == [(0, 2), (1, 3)]
    assert (0, 1) in placed
    assert all(expert in (2, 3) for expert, rank in placed if rank == 0)


def test_replicas_between_nodes_must_pay():
    """Nobody keeps 50 tokens on a second node: only copies inside nodes are left."""
    topology = Topology.uniform(4, 2)
    placed = place([80, 20, 10, 10], topology, 1, 50)
    assert placed
    for expert, rank in placed:
        assert topology.node_of_rank[expert] == topology.node_of_rank[rank] or expert == 0


@pytest.mark.parametrize("levels_last", [False, True])
def test_ragged_and_interleaved_nodes(levels_last):
    """No rank gets more than its slots, none an expert twice: `build_slots` and plans prove it."""
    rng = np.random.default_rng(0)
    topology = Topology((0, 1, 0, 1, 0, 2))
    for _ in range(30):
        load_E = rng.integers(0, 1000, 12).tolist()
        placed = place(load_E, topology, 2, int(rng.integers(0, 300)), levels_last=levels_last)
        assert len(set(placed)) == len(placed)
        assert all(expert // 2 != rank for expert, rank in placed)
        assert np.bincount([rank for _, rank in placed], minlength=6).max() <= 2


def test_what_an_owner_cannot_keep_goes_to_its_node_first():
    """Rank 0 owns four warm experts; each node has slots for the two hottest of the others only."""
    load_E = [90] * 4 + [100] * 4 + [1] * 8
    placed = place(load_E, Topology.uniform(4, 2), 1, 1)
    assert any(expert < 4 and rank == 1 for expert, rank in placed)
    assert any(4 <= expert < 8 and rank == 0 for expert, rank in placed)


def test_filling_by_hand():
    """Two nodes of two ranks, one expert each, loads 80, 20, 10, 10, one slot a rank, target 30.

    Each node has 40 tokens for expert 0. Node 1's emptiest rank, 2, lacks 20 of the target, all of
    which it has itself; rank 1 lacks 10, on expert 0's own node, where they save nothing. Then
    rank 3 lacks 20, and node 1 still has 20 of its own.
    """
    load_LE, topology = np.array([[80, 20, 10, 10]]), Topology.uniform(4, 2)
    owner_LE = shard_evenly(1, 4, 4)
    slots = fill_by_node(load_LE, owner_LE, topology, 1, 1, np.array([30]))
    placed = [tuple(row) for row in slots.replicas()[:, 1:].tolist()]
    assert sorted(placed) == [(0, 1), (0, 2), (0, 3)]
    assert slots.load_by_rank(4).tolist() == [[30, 30, 30, 30]]


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_slots_keep_all_tokens(seed):
    """Any owners and nodes: no token is lost, no slot used twice, no expert twice on a rank."""
    rng = np.random.default_rng(seed)
    num_layers, num_ranks = int(rng.integers(1, 4)), int(rng.integers(2, 9))
    num_experts, num_slots = int(rng.integers(1, 24)), int(rng.integers(1, 4))
    owner_LE = rng.integers(0, num_ranks, (num_layers, num_experts))
    load_LE = rng.zipf(1.4, (num_layers, num_experts)).clip(max=10**6)
    topology = Topology.from_hosts(rng.integers(0, 4, num_ranks).astype(str).tolist())
    target_L = -(-load_LE.sum(axis=1) // num_ranks)
    args = load_LE, owner_LE, topology, num_slots, int(rng.integers(1, 1000)), target_L
    for slots in (place_by_node(*args), place_by_node(*args, True), fill_by_node(*args)):
        lost_L = load_LE.sum(axis=1) - slots.load_by_rank(num_ranks).sum(axis=1)
        # Shares are rounded down.
        assert (lost_L >= 0).all()
        assert (lost_L <= num_experts * topology.num_nodes * num_slots).all()
        assert slots.used_NW.max() <= num_slots
        slots_LRS = build_slots(owner_LE, slots.replicas(), num_ranks, num_slots)
        Plan(owner_LE=owner_LE.copy(), slot_expert_LRS=slots_LRS)


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_estimate_is_no_promise_that_quotas_break(seed):
    """What the quick look says, real quotas reach, but for whole tokens."""
    rng = np.random.default_rng(seed)
    num_ranks, num_experts = int(rng.integers(2, 9)), int(rng.integers(8, 20))
    owner_E = rng.integers(0, num_ranks, num_experts)
    replicas = [
        (e, r)
        for e in range(num_experts)
        for r in range(num_ranks)
        if r != owner_E[e] and rng.random() < 0.15
    ]
    plan = make_plan(owner_E.tolist(), replicas, num_ranks, num_experts)
    counts_RE = rng.integers(0, 500, (num_ranks, num_experts))
    rows = np.array([(0, e, r) for e, r in replicas], dtype=np.int64).reshape(-1, 3)
    if not replicas:
        return
    said = estimate(counts_RE.sum(axis=0)[None], owner_E[None], rows, num_ranks, 8)[0]
    load_R = rank_loads(balance(counts_RE, plan, (0,) * num_ranks), plan)
    assert load_R.max() <= said + plan.num_replicas + 1


def test_estimate_of_huge_loads():
    """2^40 tokens: the last places are dropped, nothing overflows."""
    load_LE = np.array([[2**40, 0], [8, 0]], dtype=np.int64)
    rows = np.array([(0, 0, 1), (1, 0, 1)])
    said_L = estimate(load_LE, np.array([[0, 0], [0, 0]]), rows, 2, 8)
    assert 2**39 <= said_L[0] <= 2**39 * 1.001
    assert said_L[1] == 4


def test_room_for_every_expert_means_no_token_leaves_its_node():
    """E = 32 on 4 nodes of 4, 8 slots a rank: each node can hold all that it lacks."""
    counts_RE = zipf_series(32, 16, 0.8, 1)[0]
    topology, owner_LE = Topology.uniform(16, 4), shard_evenly(1, 32, 16)
    load_LE = counts_RE.sum(axis=0)[None]
    plan = plan_layers(load_LE, owner_LE, topology, PlanSettings(num_replica_slots=8)).layer(0)
    quota_EI = balance(counts_RE, plan, topology.node_of_rank)
    load_R = rank_loads(quota_EI, plan)
    assert load_R.max() <= 1.001 * load_R.mean()
    far = tokens_between_nodes(counts_RE, quota_EI, plan, topology)
    assert far <= 0.01 * counts_RE.sum()


def test_light_loads_get_no_replica_on_a_fresh_node_that_balance_does_not_need():
    """One rank of node 0 is too full, its node is not: all copies stay inside."""
    load_LE = np.array([[60, 0, 0, 0, 15, 15, 15, 15]], dtype=np.int64)
    topology = Topology.uniform(8, 4)
    settings = PlanSettings(num_replica_slots=1, spare_tokens=1000)
    plan = plan_layers(load_LE, shard_evenly(1, 8, 8), topology, settings).layer(0)
    ranks = plan.instance_rank_EI[0]
    assert sorted(ranks[ranks >= 0].tolist()) == [0, 1, 2, 3]
    assert plan.num_replicas == 3

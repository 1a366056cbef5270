"""Quotas: minimal, conserving, local; against a linear program."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from megatron_fssdp.planning.cost import token_traffic, tokens_between_nodes
from megatron_fssdp.planning.equalize import instance_loads, relax, spread_near
from megatron_fssdp.planning.plan import EMPTY, LayerPlan
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.quota_tables import quota_tables
from megatron_fssdp.planning.quotas import (
    balance,
    good_enough_shift,
    messages_of,
    rank_loads,
    split_source,
)
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.loads import zipf_series
from tests.planning.cases import make_plan, random_counts, random_plan, seeds


def least_fullest(load_E, plan: LayerPlan) -> float:
    """The least possible load of the fullest rank, by a linear program."""
    expert, column = np.nonzero(plan.instance_rank_EI != EMPTY)
    rank = plan.instance_rank_EI[expert, column]
    num, ranks = len(expert), plan.num_ranks
    at = np.arange(num)
    equal = csr_matrix((np.ones(num), (expert, at)), shape=(plan.num_experts, num + 1))
    values = np.concatenate([np.ones(num), -np.ones(ranks)])
    rows = np.concatenate([rank, np.arange(ranks)])
    limit = csr_matrix(
        (values, (rows, np.concatenate([at, np.full(ranks, num)]))), shape=(ranks, num + 1)
    )
    objective = np.zeros(num + 1)
    objective[-1] = 1
    result = linprog(objective, A_ub=limit, b_ub=np.zeros(ranks), A_eq=equal, b_eq=load_E)
    assert result.status == 0
    return float(result.fun)


def test_docstring_examples():
    plan = make_plan([0, 1], [(0, 1)], num_ranks=2, num_slots=1)
    counts_RE = np.array([[6, 1], [2, 1]])
    quota_EI = balance(counts_RE, plan, (0, 0))
    assert quota_EI.tolist() == [[5, 3], [2, 0]]
    assert split_source(counts_RE, quota_EI, plan, (0, 0), 0).tolist() == [[5, 1], [1, 0]]
    assert split_source(counts_RE, quota_EI, plan, (0, 0), 1).tolist() == [[0, 2], [1, 0]]


def check(counts_RE, plan, nodes):
    quota_EI = balance(counts_RE, plan, nodes)
    load_E = counts_RE.sum(axis=0, dtype=np.int64)
    assert (quota_EI >= 0).all()
    assert (quota_EI[plan.instance_rank_EI == EMPTY] == 0).all()
    assert (quota_EI.sum(axis=1) == load_E).all()
    load_R = rank_loads(quota_EI, plan)
    owners_R = np.bincount(plan.owner_E, weights=load_E, minlength=plan.num_ranks)
    assert load_R.max() <= owners_R.max()
    return quota_EI, load_R


@settings(max_examples=80, deadline=None)
@given(seeds)
@example(0)
def test_fullest_rank_is_within_a_token_per_replica_of_the_least(seed):
    """Any owners, any replicas, any loads: the note in `equalize`, against a linear program."""
    rng = np.random.default_rng(seed)
    num_ranks, num_experts = int(rng.integers(1, 9)), int(rng.integers(1, 13))
    plan = random_plan(rng, num_experts, num_ranks, int(rng.integers(0, 4)))
    nodes = tuple((np.arange(num_ranks) // int(rng.integers(1, 4))).tolist())
    counts_RE = random_counts(rng, num_ranks, num_experts)
    _, load_R = check(counts_RE, plan, nodes)
    least = least_fullest(counts_RE.sum(axis=0), plan)
    # The program splits tokens: the least in whole ones is up to one more. It also rounds.
    assert load_R.max() < least * (1 + 1e-7) + 1 + plan.num_replicas


@pytest.mark.parametrize("seed", range(6))
def test_large_dense_plans_reach_the_least(seed):
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, 64, 16, 3)
    counts_RE = rng.multinomial(20000, rng.dirichlet(np.full(64, 0.3)), size=16)
    _, load_R = check(counts_RE, plan, tuple((np.arange(16) // 4).tolist()))
    least = least_fullest(counts_RE.sum(axis=0), plan)
    assert load_R.max() <= least + plan.num_replicas


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_sources_together_meet_the_quotas(seed):
    """Ragged and interleaved nodes too."""
    rng = np.random.default_rng(seed)
    num_ranks, num_experts = int(rng.integers(1, 9)), int(rng.integers(1, 11))
    plan = random_plan(rng, num_experts, num_ranks, 3)
    nodes = rng.integers(0, 3, num_ranks)
    nodes = tuple(np.unique(nodes, return_inverse=True)[1].tolist())
    counts_RE = random_counts(rng, num_ranks, num_experts)
    quota_EI, _ = check(counts_RE, plan, nodes)
    total = np.zeros_like(quota_EI)
    for source in range(num_ranks):
        split_EI = split_source(counts_RE, quota_EI, plan, nodes, source)
        assert (split_EI >= 0).all()
        assert (split_EI.sum(axis=1) == counts_RE[source]).all()
        total += split_EI
    assert (total == quota_EI).all()
    # Tokens stay on their node as far as the quotas allow.
    topology = Topology(nodes)
    tokens_RR = token_traffic(counts_RE, quota_EI, plan, nodes)
    far_RR = topology.node_R[:, None] != topology.node_R
    assert tokens_RR[far_RR].sum() == tokens_between_nodes(counts_RE, quota_EI, plan, topology)


def test_shares_are_met_exactly_whatever_the_number_of_replicas():
    """An expert on all of 3 idle ranks: 10 tokens are split 4, 3, 3 (vllm#40810 split by hash)."""
    plan = make_plan([0], [(0, 1), (0, 2)], num_ranks=3, num_slots=1)
    counts_RE = np.array([[10], [0], [0]])
    assert sorted(balance(counts_RE, plan, (0, 0, 0))[0].tolist()) == [3, 3, 4]


def test_tokens_stay_local_where_balance_allows():
    """Two nodes, an expert on each: all tokens stay on their node; nobody is fuller for it."""
    plan = make_plan([0, 2], [(0, 2), (1, 0)], num_ranks=4, num_slots=1)
    counts_RE = np.array([[6, 4], [0, 0], [4, 6], [0, 0]])
    nodes = (0, 0, 1, 1)
    quota_EI = balance(counts_RE, plan, nodes)
    assert quota_EI.tolist() == [[6, 4], [6, 4]]
    assert tokens_between_nodes(counts_RE, quota_EI, plan, Topology(nodes)) == 0


def test_tolerance_trades_balance_for_traffic():
    """Rank 0's node has 60 of the 100 tokens: they stay when 20 % more than the mean is allowed."""
    plan = make_plan([0, 0], [(0, 1)], num_ranks=2, num_slots=1)
    counts_RE = np.array([[60, 0], [40, 0]])
    nodes, topology = (0, 1), Topology((0, 1))
    exact = balance(counts_RE, plan, nodes)
    loose = balance(counts_RE, plan, nodes, tolerance=0.2)
    assert rank_loads(exact, plan).tolist() == [50, 50]
    assert rank_loads(loose, plan).tolist() == [60, 40]
    assert tokens_between_nodes(counts_RE, exact, plan, topology) == 10
    assert tokens_between_nodes(counts_RE, loose, plan, topology) == 0


def test_room_below_the_fullest_rank_is_used_for_locality():
    """Expert 1 alone fills rank 1 with 100; expert 0's tokens need not be spread evenly."""
    plan = make_plan([0, 1], [(0, 2)], num_ranks=4, num_slots=1)
    counts_RE = np.array([[40, 0], [0, 100], [10, 0], [0, 0]])
    quota_EI = balance(counts_RE, plan, (0, 0, 1, 1))
    assert quota_EI.tolist() == [[40, 10], [100, 0]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_any_dtype_and_every_run_give_the_same_bytes(dtype):
    rng = np.random.default_rng(3)
    plan = random_plan(rng, 12, 6, 2)
    counts_RE = random_counts(np.random.default_rng(8), 6, 12) % 5000
    nodes = (0, 0, 0, 1, 1, 1)
    expected = balance(counts_RE, plan, nodes)
    assert balance(counts_RE.astype(dtype), plan, nodes).tobytes() == expected.tobytes()
    again = LayerPlan(plan.owner_E.copy(), plan.slot_expert_RS.copy())
    assert balance(counts_RE, again, nodes).tobytes() == expected.tobytes()
    split = split_source(counts_RE, expected, plan, nodes, 2)
    assert split_source(counts_RE.astype(dtype), expected, again, nodes, 2).tobytes() == (
        split.tobytes()
    )


def test_a_huge_load_does_not_overflow():
    plan = make_plan([0], [(0, 1)], num_ranks=2, num_slots=1)
    counts_RE = np.array([[2**31], [2**31]])
    assert balance(counts_RE, plan, (0, 1)).tolist() == [[2**31, 2**31]]


def test_few_turns_give_valid_quotas():
    rng = np.random.default_rng(5)
    plan = random_plan(rng, 30, 10, 3)
    counts_RE = rng.multinomial(9000, rng.dirichlet(np.full(30, 0.2)), size=10)
    quota_EI = balance(counts_RE, plan, (0,) * 10, turns=1)
    assert (quota_EI.sum(axis=1) == counts_RE.sum(axis=0)).all()
    assert (quota_EI >= 0).all()


def test_spreading_inside_nodes_moves_no_token_between_them():
    """Ragged, interleaved nodes: each expert keeps its sum on each node, no quota gets negative."""
    rng = np.random.default_rng(4)
    plan = random_plan(rng, 30, 9, 3)
    nodes = (0, 1, 0, 1, 2, 2, 0, 1, 0)
    tables = quota_tables(plan, nodes)
    quota_N = rng.integers(0, 1000, len(tables.rank_N))
    base_R = rng.integers(0, 3000, 9)
    spread_N = spread_near(quota_N, base_R, tables)
    assert (spread_N >= 0).all()
    group_N = tables.expert_N * 3 + tables.node_N
    assert (np.bincount(group_N, quota_N) == np.bincount(group_N, spread_N)).all()
    before_R, after_R = (instance_loads(q_N, base_R, tables) for q_N in (quota_N, spread_N))
    assert after_R.std() < before_R.std()


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_relaxing_keeps_each_experts_tokens(seed):
    """No quota gets negative, and few steps bring the fullest rank near the least."""
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, 40, 16, 3)
    tables = quota_tables(plan, (0,) * 16)
    scale = int(rng.choice([1, 10, 10**4, 10**9]))
    quota_N = rng.integers(0, 100, len(tables.rank_N)) * scale
    base_R = rng.integers(0, 30, 16) * scale
    relaxed_N = relax(quota_N, base_R, tables, goal=0)
    assert (relaxed_N >= 0).all()
    sum_X, relaxed_X = (np.bincount(tables.expert_N, q_N) for q_N in (quota_N, relaxed_N))
    assert (sum_X == relaxed_X).all()
    before, after = (instance_loads(q_N, base_R, tables).max() for q_N in (quota_N, relaxed_N))
    assert after <= before + len(quota_N)


def test_among_many_ranks_relaxing_reaches_the_goal():
    """E = EP = 512: no forest is needed, and steps do not grow with the ranks."""
    counts_RE = zipf_series(512, 512, 0.8, 1)[0]
    topology, owner_LE = Topology.uniform(512, 8), shard_evenly(1, 512, 512)
    plan = plan_layers(counts_RE.sum(axis=0)[None], owner_LE, topology, PlanSettings()).layer(0)
    load_R = rank_loads(balance(counts_RE, plan, topology.node_of_rank), plan)
    assert load_R.max() <= load_R.mean() * (1 + 2.0 ** -good_enough_shift(512)) + 1


def test_many_ranks_are_content_with_a_little_less():
    """0.05 % below 256 ranks, then twice as much for twice the ranks, 0.8 % at the most."""
    shifts = [good_enough_shift(ranks) for ranks in (8, 255, 256, 768, 1024, 1 << 20)]
    assert shifts == [11, 11, 10, 9, 9, 7]


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_messages_are_what_all_sources_send(seed):
    """Each rank works out alone what the others send it; ragged and interleaved nodes too."""
    rng = np.random.default_rng(seed)
    num_ranks, num_experts = int(rng.integers(1, 9)), int(rng.integers(1, 11))
    plan = random_plan(rng, num_experts, num_ranks, int(rng.integers(0, 4)))
    nodes = np.unique(rng.integers(0, 3, num_ranks), return_inverse=True)[1].tolist()
    counts_RE = random_counts(rng, num_ranks, num_experts)
    quota_EI = balance(counts_RE, plan, nodes)
    slots = num_ranks * plan.num_slots
    sent_RP = np.zeros((num_ranks, slots), dtype=np.int64)
    messages = [messages_of(counts_RE, quota_EI, plan, nodes, rank) for rank in range(num_ranks)]
    is_instance = plan.instance_rank_EI != EMPTY
    for source, each in enumerate(messages):
        split_EI = split_source(counts_RE, quota_EI, plan, nodes, source)
        assert (each.split_EI == split_EI).all()
        sent_RP[source, plan.instance_physical_EI[is_instance]] = split_EI[is_instance]
    sent_RRS = sent_RP.reshape(num_ranks, num_ranks, plan.num_slots)
    for rank, each in enumerate(messages):
        assert (each.received_RS == sent_RRS[:, rank]).all()
        assert (each.sent_R == sent_RRS[rank].sum(axis=1)).all()

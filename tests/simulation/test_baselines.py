"""Baselines: EPLB's published example to the number, the others worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_fssdp.planning.plan import Plan
from megatron_fssdp.planning.quotas import balance, rank_loads
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines import BASELINES, eplb, laer


def replicas_of(plan):
    """(expert, rank) of every instance that is not its owner's."""
    expert, column = np.nonzero(plan.instance_rank_EI >= 0)
    rank = plan.instance_rank_EI[expert, column]
    return sorted(
        (int(e), int(r)) for e, r in zip(expert, rank, strict=True) if plan.owner_E[e] != r
    )


def run(name, loads, num_ranks, num_slots, ranks_per_node=None):
    owner_E = shard_evenly(1, len(loads), num_ranks)[0]
    topology = Topology.uniform(num_ranks, ranks_per_node)
    return BASELINES[name](np.array(loads, dtype=np.int64), owner_E, topology, num_slots)


def test_eplb_readme_example():
    """deepseek-ai/EPLB, README: two layers of 12 experts, 16 copies, 2 nodes of 4 GPUs."""
    weights = [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
    expected = [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    for layer, slots in zip(weights, expected, strict=True):
        ranks = eplb.rebalance(layer, 16, 4, 2, 8)
        assert [expert for rank in ranks for expert in rank] == slots


def test_plain_ep_has_no_replicas():
    assert replicas_of(run("plain EP", [9, 1, 1, 1], 2, 2)) == []


def test_fastermoe_shadows_the_hottest_everywhere():
    """12 of 16 tokens on expert 0: shadowing it evens the ranks out; the next helps nobody."""
    assert replicas_of(run("FasterMoE", [12, 1, 1, 1], 4, 2)) == [(0, 1), (0, 2), (0, 3)]


def test_smartmoe_exchanges():
    """Loads 5, 4 | 1, 1: the two hot experts are parted."""
    plan = run("SmartMoE", [5, 4, 1, 1], 2, 1)
    assert plan.owner_E.tolist() == [0, 1, 1, 0]
    assert replicas_of(plan) == []


def test_flexmoe_expands_until_good_enough():
    """8 | 2 | 1 | 1, mean 3: two copies of expert 0 give 2.7 | 2 | 3.7 | 3.7, over 1.2 times 3.

    A third gives 2 | 4 | 3 | 3, and a copy of expert 1 on rank 0 then 3 | 3 | 3 | 3.
    """
    expected = [(0, 1), (0, 2), (0, 3), (1, 0)]
    assert replicas_of(run("FlexMoE", [8, 2, 1, 1], 4, 1)) == expected


def test_eplb_global_takes_any_rank():
    """Two ranks of 3 slots: expert 0 gets both further copies."""
    plan = run("EPLB global", [8, 2, 1, 1], 2, 1)
    assert replicas_of(plan) == [(0, 1)]


def test_laer_puts_first_copies_on_fresh_nodes():
    plan = run("LAER-MoE", [8, 2, 1, 1], 4, 1, ranks_per_node=2)
    nodes = {r // 2 for r in plan.instance_rank_EI[0] if r >= 0}
    assert nodes == {0, 1}


def place_slowly(load_E, counts, topology, capacity):
    """LAER's placement rule as its source has it: each copy looks at every rank."""
    slots = [[] for _ in range(topology.num_ranks)]
    load_R = np.zeros(topology.num_ranks)
    shares = load_E / counts
    for expert in np.argsort(-shares, kind="stable").tolist():
        held_M = np.zeros(topology.num_nodes)
        for _ in range(counts[expert]):
            open_ranks = [r for r, held in enumerate(slots) if len(held) < capacity]
            fresh = [r for r in open_ranks if expert not in slots[r]] or open_ranks
            rank = min(fresh, key=lambda r: (held_M[topology.node_of_rank[r]], load_R[r]))
            slots[rank].append(expert)
            load_R[rank] += shares[expert]
            held_M[topology.node_of_rank[rank]] += 1
    return slots, float(load_R.max())


@pytest.mark.parametrize(("experts", "ranks", "per_node"), [(16, 8, 4), (8, 8, 2), (12, 4, 4)])
def test_laer_places_as_if_each_copy_looked_at_every_rank(experts, ranks, per_node):
    """On loads with ties and without, with one to three slots."""
    topology, rng = Topology.uniform(ranks, per_node), np.random.default_rng(0)
    for seed in range(12):
        load_E = rng.integers(0, 5 if seed % 2 else 1000, experts)
        capacity = experts // ranks + 1 + seed % 3
        counts = laer._copies(load_E, capacity * ranks, 1, ranks)
        case = (load_E, counts, topology, capacity)
        assert laer._place(*case) == place_slowly(*case)


def test_moonep_pairs_fullest_with_emptiest():
    """16 | 4 | 3 | 1, mean 6: rank 3 lacks 5, rank 2 lacks 3, rank 1 lacks 2, all from rank 0."""
    assert replicas_of(run("MoonEP", [16, 4, 3, 1], 4, 1)) == [(0, 1), (0, 2), (0, 3)]


def test_echo_matches_spill_with_room():
    """Rank 0 spills 10 of expert 0; rooms are 5, 3, 2."""
    assert replicas_of(run("ECHO", [16, 4, 3, 1], 4, 1)) == [(0, 1), (0, 2), (0, 3)]


def test_ultraep_finds_the_least_target():
    plan = run("UltraEP", [160, 40, 30, 10], 4, 1)
    assert replicas_of(plan) == [(0, 1), (0, 2), (0, 3)]


def test_scale_eplb_repairs_half_the_gap():
    """12 | 0: half the gap of 12 moves, once."""
    assert replicas_of(run("Scale-EPLB", [12, 0], 2, 1)) == [(0, 1)]


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("slots", [1, 2])
def test_all_give_valid_plans_that_are_no_worse_with_best_quotas(name, slots):
    rng = np.random.default_rng(0)
    topology, owner_E = Topology.uniform(8, 4), shard_evenly(1, 32, 8)[0]
    for _ in range(5):
        load_E = rng.multinomial(50000, rng.dirichlet(np.full(32, 0.4)))
        plan = BASELINES[name](load_E, owner_E, topology, slots)
        Plan(plan.owner_E[None].copy(), plan.slot_expert_RS[None].copy())
        counts_RE = np.tile(load_E // 8, (8, 1))
        fullest = rank_loads(balance(counts_RE, plan, topology.node_of_rank), plan).max()
        owners = np.bincount(owner_E, weights=counts_RE.sum(axis=0)).max()
        assert fullest <= owners * (1.3 if name == "EPLB hier." else 1.0) + 1


@pytest.mark.parametrize("name", BASELINES)
def test_all_take_zero_loads(name):
    plan = BASELINES[name](
        np.zeros(8, dtype=np.int64), shard_evenly(1, 8, 4)[0], Topology.uniform(4, 2), 1
    )
    Plan(plan.owner_E[None].copy(), plan.slot_expert_RS[None].copy())

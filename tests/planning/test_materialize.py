"""Materialization: algorithm 1 by hand, ours by hand, and the yardstick of the field."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_fssdp.planning.gain import place_replicas
from megatron_fssdp.planning.materialize import (
    assign_slots_by_load,
    materialize_by_gain,
    materialize_by_load,
)
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.quotas import balance, rank_loads
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.spares import place_spares
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.loads import yardstick


def test_slots_by_load():
    """5 slots for loads 6, 3, 1: shares 3, 1.5, 0.5 round down to 3, 1, 0, at least 1 each."""
    assert assign_slots_by_load(np.array([6, 3, 1]), 5, most_copies=3).tolist() == [3, 1, 1]
    # 6 slots: 3 (capped), 1, 1, and the one left goes to the second, as the first is capped.
    assert assign_slots_by_load(np.array([6, 3, 1]), 6, most_copies=3).tolist() == [3, 2, 1]


def test_algorithm_1_by_hand():
    """Four ranks on two nodes, one expert each, one slot, t = 2: candidates are 3 and 0.

    4 slots for loads 60 and 20: 3 and 1. Expert 3 lives on rank 3 (node 1): node 0 lacks it, and
    ranks 0 and 1 have a free slot each: rank 0; then each node has one: rank 1 (a lower number
    than rank 2); then rank 2. Expert 0 lives on rank 0 (node 0): node 1 lacks it, and only rank 3
    is free there.
    """
    load_LE = np.array([[20, 5, 1, 60]], dtype=np.int64)
    owner_LE = shard_evenly(1, 4, 4)
    replicas = materialize_by_load(load_LE, owner_LE, Topology.uniform(4, 2), 1, overlap_degree=2)
    assert replicas.tolist() == [[0, 3, 0], [0, 3, 1], [0, 3, 2], [0, 0, 3]]


def test_algorithm_1_sends_few_candidates_everywhere():
    """Where t = 1 <= m = 1, the hottest expert goes to every rank."""
    load_LE = np.array([[20, 5, 1, 60]], dtype=np.int64)
    replicas = materialize_by_load(load_LE, shard_evenly(1, 4, 4), Topology.uniform(4), 2, 1)
    assert replicas.tolist() == [[0, 3, 0], [0, 3, 1], [0, 3, 2]]


def test_gain_example_of_its_docstring():
    load_E, load_R = [6, 2, 1, 1], [8, 2]
    assert place_replicas(load_E, [[0, 1], [2, 3]], load_R, 5, [1, 1]) == [(0, 1)]
    assert load_R == [5, 5]
    assert load_E == [3, 2, 1, 1]


def test_gain_fits_donors_to_receivers():
    """Mean 10. Rank 0 is 6 above, rank 1 is 3 above; ranks 2, 3, 4 have room for 3, 4 and 2.

    Rank 1 fits rank 2 exactly. Nothing takes 6 whole; ranks 3 and 4 do together, roomier first.
    """
    loads = [16, 13, 7, 6, 8]
    placed = place_replicas(loads.copy(), [[e] for e in range(5)], loads, 10, [1] * 5)
    assert placed == [(1, 2), (0, 3), (0, 4)]
    assert loads == [10] * 5


def test_gain_fills_a_last_slot_and_refills_the_donor():
    """Mean 10, one slot a rank: rank 2's only slot takes 7 of rank 1's 15, 2 more than too many.

    Rank 1, now at 8, takes rank 0's 2 too many. Had it kept them, nobody could have helped rank 0.
    """
    loads = [12, 15, 3]
    placed = place_replicas(loads.copy(), [[e] for e in range(3)], loads, 10, [1] * 3)
    assert placed == [(1, 2), (0, 1)]
    assert loads == [10] * 3


def test_balanced_loads_get_no_replicas():
    load_LE = np.full((2, 8), 100, dtype=np.int64)
    load_LE[1, 0] = 101
    replicas = materialize_by_gain(
        load_LE, shard_evenly(2, 8, 4), Topology.uniform(4, 2), 2, spare_tokens=1
    )
    assert len(replicas) == 0


def test_few_slots_still_help():
    load_LE = np.array([[80, 60, 1, 1, 1, 1, 1, 1]], dtype=np.int64)
    owner_LE, topology = shard_evenly(1, 8, 8), Topology.uniform(8, 4)
    fullest = []
    for num_slots in (0, 1, 2):
        settings = PlanSettings(num_replica_slots=num_slots)
        plan = plan_layers(load_LE, owner_LE, topology, settings).layer(0)
        assert plan.num_replicas <= 8 * num_slots
        counts_RE = np.zeros((8, 8), dtype=np.int64)
        counts_RE[0] = load_LE[0]
        fullest.append(rank_loads(balance(counts_RE, plan, topology.node_of_rank), plan).max())
    assert fullest == sorted(fullest, reverse=True)
    assert fullest[0] == 80
    assert fullest[-1] <= 19


def test_overlap_degree_zero_hides_nothing():
    load_LE = np.array([[80, 1, 1, 1]], dtype=np.int64)
    settings = PlanSettings(overlap_degree=0)
    plan = plan_layers(load_LE, shard_evenly(1, 4, 4), Topology.uniform(4), settings)
    assert plan.num_replicas_L.tolist() == [0]


def test_spares_go_to_nodes_that_lack_the_hottest():
    """Expert 0 is hot and on node 0; node 1 gets it, and no rank gets an expert twice."""
    rng = np.random.default_rng(0)
    load_LE = rng.integers(100, 200, (3, 16))
    load_LE[:, 0] = 2000
    plan = plan_layers(load_LE, shard_evenly(3, 16, 8), Topology.uniform(8, 4), PlanSettings())
    for layer in plan.layers:
        assert (layer.instance_rank_EI[0] >= 4).any()
        assert layer.num_replicas >= 12


def test_spares_that_do_not_pay_cross_no_network():
    """Nobody keeps 1000 tokens on a second node: spares only go where their expert is."""
    rng = np.random.default_rng(1)
    load_LE, owner_LE = rng.integers(100, 200, (3, 16)), shard_evenly(3, 16, 8)
    topology = Topology.uniform(8, 4)
    none_N3, free_LR = np.zeros((0, 3), dtype=np.int64), np.full((3, 8), 2)
    args = load_LE, owner_LE, none_N3, free_LR, np.zeros((3, 8), dtype=np.int64), topology.node_R
    spares_N3 = place_spares(*args, 1000)
    layer, expert, rank = spares_N3.T
    assert len(spares_N3) >= 24
    assert (topology.node_R[rank] == topology.node_R[owner_LE[layer, expert]]).all()
    layer, expert, rank = place_spares(*args, 1).T
    assert (topology.node_R[rank] != topology.node_R[owner_LE[layer, expert]]).any()


@pytest.mark.parametrize("spare_slots", [0, 1, 2])
def test_spares_leave_slots_to_what_is_needed(spare_slots: int) -> None:
    """One slot a rank levels layer 0; layer 1 needs two on ranks 1 to 3, whatever spares may."""
    load_LE = np.array([[130, 90, 90, 90], [340, 20, 20, 20]])
    load_LE = np.concatenate([load_LE, np.ones((2, 4), dtype=np.int64)], axis=1)
    owner_LE, topology = shard_evenly(2, 8, 4), Topology.uniform(4)
    owner_LE[:] = [0, 1, 2, 3, 0, 1, 2, 3]
    settings = PlanSettings(spare_slots=spare_slots)
    plan = plan_layers(load_LE, owner_LE, topology, settings)
    for layer, load_E in zip(plan.layers, load_LE, strict=True):
        counts_RE = np.zeros((4, 8), dtype=np.int64)
        counts_RE[0] = load_E
        load_R = rank_loads(balance(counts_RE, layer, topology.node_of_rank), layer)
        assert load_R.max() <= 1.01 * load_R.mean() + 1
    # Filled to the slots that spares may have, on every rank.
    assert plan.num_replicas_L[0] == {0: 3, 1: 4, 2: 8}[spare_slots]


def test_unknown_algorithm_is_named():
    with pytest.raises(ValueError, match="choose from"):
        PlanSettings(algorithm="magic")
    with pytest.raises(ValueError, match="num_replica_slots is -1"):
        PlanSettings(num_replica_slots=-1)


def test_yardstick_within_one_percent_with_few_copies():
    """All 156 instances within 1.01 on 2 slots, in at most 3,250 copies (the best peer: 3,602)."""
    copies = 0
    for num_experts, num_ranks, _, _, counts_RE in yardstick():
        topology = Topology.uniform(num_ranks, 8)
        owner_LE = shard_evenly(1, num_experts, num_ranks)
        settings = PlanSettings(spare_tokens=None)
        plan = plan_layers(counts_RE.sum(axis=0)[None], owner_LE, topology, settings).layer(0)
        load_R = rank_loads(balance(counts_RE, plan, topology.node_of_rank), plan)
        assert load_R.max() <= 1.01 * load_R.mean()
        copies += plan.num_replicas
    assert copies <= 3250

"""The planner's one entry: any loads, any owners; the same bytes everywhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_fssdp.planning.plan import EMPTY
from megatron_fssdp.planning.planner import PLANNERS, PlanSettings, plan_each, plan_layers
from megatron_fssdp.planning.quotas import balance, rank_loads
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.loads import SHAPES, shape_series
from tests.planning.cases import seeds

LOADS = ("random", "zero", "one expert", "equal", "huge")


def make_loads(kind, rng, num_layers, num_experts):
    load_LE = rng.integers(0, 1000, (num_layers, num_experts))
    if kind == "zero":
        load_LE[:] = 0
    elif kind == "one expert":
        load_LE[:] = 0
        load_LE[:, rng.integers(num_experts)] = 12345
    elif kind == "equal":
        load_LE[:] = 77
    elif kind == "huge":
        load_LE[:, 0] = 2**31
    return load_LE


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spares", [{}, {"spare_slots": 1}, {"spare_tokens": None}])
@pytest.mark.parametrize("num_slots", [2, 4])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_layer_gets_in_a_batch_what_it_gets_alone(
    num_nodes: int, num_slots: int, spares: dict[str, int | None], seed: int
) -> None:
    """A resumed run, or one whose experts had moved, planned layers alone: other replicas."""
    rng = np.random.default_rng(seed)
    num_ranks, num_experts, num_layers = 16, 64, 24
    topology = Topology.uniform(num_ranks, num_ranks // num_nodes)
    # From nearly even to steep, so that layers need different numbers of replicas.
    skew_L1 = np.linspace(0.1, 1.5, num_layers)[:, None]
    load_LE = (5000 * rng.lognormal(0, skew_L1, (num_layers, num_experts))).astype(np.int64)
    even_LE = shard_evenly(num_layers, num_experts, num_ranks)
    for owner_LE in (even_LE, rng.permuted(even_LE, axis=1), rng.integers(0, 16, even_LE.shape)):
        wanted = PlanSettings(num_replica_slots=num_slots, **spares)
        others = replace(wanted, spare_slots=0)
        settings_L = [others if layer % 5 == 4 else wanted for layer in range(num_layers)]
        plans = plan_each(load_LE, owner_LE, topology, settings_L)
        for layer, (plan, its) in enumerate(zip(plans, settings_L, strict=True)):
            one = slice(layer, layer + 1)
            alone = plan_layers(load_LE[one], owner_LE[one], topology, its).layer(0)
            together = plan.with_slots(alone.num_slots)
            np.testing.assert_array_equal(together.slot_expert_RS, alone.slot_expert_RS)


@settings(max_examples=150, deadline=None)
@given(seeds, st.sampled_from(LOADS), st.sampled_from(sorted(PLANNERS)))
@example(0, "one expert", "gain")
def test_any_loads_and_owners(seed, kind, algorithm):
    """Covers, respects the budget, is never worse than owners only (maxtext#4760 and more)."""
    rng = np.random.default_rng(seed)
    num_layers, num_experts = int(rng.integers(1, 4)), int(rng.integers(1, 20))
    num_ranks, slots = int(rng.integers(1, 10)), int(rng.integers(0, 5))
    owner_LE = rng.integers(0, num_ranks, (num_layers, num_experts))
    topology = Topology.uniform(num_ranks, int(rng.integers(1, 5)))
    load_LE = make_loads(kind, rng, num_layers, num_experts)
    degree = None if rng.random() < 0.5 else int(rng.integers(0, 4))
    wanted = PlanSettings(num_replica_slots=slots, algorithm=algorithm, overlap_degree=degree)
    # Building the plan proves that owners hold their experts, and nobody holds one twice.
    plan = plan_layers(load_LE, owner_LE, topology, wanted)
    per_rank_LR = (plan.slot_expert_LRS != EMPTY).sum(axis=2)
    for layer in range(num_layers):
        owned_R = np.bincount(owner_LE[layer], minlength=num_ranks)
        limit = slots if degree is None else min(slots, degree)
        assert (per_rank_LR[layer] - owned_R <= limit).all()
        counts_RE = rng.multinomial(1, np.full(num_ranks, 1 / num_ranks), num_experts).T
        counts_RE = counts_RE * load_LE[layer]
        fullest = rank_loads(
            balance(counts_RE, plan.layer(layer), topology.node_of_rank), plan.layer(layer)
        ).max()
        assert fullest <= np.bincount(owner_LE[layer], weights=load_LE[layer]).max()
    again = plan_layers(load_LE.astype(np.uint64), owner_LE.astype(np.int32), topology, wanted)
    assert again.slot_expert_LRS.tobytes() == plan.slot_expert_LRS.tobytes()


def test_no_loads_yet_means_owners_only():
    owner_LE = shard_evenly(2, 8, 4)
    plan = plan_layers(None, owner_LE, Topology.uniform(4), PlanSettings(num_replica_slots=3))
    assert plan.num_slots == 5
    assert plan.num_replicas_L.tolist() == [0, 0]


def test_one_rank_needs_no_replicas():
    plan = plan_layers(
        np.array([[5, 100]]), shard_evenly(1, 2, 1), Topology.uniform(1), PlanSettings()
    )
    assert plan.num_replicas_L.tolist() == [0]


def test_fewer_experts_than_ranks():
    """Ranks without experts of their own take replicas."""
    owner_LE = np.array([[0, 2]], dtype=np.int64)
    plan = plan_layers(np.array([[100, 100]]), owner_LE, Topology.uniform(4, 2), PlanSettings())
    assert plan.num_replicas_L[0] >= 2


def test_layers_do_not_depend_on_each_other():
    rng = np.random.default_rng(0)
    load_LE, owner_LE = rng.zipf(1.5, (5, 32)).clip(max=5000), shard_evenly(5, 32, 8)
    topology = Topology.uniform(8, 4)
    together = plan_layers(load_LE, owner_LE, topology, PlanSettings())
    for layer in range(5):
        alone = plan_layers(
            load_LE[layer : layer + 1], owner_LE[:1], topology, PlanSettings()
        ).slot_expert_LRS[0]
        filled = together.slot_expert_LRS[layer]
        assert [sorted(row[row != EMPTY]) for row in alone] == [
            sorted(row[row != EMPTY]) for row in filled
        ]


def test_refuses_wrong_loads():
    owner_LE = shard_evenly(1, 4, 2)
    with pytest.raises(ValueError, match="load_LE is"):
        plan_layers(np.zeros((2, 4), dtype=int), owner_LE, Topology.uniform(2), PlanSettings())
    with pytest.raises(ValueError, match="-3 tokens"):
        plan_layers(np.array([[1, -3, 0, 0]]), owner_LE, Topology.uniform(2), PlanSettings())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("num_ranks", [2, 4, 16])
def test_the_eight_shapes(name, num_ranks):
    """Planned from the iteration before: never worse than no replication, even when stale."""
    series = shape_series(name, 32, num_ranks, 9)
    owner_LE, topology = shard_evenly(1, 32, num_ranks), Topology.uniform(num_ranks, 8)
    for before_RE, counts_RE in pairwise(series):
        plan = plan_layers(before_RE.sum(axis=0)[None], owner_LE, topology, PlanSettings()).layer(0)
        load_R = rank_loads(balance(counts_RE, plan, topology.node_of_rank), plan)
        owners_R = np.bincount(owner_LE[0], weights=counts_RE.sum(axis=0), minlength=num_ranks)
        assert load_R.max() <= owners_R.max()
        if name == "W0 balanced":
            assert plan.num_replicas == 0


def test_a_thousand_ranks():
    """E = EP = 1,024: no step needs (EP, E, EP) arrays."""
    rng = np.random.default_rng(0)
    share_E = np.arange(1, 1025) ** -0.8
    share_E = rng.permutation(share_E / share_E.sum())
    counts_RE = rng.multinomial(8192, share_E, size=1024)
    topology = Topology.uniform(1024, 8)
    plan = plan_layers(
        counts_RE.sum(axis=0)[None], shard_evenly(1, 1024, 1024), topology, PlanSettings()
    ).layer(0)
    load_R = rank_loads(balance(counts_RE, plan, topology.node_of_rank), plan)
    assert load_R.max() <= 1.01 * load_R.mean()

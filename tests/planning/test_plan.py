"""The plan: its rules, and the tables that it offers."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_fssdp.planning.plan import EMPTY, Plan, build_slots


def plan_of(owner, slots):
    return Plan(np.array([owner], dtype=np.int64), np.array([slots], dtype=np.int64))


def test_docstring_example_and_its_instances():
    plan = plan_of([0, 0, 1, 1], [[0, 1, EMPTY], [2, 3, 0]])
    layer = plan.layer(0)
    # Expert 0 is on rank 0 (slot 0, physical 0) and rank 1 (slot 2, physical 5).
    assert layer.instance_rank_EI.tolist() == [[0, 1], [0, -1], [1, -1], [1, -1]]
    assert layer.instance_physical_EI.tolist() == [[0, 5], [1, -1], [3, -1], [4, -1]]
    assert layer.num_replicas == 1
    assert plan.num_replicas_L.tolist() == [1]
    assert plan.layer(0) is layer


def test_owner_comes_first_although_its_rank_is_higher():
    layer = plan_of([1], [[0], [0]]).layer(0)
    assert layer.instance_rank_EI.tolist() == [[1, 0]]


def test_a_rank_may_own_none_and_another_all():
    plan = plan_of([1, 1, 1], [[2, EMPTY, EMPTY, EMPTY], [0, 1, 2, EMPTY]])
    assert plan.layer(0).num_replicas == 1


@pytest.mark.parametrize(
    ("owner", "slots", "message"),
    [
        ([0, 2], [[0, EMPTY], [1, EMPTY]], "names a rank outside 0..1"),
        ([0, 1], [[0, 2], [1, EMPTY]], "names an expert outside -1..1"),
        ([0, 1], [[1, EMPTY], [0, EMPTY]], "does not hold its own"),
        ([0, 1], [[0, EMPTY], [1, 1]], "same expert in two slots"),
        ([0, 1], [[0, EMPTY, 1, EMPTY], [0, 1, EMPTY, EMPTY]], "out of order"),
        ([0, 0], [[1, 0], [EMPTY, EMPTY]], "out of order"),
        ([0, 1, 1], [[0, EMPTY], [1, EMPTY]], "does not hold its own"),
    ],
)
def test_broken_rules_are_named(owner, slots, message):
    with pytest.raises(ValueError, match=message):
        plan_of(owner, slots)


def test_a_gap_before_a_replica_is_out_of_order():
    with pytest.raises(ValueError, match="out of order"):
        plan_of([0, 1], [[0, EMPTY, 1], [1, EMPTY, EMPTY]])


def test_build_slots_keeps_the_order_of_replicas():
    owner_LE = np.array([[0, 1, 1], [1, 1, 0]], dtype=np.int64)
    replicas = np.array([[0, 2, 0], [0, 1, 0], [1, 2, 1]], dtype=np.int64)
    slots = build_slots(owner_LE, replicas, num_ranks=2, num_replica_slots=2)
    assert slots.tolist() == [
        [[0, 2, 1, -1], [1, 2, -1, -1]],
        [[2, -1, -1, -1], [0, 1, 2, -1]],
    ]
    Plan(owner_LE, slots)


def test_arrays_are_frozen():
    plan = plan_of([0, 1], [[0], [1]])
    with pytest.raises(ValueError, match="read-only"):
        plan.owner_LE[0, 0] = 1

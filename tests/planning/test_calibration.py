"""Calibration: what true counts ask for, if it pays."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from megatron_fssdp.planning.calibration import calibrate_layer
from megatron_fssdp.planning.plan import EMPTY, Plan
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.quotas import balance, rank_loads
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.loads import domain_series
from tests.planning.cases import make_plan


def fullest(counts_RE, plan, nodes):
    return int(rank_loads(balance(counts_RE, plan, nodes), plan).max())


def test_keeps_a_plan_that_is_good_enough():
    plan = make_plan([0, 1], [(0, 1)], num_ranks=2, num_slots=1)
    counts_RE = np.array([[6, 1], [2, 1]])
    assert calibrate_layer(counts_RE, plan, (0, 0), PlanSettings(num_replica_slots=1)) == (plan, 0)


def test_replaces_an_unused_replica():
    """The replica of expert 0 is of no use when expert 1 is hot; its slot's rank is not needed."""
    plan = make_plan([0, 1, 2], [(0, 1)], num_ranks=3, num_slots=1)
    counts_RE = np.array([[0, 90, 0]] * 3)
    settings = PlanSettings(num_replica_slots=1)
    better, new = calibrate_layer(counts_RE, plan, (0, 0, 0), settings)
    assert new == 2
    assert fullest(counts_RE, better, (0, 0, 0)) == 90
    Plan(better.owner_E[None].copy(), better.slot_expert_RS[None].copy())


def test_refuses_what_does_not_pay():
    plan = make_plan([0, 1], [], num_ranks=2, num_slots=1)
    counts_RE = np.array([[10, 0], [10, 0]])
    settings = PlanSettings(num_replica_slots=1)
    assert calibrate_layer(counts_RE, plan, (0, 1), settings, least_tokens=11) == (plan, 0)
    assert calibrate_layer(counts_RE, plan, (0, 1), settings, least_tokens=10)[1] == 1


def test_jumps_of_domain_are_balanced():
    """gpt-oss-20b, a text domain an iteration, planned from the one before: p95 <= 1.05."""
    settings, topology = PlanSettings(), Topology.uniform(16, 8)
    owner_LE, ratios = shard_evenly(1, 32, 16), []
    series = domain_series(16, layer=12)[:40]
    for before_RE, counts_RE in pairwise(series):
        plan = plan_layers(before_RE.sum(axis=0)[None], owner_LE, topology, settings).layer(0)
        better, _ = calibrate_layer(counts_RE, plan, topology.node_of_rank, settings)
        assert ((better.slot_expert_RS != EMPTY).sum(axis=1) <= 4).all()
        mean = counts_RE.sum() / 16
        ratios.append(fullest(counts_RE, better, topology.node_of_rank) / mean)
        assert ratios[-1] * mean <= fullest(counts_RE, plan, topology.node_of_rank)
    assert np.quantile(ratios, 0.95) <= 1.05

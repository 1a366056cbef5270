"""The cost model: by hand, additive, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_fssdp.planning.cost import (
    ComputeRate,
    Copying,
    LayerCost,
    LayerShape,
    break_even_tokens,
    layer_cost,
    overlap_degree,
    replica_traffic,
    saved_s,
    with_paying_spares,
)
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.quotas import balance
from megatron_fssdp.planning.topology import LinkClass, Topology
from tests.planning.cases import make_plan

SHAPE = LayerShape(hidden_size=10, ffn_size=5, num_matrices=2)
RATE = ComputeRate(flops_per_s=1000.0, group_floor_s=0.5)
FAST, SLOW = (
    LinkClass(bytes_per_s=1000.0, latency_s=0.0),
    LinkClass(bytes_per_s=100.0, latency_s=1.0),
)


def test_sizes():
    assert SHAPE.num_params == 100
    assert SHAPE.expert_bytes == 200
    assert SHAPE.replica_bytes == 400
    assert SHAPE.row_bytes == 20


def test_a_layer_by_hand():
    """Two nodes of one rank, an expert each; rank 0 sends 3 of its 7 tokens to rank 1's expert.

    Tokens: 3 rows of 20 bytes over the slow link: 1 + 0.6 s, four trips: 6.4 s. Products: rank 1
    has 3 + 4 rows of 200 flop: 1.4 s forward, 4.2 s in all. No replicas.
    """
    topology = Topology((0, 1), intra_node=FAST, inter_node=SLOW)
    plan = make_plan([0, 1], [], num_ranks=2, num_slots=1)
    counts_RE = np.array([[4, 3], [0, 4]])
    cost = layer_cost(counts_RE, balance(counts_RE, plan, (0, 1)), plan, topology, SHAPE, RATE)
    assert cost.tokens_s == pytest.approx(6.4)
    assert cost.gemm_s == pytest.approx(4.2)
    assert cost.total_s == pytest.approx(10.6)
    assert cost.token_bytes == 4 * 60
    assert cost.replica_bytes == 0


def test_a_layer_of_two_shards_by_hand():
    """The layer of `test_a_layer_by_hand`, every expert cut in two.

    Tokens: a shard's rank sends half of 60 bytes over the slow link: 1.3 s; the two share rank 1's
    7 rows of 20 bytes, half of it over the fast link: 0.07 s. Products and a replica's bytes halve.
    """
    topology = Topology((0, 1), intra_node=FAST, inter_node=SLOW)
    shape = replace(SHAPE, num_shards=2)
    assert shape.expert_bytes == 100
    assert shape.replica_bytes == 200
    plan = make_plan([0, 1], [], num_ranks=2, num_slots=1)
    counts_RE = np.array([[4, 3], [0, 4]])
    cost = layer_cost(counts_RE, balance(counts_RE, plan, (0, 1)), plan, topology, shape, RATE)
    assert cost.tokens_s == pytest.approx(4 * (1.3 + 0.07))
    assert cost.gemm_s == pytest.approx(2.1)
    assert cost.token_bytes == 4 * 60


def test_replicas_cost_and_hide():
    """One replica of 400 bytes over the slow link: 5 s, of which 3 x 1 s hide."""
    topology = Topology((0, 1), intra_node=FAST, inter_node=SLOW)
    plan = make_plan([0, 1], [(0, 1)], num_ranks=2, num_slots=1)
    counts_RE = np.array([[4, 0], [4, 0]])
    quota_EI = balance(counts_RE, plan, (0, 1))
    cost = layer_cost(counts_RE, quota_EI, plan, topology, SHAPE, RATE, non_moe_s=1.0)
    assert cost.replicas_s == pytest.approx(5.0)
    assert cost.hidden_s == pytest.approx(3.0)
    assert cost.token_bytes == 0
    assert cost.slot_bytes == 400


def test_costs_add_up():
    total = LayerCost(gemm_s=1.0, token_bytes=3) + LayerCost(
        gemm_s=2.0, replicas_s=4.0, hidden_s=1.0
    )
    assert total.total_s == 6.0
    assert total.token_bytes == 3


def test_floor_and_measured_rates():
    assert RATE.forward_s(np.array([1, 0, 10]), SHAPE) == pytest.approx(0.5 + 2.0)
    measured = ComputeRate(flops_per_s=1.0, rate_by_rows=((1, 100.0), (3, 300.0)))
    # 2 rows run at 200 flop/s, 10 at the last rate: 400 / 200 + 2000 / 300 s.
    assert measured.forward_s(np.array([2, 10]), SHAPE) == pytest.approx(2.0 + 20 / 3)


def test_replicas_cross_to_a_node_once_and_are_relayed():
    """Owner 0; replicas on 1 (its node), 2 and 3 (node 1), 4 and 5 (node 2), 6 (node 3).

    Between nodes: 0 -> 2, 0 -> 4, and 2 serves the third node. Inside: 0 -> 1, 2 -> 3, 4 -> 5.
    """
    plan = make_plan([0], [(0, r) for r in range(1, 7)], num_ranks=8, num_slots=1)
    copies_RR = replica_traffic(plan, Topology.uniform(8, 2))
    pairs = [tuple(map(int, pair)) for pair in np.argwhere(copies_RR)]
    assert pairs == [(0, 1), (0, 2), (0, 4), (2, 3), (2, 6), (4, 5)]


def test_what_hides_and_what_pays():
    topology = Topology((0, 1), intra_node=FAST, inter_node=SLOW)
    # 100 bytes/s for 5 s: two experts of 200 bytes.
    assert overlap_degree(5.0, topology, SHAPE) == 2
    assert overlap_degree(5.0, Topology((0, 0), intra_node=FAST), SHAPE) == 25
    # A token that stays saves four trips of 20 bytes; a replica costs 400.
    assert break_even_tokens(SHAPE) == 5


def test_budgets_refuse_what_cannot_hide():
    """A replica that takes 2 s to come is refused where only 1 s hides it (MoonEP#6)."""
    topology = Topology((0, 1), intra_node=FAST, inter_node=SLOW)
    load_LE, owner_LE = np.array([[100, 0]]), np.array([[0, 1]])
    for non_moe_s, replicas in ((1.0, 0), (3.0, 1)):
        settings = PlanSettings(overlap_degree=overlap_degree(non_moe_s, topology, SHAPE))
        plan = plan_layers(load_LE, owner_LE, topology, settings)
        assert plan.num_replicas_L.tolist() == [replicas]


KEPT, AGAIN = Copying(num_microbatches=4), Copying(num_microbatches=4, rematerializes=True)


def test_how_often_replicas_travel():
    """Weights and gradients of 200 bytes each: once in 4 micro-batches, or 2 + 1 times in each."""
    assert KEPT.replica_bytes(SHAPE) == 100
    assert AGAIN.replica_bytes(SHAPE) == 600
    assert replace(KEPT, returns_each=True).replica_bytes(SHAPE) == 250
    # Against tokens that save 80 bytes each: 1.25, and 7.5.
    assert break_even_tokens(SHAPE, KEPT) == 2
    assert break_even_tokens(SHAPE, AGAIN) == 8
    # Cut in two, an expert is as many bytes as before.
    assert break_even_tokens(replace(SHAPE, num_shards=2), AGAIN) == 8


@pytest.mark.parametrize(
    ("copying", "rows", "slots"),
    [
        # A token takes 80 bytes / 1000 + 600 flop / 1000: 0.68 s. A copy takes 0.6 s.
        (AGAIN, 29, 1),
        (AGAIN, 30, 2),
        # It takes 0.1 s, six of which are no longer than drift's 0.612 s.
        (KEPT, 30, 7),
        (KEPT, 1000, 8),
    ],
)
def test_spares_fill_the_slots_that_pay(copying: Copying, rows: float, slots: int) -> None:
    """Spares filled all slots whatever they cost: re-materialized, copies took half the time."""
    topology = Topology((0, 0), intra_node=FAST, inter_node=SLOW)
    wide = PlanSettings(num_replica_slots=8)
    settings = with_paying_spares(wide, topology, SHAPE, RATE, copying, rows)
    assert settings.spare_slots == slots
    assert settings.spare_tokens == break_even_tokens(SHAPE, copying)
    assert settings.num_replica_slots == 8
    without = replace(wide, spare_tokens=None)
    assert with_paying_spares(without, topology, SHAPE, RATE, copying, rows) == without


def test_ranks_without_a_peer_pay_the_network():
    """Alone on their nodes: a copy takes 6 s, a token 0.8 + 0.6 s; 150 rows drift by 6.3 s."""
    topology = Topology((0, 1), intra_node=FAST, inter_node=SLOW)
    for rows, slots in ((140, 1), (150, 2)):
        settings = with_paying_spares(PlanSettings(), topology, SHAPE, RATE, AGAIN, rows)
        assert settings.spare_slots == slots


def test_what_a_plan_saves():
    """8 tokens on rank 0 become 4: 4 times (4 trips of 20 bytes at 100 bytes/s + 3 x 200 flop)."""
    topology = Topology((0, 1), intra_node=FAST, inter_node=SLOW)
    old = make_plan([0, 1], [], num_ranks=2, num_slots=1)
    new = make_plan([0, 1], [(0, 1)], num_ranks=2, num_slots=1)
    counts_RE = np.array([[4, 0], [4, 0]])
    quotas = [balance(counts_RE, plan, (0, 1)) for plan in (old, new)]
    seconds = saved_s(quotas[0], old, quotas[1], new, topology, SHAPE, RATE)
    assert seconds == pytest.approx(4 * (0.8 + 0.6))

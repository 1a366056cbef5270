"""What `benchmarks/resharding.py` simulates, on small loads; and how its measured move is planned.

No wall time. The model's times are exact, so that nothing here depends on the machine.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import resharding_measured as measured
import resharding_simulated as simulated
import torch
from resharding_measured import LiveBytes
from resharding_simulated import SYSTEMS, Case, Outcome, simulate

from megatron_fssdp.planning.cost import ComputeRate, LayerShape
from megatron_fssdp.planning.moves import Homes, plan_moves
from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.topology import LinkClass, Topology
from megatron_fssdp.simulation.loads import zipf_series

EP, SHARDING, MATERIALIZATION, BOTH, ALWAYS, SWAPS = SYSTEMS
ITERATIONS = 40


def make_case(counts_TLRE: Int64Array) -> Case:
    """Four ranks on two nodes."""
    fast, slow = (LinkClass(bytes_per_s=rate, latency_s=1e-5) for rate in (1e11, 2e9))
    return Case(
        "made",
        "made",
        counts_TLRE,
        Topology((0, 0, 1, 1), fast, slow),
        ComputeRate(flops_per_s=1e14),
        LayerShape(hidden_size=256, ffn_size=512, num_matrices=2),
        non_moe_s=1e-4,
    )


@pytest.fixture(scope="module")
def skewed() -> Case:
    length = simulated.WARM_UP + ITERATIONS
    layers = [zipf_series(16, 4, 0.8, length, seed=layer, topk=2) for layer in range(3)]
    return make_case(np.stack(layers, axis=1))


@pytest.fixture(scope="module")
def balanced() -> Case:
    return make_case(np.full((simulated.WARM_UP + ITERATIONS, 3, 4, 16), 64))


@pytest.fixture(scope="module")
def outcomes(skewed: Case) -> dict[str, Outcome]:
    return {system.name: simulate(skewed, system, 20) for system in SYSTEMS}


def test_both_are_no_slower_than_each_alone(outcomes: dict[str, Outcome]) -> None:
    for both in (BOTH, SWAPS):
        for alone in (SHARDING, MATERIALIZATION):
            ours, theirs = outcomes[both.name], outcomes[alone.name]
            assert ours.iteration_s <= 1.02 * theirs.iteration_s, (both.name, alone.name)


def test_each_alone_is_no_slower_than_ep(outcomes: dict[str, Outcome]) -> None:
    for alone in (SHARDING, MATERIALIZATION):
        assert outcomes[alone.name].iteration_s < outcomes[EP.name].iteration_s
        assert outcomes[alone.name].balance < outcomes[EP.name].balance


def test_moves_are_paid(outcomes: dict[str, Outcome]) -> None:
    for name, outcome in outcomes.items():
        moves = name not in (EP.name, MATERIALIZATION.name)
        assert outcome.num_looks == (2 if moves else 0)
        assert (outcome.moving_s > 0) == (outcome.num_moves > 0) == (outcome.num_done > 0)
    assert outcomes[ALWAYS.name].num_done == 2, "owners follow every whim of the loads"
    assert outcomes[SHARDING.name].num_done > 0
    assert outcomes[ALWAYS.name].moving_s >= outcomes[BOTH.name].moving_s


def test_level_loads_move_nothing_and_are_as_fast_as_ep(balanced: Case) -> None:
    systems = tuple(system for system in SYSTEMS if not system.always)
    for row in simulated.simulated_rows(balanced, (10, 20), systems):
        assert set(row["num_moves"].values()) == {0}
        assert row["moving ms"] == 0
        assert row["x EP @10"] == row["x EP @20"] == row["both x"] == pytest.approx(1.0)
        assert row["fullest / mean"] == pytest.approx(1.0)


def test_published_figures_stand_in_the_table(skewed: Case) -> None:
    rows = simulated.simulated_rows(skewed)
    published = simulated.published_row()
    assert set(published) == set(rows[0]) - {"num_moves"}
    assert [published[f"x EP @{each}"] for each in (10, 25, 50, 100)] == [1.36, 1.41, 1.34, 1.42]
    by_system = {row["system"]: row for row in rows}
    assert by_system[SHARDING.name]["paper"] == 3.32
    assert by_system[MATERIALIZATION.name]["paper"] == 1.27
    assert by_system[BOTH.name]["both x"] == 1.0


def test_the_measured_move_is_a_ring_in_as_many_rounds_as_experts() -> None:
    homes = Homes.even(4, 16, 4)
    for number in measured.MOVED:
        homes, rounds = plan_moves(homes, measured.ring_on(homes, number))
        assert len(rounds) == number
        for moves in rounds:
            assert Counter((m.target - m.source) % 4 for m in moves) == {1: 4}


def test_live_bytes_count_what_is_made_and_forget_what_is_gone() -> None:
    outside = torch.zeros(100)
    with LiveBytes() as live:
        first = torch.cat([outside, outside])
        view = first[10:].view(-1)
        del first
        assert live.live == 800, "a view keeps what it shows"
        outside.view(10, 10).add_(1)
        del view
        torch.empty(50, dtype=torch.uint8)
    assert (live.live, live.peak) == (0, 800)

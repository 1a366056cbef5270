"""Why a rival wins a cell of the planner benchmark: the first reason that explains all winners."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from planner_cells import CALIBRATED, JUMP, OURS, OURS_FEWEST, RESHARDED, Cell, Result, compare

from megatron_fssdp.simulation.baselines import BASELINES

CELL = Cell("zipf 0.8", 8, 4, 1)
SAME = Result((1.0,), (4,), (100,), (2,), (1.0,), (1,), (0,))


def reasons(ours: Result, error: float = 0.0, **rivals: Result) -> tuple[object, object]:
    """Compare ours with rivals of these results; all other rivals are far worse."""
    worse = replace(SAME, balance=(9.0,), far_bytes=(10**6,))
    results = dict.fromkeys(BASELINES, worse)
    results |= {OURS: ours, OURS_FEWEST: ours, CALIBRATED: ours, RESHARDED: ours, **rivals}
    row = compare(CELL, results, error)
    return row["lost_why"], row["bytes_why"]


def test_no_reason_where_nothing_is_lost():
    assert reasons(SAME, MoonEP=SAME) == (None, None)


@pytest.mark.parametrize(
    ("rival", "error", "why"),
    [
        (replace(SAME, slots=(2,)), 0.0, "they use more slots than there are"),
        (SAME, JUMP * 2, "loads jumped: the prediction was wrong"),
        (replace(SAME, moved=(3,)), 0.0, "they move experts' owners, unpaid"),
        (replace(SAME, planned=(1.02,)), 0.0, "drift: as well balanced as predicted"),
        (SAME, 0.0, "placement"),
    ],
)
def test_why_a_rival_is_better_balanced(rival, error, why):
    ours = replace(SAME, balance=(1.02,), planned=(1.02,))
    assert reasons(ours, error, MoonEP=rival)[0] == why


def test_one_rival_that_keeps_owners_is_enough_for_a_weak_placement():
    ours = replace(SAME, balance=(1.02,), planned=(1.02,))
    rivals = {"LAER-MoE": replace(SAME, moved=(3,)), "MoonEP": SAME}
    assert reasons(ours, **rivals)[0] == "placement"


def test_why_a_rival_sends_less():
    ours = replace(SAME, far_bytes=(120,))
    assert reasons(ours, MoonEP=SAME)[1] == "placement"
    less_balanced = replace(SAME, balance=(1.005,))
    assert reasons(ours, MoonEP=less_balanced)[1] == "bytes buy balance: they are less balanced"
    nothing = replace(ours, copies=(0,))
    why = reasons(nothing, JUMP * 2, MoonEP=SAME)[1]
    assert why == "loads jumped: predicted even, so nothing is copied"

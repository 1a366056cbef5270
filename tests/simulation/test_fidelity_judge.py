# SPDX-License-Identifier: Apache-2.0

"""How the fidelity benchmark judges what it measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from fidelity import has_order, judge, mean_mapping


def test_calibrations_are_averaged_number_by_number() -> None:
    """Counts and words are the first's."""
    each = [
        {"name": "a", "cores": 2, "rate": 1.0, "rows": [[1, 4.0]]},
        {"name": "b", "cores": 3, "rate": 2.0, "rows": [[1, 8.0]]},
    ]
    assert mean_mapping(each) == {"name": "a", "cores": 2, "rate": 1.5, "rows": [[1, 6.0]]}


@pytest.mark.parametrize(
    ("ep", "fssdp", "expected"),
    [
        ([1.1, 1.2, 1.3], [1.0, 1.1, 1.2], True),
        ([1.0, 1.1, 1.2], [1.1, 1.2, 1.3], True),
        ([1.02, 1.12, 1.22], [1.0, 1.1, 1.2], False),  # 2 % apart
        ([1.1, 1.2, 1.3], [1.0, 1.1, 1.4], False),  # once the other way round
    ],
)
def test_an_order_needs_a_distance_and_agreement(
    ep: list[float], fssdp: list[float], expected: bool
) -> None:
    assert has_order({"ep": ep, "fssdp": fssdp}) == expected


def test_targets_are_held_against_all_cases() -> None:
    """Two cases of two systems: errors 4, 8, 12 and 30 %, one order wrong, one undecided."""
    rows = [
        {"error %": 4.0, "order": "WRONG", "medians": "differ"},
        {"error %": -8.0, "order": "WRONG", "medians": "differ"},
        {"error %": 12.0, "order": "none", "medians": "right"},
        {"error %": -30.0, "order": "none", "medians": "right"},
    ]
    lines = judge(rows)
    assert lines[0] == "median error 10.0% (target 10%): met"
    assert lines[1] == "largest error 30.0% (target 25%): NOT MET"
    assert "in 1 of 1 cases that have one (target 0): NOT MET" in lines[2]
    assert lines[3].startswith("1 cases have none")
    assert lines[3].endswith("another order in 1")
    assert judge(rows[2:])[2].endswith(
        "in 0 of 0 cases that have one (target 0): NOT JUDGED, too few"
    )

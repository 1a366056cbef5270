# SPDX-License-Identifier: Apache-2.0

"""`make reproduce`, two of its cells and few iterations: what its tables must say."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import reproduce
import reproduce_cells


@pytest.fixture(scope="module")
def found():
    cells = [cell for cell in reproduce_cells.CELLS if cell.model == "gpt_moe_s"][::2]
    assert [cell.place for cell in cells] == ["A 16", "B 32"]
    return [(cell, reproduce_cells.run_cell(cell, 3)) for cell in cells]


def test_hecate_as_published_is_faster_than_ep_about_as_published(found) -> None:
    for cell, result in found:
        low, high = reproduce.OVER_EP[cell.place]
        assert 0.85 * low <= result.speed_up("hecate") <= 1.1 * high


def test_ours_beats_the_published_algorithms_and_baselines(found) -> None:
    for _, result in found:
        others = ("hecate", "hecate-rm", "fastermoe", "smartmoe", "flexmoe")
        assert min(result.speed_up("fssdp", over=name) for name in others) > 1
    for row in reproduce.our_rows(found):
        # With fewer slots than theirs: less state too.
        assert row["GB ep"] < row["GB fssdp"] <= row["GB hecate"] * 1.05


def test_tables_hold_what_was_simulated_and_reasons_are_given(found) -> None:
    rows = reproduce.speed_up_rows(found)
    assert [row["published"] for row in rows] == ["1.40-1.58", "1.26-1.70"]
    assert all(row["fullest"] > 2 for row in rows)
    assert reproduce._row("c", "1-2", (1.0, 2.0), 1.0, 2.0)["verdict"] == "in"
    assert reproduce._row("c", "1-2", (1.0, 2.1), 1.0, 2.0)["verdict"] == "OUT"
    claim = reproduce._row("over EP, A 16", "1-2", (3.0,), 1.0, 2.0)
    lines = reproduce.verdicts(found, [claim])
    assert lines[0].startswith("OUT over EP, A 16: 3.00 for 1-2: the paper's loads")
    assert any("fssdp: faster than the published algorithms in 2 of 2" in x for x in lines)
    # Every claim has a reason to give, should it be out.
    for name in ("over EP, x", "over the baselines, x", "Themis: x", "MoE layer alone, x"):
        reproduce.verdicts(found, [reproduce._row(name, "", (9.0,), 1.0, 2.0)])

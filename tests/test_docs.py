"""docs/layouts.md and docs/faults.md: tests exist, refusals are raised, figures hold."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from megatron_fssdp.integration.rules import RULES
from tests.integration.test_layouts import CASES, CONSTRAINTS, DEFAULT, FACTORS
from tests.pairwise import feasible_pairs, pairs_of

ROOT = Path(__file__).parent.parent
LAYOUTS = (ROOT / "docs" / "layouts.md").read_text(encoding="utf-8")
FAULTS = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([\w-]+)\])?`")


def refused_table() -> str:
    """Build the table of refusals from the rules; test_validate.py raises each."""
    lines = ["| flag | because | way out |", "| --- | --- | --- |"]
    lines += [f"| `{rule.flag}` | {rule.reason} | {rule.way_out} |" for rule in RULES]
    return "\n".join(lines)


def pairs_sentence() -> str:
    """Say how many pairs and cases there are."""
    pairs = set(feasible_pairs(FACTORS, CONSTRAINTS))
    few = set().union(*(pairs_of(CASES[position], FACTORS) for position in DEFAULT))
    return (
        f"{len(pairs)} pairs in {len(CASES)} cases (`FSSDP_ALL=1`). The default run takes "
        f"{len(DEFAULT)} of them, with {len(few)} pairs."
    )


def test_refusals_are_the_rules() -> None:
    assert refused_table() in LAYOUTS, f"docs/layouts.md should have\n\n{refused_table()}\n"


def test_figures_of_the_suite_hold() -> None:
    text = " ".join(LAYOUTS.split())
    assert pairs_sentence() in text, pairs_sentence()


@cache
def _functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("document", [LAYOUTS, FAULTS], ids=["layouts", "faults"])
def test_named_tests_exist(document: str) -> None:
    named = TEST.findall(document)
    assert len(named) > 30
    for path, function, case in named:
        assert function in _functions(path), f"{path}::{function}"
        assert f'"{case}": (' in (ROOT / path).read_text() or not case, f"{function}[{case}]"


def test_every_row_names_a_test_or_says_why_not() -> None:
    works = LAYOUTS[: LAYOUTS.index("## Refused")]
    rows = [line for line in works.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 25
    assert all(TEST.search(row) for row in rows)
    faults = [line for line in FAULTS.splitlines() if re.match(r"\| \d", line)]
    assert len(faults) == 55
    assert all(TEST.search(row) or re.search(r"\| none[^|]*: ", row) for row in faults)

"""What `benchmarks/copies.py` measures, without its times: bytes over a real link, and memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import copies
from two_nodes import run_two_nodes, why_not

reason = why_not()
needs_namespaces = pytest.mark.skipif(reason is not None, reason=str(reason))


@needs_namespaces
def test_the_kernel_counts_what_we_account_and_trees_cross_once() -> None:
    counted = {}
    for kind in ("flat", "tree"):
        for result in run_two_nodes(copies.run_link, kind, ranks_per_node=2):
            assert result["counted"] == pytest.approx(result["accounted"], rel=0.05)
        counted[kind] = result["counted"]
    assert counted["tree"] / counted["flat"] == pytest.approx(0.5, abs=0.02)


@needs_namespaces
def test_rematerialized_memory_does_not_grow_with_layers() -> None:
    one, many = (
        run_two_nodes(copies.run_memory, layers, True, 2, ranks_per_node=5) for layers in (1, 6)
    )
    kept = run_two_nodes(copies.run_memory, 6, False, 2, ranks_per_node=5)
    assert one == many
    for (weights, rest), (kept_weights, kept_rest) in zip(many, kept, strict=True):
        assert kept_weights == 6 * weights
        assert kept_rest > 2 * rest, "six layers add their gradients up side by side"

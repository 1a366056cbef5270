"""The scripts and benchmarks run and print what the README says they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_script(*command: str, timeout_s: float = 200) -> str:
    """Run a script of the repository and return what it printed."""
    answer = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_gpu_check_compares_right_on_a_cpu() -> None:
    printed = run_script("scripts/gpu_check.py", "--device", "cpu")
    assert printed.count("equal") == 6
    assert "WRONG" not in printed
    # The check of its experts, in a process that has it: test_transformer_engine.py.
    assert "transformer-engine is not installed" in printed
    assert "experts of the fullest rank" in printed
    for backend in ("deepep", "hybridep"):
        assert f"flex dispatcher, {backend}" in printed
    assert printed.count("deep_ep is not installed") == 2


def test_layer_benchmark(tmp_path: Path) -> None:
    """The figures are the machine's; that FSSDP evens out the tokens is ours."""
    results = tmp_path / "layer.json"
    printed = run_script("benchmarks/layer.py", "--repeats", "1", "--json", str(results))
    for words in ("ep skewed", "fssdp skewed", "measured", "ideal", "bound"):
        assert words in printed
    cases = json.loads(results.read_text())["cases"]
    assert cases["ep skewed"]["fullest_over_mean"] == pytest.approx(1.6, abs=0.02)
    assert cases["fssdp skewed"]["fullest_over_mean"] <= 1.01
    assert cases["fssdp balanced"]["fullest_over_mean"] == 1.0


def test_nothing_to_gain_costs_no_memory(tmp_path: Path) -> None:
    """Time is the machine's; replicas, bytes copied and memory are ours."""
    results = tmp_path / "nothing.json"
    printed = run_script("benchmarks/nothing_to_gain.py", "--repeats", "1", "--json", str(results))
    assert "Nothing to gain" in printed
    figures = json.loads(results.read_text())
    *_, memory, replicas = figures["ratios"]
    assert replicas["holds"], figures
    # Far above 0: the tracker saw both layers' tensors.
    assert 0.9 <= memory["measured"] <= 1.02, figures

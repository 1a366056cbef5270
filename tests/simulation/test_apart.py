# SPDX-License-Identifier: Apache-2.0

"""Systems that are simulated in processes of their own have the result of one process."""

import multiprocessing as mp
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fssdp.simulation import apart
from megatron_fssdp.simulation.apart import simulate_apart
from megatron_fssdp.simulation.generate import Shape, generate
from megatron_fssdp.simulation.result import write_result
from megatron_fssdp.simulation.simulate import simulate
from megatron_fssdp.simulation.spread import ZipfTrace
from megatron_fssdp.simulation.traces import Trace, open_trace, write_trace
from tests.simulation.cases import make_cluster, make_job

SYSTEMS = ("ep", "laer", "fssdp")
LAZY = ZipfTrace(1.0, 8, 2, 4, 10, tokens=512, seed=3)
SHAPE = Shape(num_iterations=10, num_layers=2, num_ranks=4, num_experts=8, tokens=256, topk=2)


def make_trace(kind: str, folder: Path) -> Any:
    """Make a trace by its way of reading counts."""
    if kind == "generated":
        return generate("drift", SHAPE)
    in_memory = Trace.of(np.stack([LAZY.counts(index) for index in range(10)]), "in memory")
    if kind == "recorded":
        write_trace(in_memory, folder / "trace")
        return open_trace(folder / "trace")
    return in_memory.with_ranks(8).with_ranks(4) if kind == "dealt" else in_memory


@pytest.mark.parametrize("kind", ["generated", "in memory", "dealt", "recorded"])
def test_processes_can_read_any_trace(kind: str, tmp_path: Path) -> None:
    """A trace that was opened here is read there."""
    trace = make_trace(kind, tmp_path)
    there = pickle.loads(pickle.dumps(trace))
    assert there.notes == trace.notes
    np.testing.assert_array_equal(there.counts(7), trace.counts(7))


def test_result_is_that_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All figures, notes and events, in the order of the systems; it takes two if that pays."""
    monkeypatch.setattr(apart, "LEAST_LAYER_ITERATIONS", 20)
    monkeypatch.setattr(apart, "num_cores", lambda: 2)
    case = (make_job(), make_cluster(), make_trace("recorded", tmp_path), SYSTEMS)
    seen: list[tuple[int, int]] = []
    found = simulate_apart(*case, timelines=(5,), progress=lambda *each: seen.append(each))
    write_result(tmp_path / "apart.json", found)
    write_result(tmp_path / "one.json", simulate(*case, timelines=(5,)))
    assert (tmp_path / "apart.json").read_text() == (tmp_path / "one.json").read_text()
    assert seen == sorted(seen)
    assert seen[-1] == (30, 30)
    assert apart._shared == {}, "it was done here"


def test_little_is_done_here() -> None:
    """The progress is the same."""
    seen: list[tuple[int, int]] = []
    simulate_apart(
        make_job(), make_cluster(), LAZY, SYSTEMS, progress=lambda *each: seen.append(each)
    )
    assert seen == [(number, 30) for number in range(1, 31)]


class Telling(ZipfTrace):
    """Has no loads where BLAS would take more than a thread."""

    def counts(self, iteration: int) -> Any:
        """Return counts, of nothing in a process that shares its core."""
        return super().counts(iteration) * (os.environ.get("OPENBLAS_NUM_THREADS") == "1")


def test_each_process_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """More would spin on the cores of the others; this one keeps its settings."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    case = (make_job(), make_cluster())
    found = simulate_apart(*case, Telling(1.0, 8, 2, 4, 10), SYSTEMS, num_processes=2)
    expected = simulate(*case, ZipfTrace(1.0, 8, 2, 4, 10), SYSTEMS)
    np.testing.assert_array_equal(found.owner_loads_LR, expected.owner_loads_LR)
    assert os.environ["OPENBLAS_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in os.environ


class Failing(ZipfTrace):
    """Breaks in the sixth iteration, in every process."""

    def counts(self, iteration: int) -> Any:
        """Return counts, for a while."""
        if iteration == 5:
            raise MemoryError("the sixth iteration")
        return super().counts(iteration)


class Killing(ZipfTrace):
    """Ends its process in the sixth iteration."""

    def counts(self, iteration: int) -> Any:
        """Return counts, for a while."""
        if iteration == 5:
            os._exit(9)
        return super().counts(iteration)


@pytest.mark.parametrize(
    ("trace", "settings", "error"),
    [
        (LAZY, {"num_iterations": 99}, (ValueError, "iterations after")),
        (Failing(1.0, 8, 2, 4, 10), {}, (MemoryError, "the sixth iteration")),
        (Killing(1.0, 8, 2, 4, 10), {}, (ValueError, "ep, laer, fssdp was ended from outside")),
    ],
)
def test_errors_come_through(trace: Any, settings: Any, error: Any) -> None:
    """What one process finds wrong, at once or late, is raised here."""
    with pytest.raises(error[0], match=error[1]):
        simulate_apart(make_job(), make_cluster(), trace, SYSTEMS, num_processes=2, **settings)


def test_an_interrupt_ends_all_processes() -> None:
    """At once, though they have minutes to go."""
    long = ZipfTrace(1.0, 8, 2, 4, 100_000, tokens=512)

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    before = set(mp.active_children())
    with pytest.raises(KeyboardInterrupt):
        simulate_apart(
            make_job(), make_cluster(), long, SYSTEMS, num_processes=2, progress=interrupt
        )
    left = set(mp.active_children()) - before
    for process in left:
        process.join(timeout=10)
    assert not any(process.is_alive() for process in left)


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """It may be killed, and can end nobody then."""
    fssdp = str(Path(sys.executable).parent / "fssdp")
    words = ("simulate", "--model", "deepseek_v3", "--cluster", "h100_dgx", "--nodes", "64")
    command = [fssdp, *words, "--trace", "zipf:0.8", "--systems", "ep,fssdp"]
    # Its processes hold this pipe too: it ends when all have.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        deadline = time.monotonic() + 60
        # Two, and the one that looks after what they share.
        while len(children.read_text().split()) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2)  # for their imports
        assert len(children.read_text().split()) == 3
        parent.kill()
        parent.stdout.read()

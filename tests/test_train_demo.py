"""The demo's report, from made-up runs; `make train` itself takes minutes."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from megatron_fssdp.simulation.recording import RecordedRun
from scripts import train_demo

NUM_ITERATIONS = 30


def made_up_run(loads_R: list[int], replicas: int, kilobytes: int, loss: float) -> train_demo.Run:
    """A run of two layers whose every iteration was the same."""
    shape = (NUM_ITERATIONS, 2)
    log = RecordedRun(
        iterations=np.arange(NUM_ITERATIONS, dtype=np.int32),
        counts_ILRE=np.zeros((*shape, 4, 16), dtype=np.int32),
        loads_ILR=np.broadcast_to(np.array(loads_R, dtype=np.int32), (*shape, 4)),
        replicas_IL=np.full(shape, replicas, dtype=np.int32),
        copied_kb_IL=np.full(shape, kilobytes, dtype=np.int32),
    )
    return train_demo.Run(
        losses_I=np.full(NUM_ITERATIONS, loss), times_ms_I=np.full(NUM_ITERATIONS, 250.0), log=log
    )


@pytest.fixture
def runs() -> tuple[train_demo.Run, train_demo.Run]:
    return made_up_run([700, 100, 100, 100], 0, 0, 2.5), made_up_run([250] * 4, 3, 2000, 2.25)


def test_summary(runs: tuple[train_demo.Run, train_demo.Run]) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(train_demo.summarize(*runs))
    cells = [line.split("\u2502") for line in console.export_text().splitlines()]
    rows = {cell[1].strip(): [cell[2].strip(), cell[3].strip()] for cell in cells if len(cell) > 3}
    assert rows == {
        "final loss": ["2.500000", "2.250000"],
        # 700 tokens on one rank where the mean is 250.
        "fullest rank / mean tokens: mean": ["2.800", "1.000"],
        "fullest rank / mean tokens: p95": ["2.800", "1.000"],
        "after 10 iterations: mean": ["2.800", "1.000"],
        "after 10 iterations: p95": ["2.800", "1.000"],
        # Over both layers; 2 * 2 MB out, and as much back.
        "replicas per iteration": ["0.0", "6.0"],
        "MB per iteration, weights out and gradients back": ["0.0", "8.0"],
        "ms per iteration, median": ["250", "250"],
    }


def test_picture(runs: tuple[train_demo.Run, train_demo.Run], tmp_path: Path) -> None:
    train_demo.draw(*runs, tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_reads_megatrons_line() -> None:
    line = (
        " [2026-11-30 07:20:16.538249] iteration        1/       8 | consumed samples:            4"
        " | elapsed time per iteration (ms): 764.3 | learning rate: 2.000000E-04 | global batch"
        " size:     4 | lm loss: 5.919888E+00 | loss scale: 1.0 | grad norm: 20.176 |"
    )
    match = train_demo.ITERATION.search(line)
    assert match is not None
    assert (float(match[1]), float(match[2])) == (764.3, 5.919888)


def test_data_path_names_every_domain(tmp_path: Path) -> None:
    for name in ("docs", "tools"):
        (tmp_path / f"{name}.idx").touch()
    expected = ["1", str(tmp_path / "docs"), "1", str(tmp_path / "tools")]
    assert train_demo.prepare_corpus(tmp_path) == expected


def test_corpus_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "make_corpus.py"
    monkeypatch.setattr(train_demo, "CORPUS_SCRIPT", script)
    write_one = (
        "import pathlib, sys\nfolder = pathlib.Path(sys.argv[1])\nfolder.mkdir(exist_ok=True)\n"
        "(folder / 'docs.idx').touch()\n"
    )
    script.write_text(write_one + "sys.exit('interrupted')")
    with pytest.raises(subprocess.CalledProcessError):
        train_demo.prepare_corpus(tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()
    script.write_text(write_one)
    assert train_demo.prepare_corpus(tmp_path / "corpus") == ["1", str(tmp_path / "corpus/docs")]


def test_a_failed_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_demo, "RUNS", tmp_path)
    monkeypatch.setattr(train_demo, "NUM_RANKS", 1)
    with pytest.raises(RuntimeError, match="the fssdp run failed") as caught:
        train_demo.train("fssdp", 21, ["1", str(tmp_path / "missing")])
    # 4 expert-parallel ranks on one process: Megatron's own sentence, and the whole log's place.
    assert "expert" in str(caught.value)
    assert str(tmp_path / "fssdp/log.txt") in str(caught.value)

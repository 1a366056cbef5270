"""Recorded runs as a result: what is torn or differs is told."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from megatron_fssdp.cli import app
from megatron_fssdp.presets.files import find_file
from megatron_fssdp.simulation import measured as module
from megatron_fssdp.simulation.measured import measured
from megatron_fssdp.simulation.recording import TraceWriter
from megatron_fssdp.simulation.traces import owned_loads


def write_run(
    folder: Path, kind: str, ms: float, iterations: range = range(6), experts: int = 8
) -> Path:
    """A run of two stages of one layer each; 4 ranks, rank 0's experts draw 4 times as much."""
    counts = np.full((1, 4, experts), 10)
    counts[:, :, : experts // 4] = 40
    for stage in range(2):
        writer = TraceWriter(folder, stage, 2, [(4, experts)], [stage + 3])
        loads = owned_loads(counts)
        if kind == "fssdp":
            loads[:] = loads.sum(axis=1, keepdims=True) // 4
        for iteration in iterations:
            copies = [3 if kind == "fssdp" else 0]
            writer.append(iteration, list(counts), list(loads), copies, [500])
        writer.close()
        lines = [{"start": {"moe-parallel": kind, "nodes": 2, "flags": {"--fssdp-x": 1}}}]
        lines += [
            {
                "iteration": iteration, "time-ms": (30_000 if not number else ms) + stage,
                "copies-exposed-ms": 2 + stage, "copied-inside-nodes-mb": 5,
                "copied-between-nodes-mb": 1, "moved-experts": 4 * (iteration >= 3),
            }
            for number, iteration in enumerate(iterations)
        ]  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"iterations-stage{stage}.jsonl").write_text(text)
    return folder


def test_two_runs_beside_each_other(tmp_path: Path) -> None:
    ep = write_run(tmp_path / "ep", "ep", 200)
    fssdp = write_run(tmp_path / "fssdp", "fssdp", 100, range(1, 6))
    result = measured([ep, fssdp])
    # Iterations 0 and 1 have the starts of the jobs in them.
    assert result.iterations.tolist() == [2, 3, 4, 5]
    assert result.layers.tolist() == [3, 4]
    assert (result.num_nodes, result.source) == (2, "measured")
    assert result.speed_up("fssdp") == pytest.approx(201 / 101)
    # 4 * 80 tokens of 4 * 140; mean 4 * 35.
    assert result.owner_straggler_IL == pytest.approx(80 / 35, abs=0.001)
    assert result.system("ep").straggler_IL == pytest.approx(80 / 35, abs=0.001)
    assert result.system("fssdp").straggler_IL == pytest.approx(1)
    system = result.system("fssdp")
    assert system.replicas_I.tolist() == [6] * 4
    assert system.copied_bytes_I.tolist() == [12_000_000] * 4
    assert system.exposed_s.tolist() == [0.003] * 4
    # 4 experts of each stage moved before iteration 3.
    assert system.moved_I.tolist() == [0, 8, 0, 0]
    assert system.notes == ("ran with --fssdp-x 1",)
    assert any("iterations 0, 1 (from 0)" in note or "1 (from 0)" in note for note in result.notes)


def test_torn_lines_are_told(tmp_path: Path) -> None:
    run = write_run(tmp_path, "ep", 100)
    path = run / "iterations-stage1.jsonl"
    path.write_text(path.read_text()[:-20])
    result = measured([run])
    assert result.iterations.tolist() == [1, 2, 3, 4]
    assert "iterations-stage1.jsonl: line 7 is torn and was left out" in result.notes


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("time-ms", None, "time-ms is None, no finite number above 0"),
        ("time-ms", 0, "time-ms is 0, no finite"),
        ("time-ms", -5.0, "time-ms is -5.0, no finite"),
        ("time-ms", math.nan, "time-ms is nan, no finite"),
        ("time-ms", math.inf, "time-ms is inf, no finite"),
        ("time-ms", True, "time-ms is True, no finite"),
        ("time-ms", [1], "time-ms is [1], no finite"),
        ("time-ms", "abc", "time-ms is 'abc', no finite"),
        ("moved-experts", 1e300, "moved-experts is 1e+300, no finite"),
        ("copied-inside-nodes-mb", math.nan, "copied-inside-nodes-mb is nan, no finite"),
        ("iteration", math.inf, "iteration is inf, no whole number of at least 0"),
        ("iteration", "3", "iteration is '3', no whole"),
    ],
)
def test_figures_that_cannot_be_are_left_out_and_told(
    tmp_path: Path, name: str, value: Any, told: str
) -> None:
    """They were averaged, or ended in a traceback."""
    path = write_run(tmp_path, "ep", 100) / "iterations-stage0.jsonl"
    lines = path.read_text().splitlines()
    lines[4] = json.dumps({**json.loads(lines[4]), name: value})
    path.write_text("\n".join(lines))
    result = measured([tmp_path])
    assert result.iterations.tolist() == [1, 2, 4, 5]
    (note,) = [note for note in result.notes if "cannot be and were left out" in note]
    assert note.startswith("iterations-stage0.jsonl: 1 lines cannot be")
    assert f"in line 5 {told}" in note


@pytest.mark.parametrize(
    "start",
    [5, None, {"flags": [1]}, {"nodes": "two"}, {"nodes": -3}, {"moe-parallel": "<b>"}],
)
def test_a_start_that_cannot_be_is_refused(tmp_path: Path, start: Any) -> None:
    path = write_run(tmp_path, "ep", 100) / "iterations-stage0.jsonl"
    path.write_text(json.dumps({"start": start}) + "\n" + path.read_text())
    with pytest.raises(ValueError, match=r"iterations-stage0\.jsonl: line 1: 'start' is"):
        measured([tmp_path])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"GPUS: abc", "GPUS is 'abc'; use a whole number"),
        (b"GPUS: -4", "GPUS is -4; use a whole number"),
        (b"GPUS:", "GPUS is None; use a whole number"),
        (b"a: [", "is no YAML file"),
        (b"\xff\xfe\x00", "is no YAML file: its byte 0 is no UTF-8 text"),
    ],
)
def test_a_runs_model_file_that_cannot_be_is_named(tmp_path: Path, text: bytes, told: str) -> None:
    run = write_run(tmp_path, "ep", 100)
    (run / "model.yaml").write_bytes(text)
    with pytest.raises(ValueError, match=rf"model\.yaml.*{told}"):
        measured([run])


def test_a_missing_pipeline_stage_is_refused(tmp_path: Path) -> None:
    """Half of the model was shown as the whole. A stage without MoE layers has no files."""
    run = write_run(tmp_path, "ep", 100)
    for path in run.glob("*-stage1.*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"1 of the run's 2 pipeline stages.* missing for P = 1"):
        measured([run])
    values = yaml.safe_load(find_file("models", "gpt_moe_s").read_text())
    for freq, layers in (("[1]+[0]*11", 1), ("[1]*2+[0]*10", 2)):
        values["MODEL_ARGS"]["--moe-layer-freq"] = freq
        (run / "model.yaml").write_text(yaml.safe_dump(values))
        if layers == 1:
            assert measured([run]).layers.tolist() == [3]
        else:
            with pytest.raises(ValueError, match="missing for P = 1"):
                measured([run])


def test_a_layer_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, "ep", 100)
    header = run / "trace-stage1.json"
    header.write_text(header.read_text().replace('"numbers": [4]', '"numbers": [3]'))
    with pytest.raises(ValueError, match=r"layers \[3\] are there twice"):
        measured([run])


def test_a_full_disk_under_the_summary_is_told(tmp_path: Path) -> None:
    """The summary was printed outside of what shows errors as sentences."""
    run = write_run(tmp_path, "ep", 100)
    command = [sys.executable, "-c", "from megatron_fssdp.cli import main; main()", "report", run]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "fssdp report: [Errno 28]" in done.stderr
    assert "Traceback" not in done.stderr


def test_long_runs_are_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ITERATIONS", 2)
    result = measured([write_run(tmp_path, "ep", 100)])
    assert result.iterations.tolist() == [1, 4]
    assert any("one of 3 iterations is shown, of 5" in note for note in result.notes)


def test_runs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    ep = write_run(tmp_path / "ep", "ep", 1)
    other = write_run(tmp_path / "other", "fssdp", 1, experts=16)
    later = write_run(tmp_path / "later", "fssdp", 1, range(10, 12))
    with pytest.raises(ValueError, match="differ in"):
        measured([ep, other])
    with pytest.raises(ValueError, match="no iteration that all of them finished"):
        measured([ep, later])
    for path in ep.glob("*.jsonl"):
        path.unlink()
    with pytest.raises(ValueError, match="it is no run's"):
        measured([ep])
    result = CliRunner().invoke(app, ["report", str(ep)])
    assert result.exit_code == 2
    assert "fssdp report: " in result.output
    assert "Traceback" not in result.output


def test_the_commands_of_traces(tmp_path: Path) -> None:
    """Generate, import what torch saved, look at both; a folder is never overwritten."""
    import torch

    def fssdp(*words: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["trace", *map(str, words)], env={"COLUMNS": "120"})
        return result.exit_code, result.output

    made, imported = tmp_path / "made", tmp_path / "imported"
    assert fssdp("generate", made, "--iterations", 5, "--experts", 16, "--seed", 3)[0] == 0
    code, output = fssdp("generate", made)
    assert (code, "holds a trace already" in output) == (2, True)
    code, output = fssdp("info", made)
    assert code == 0
    assert "5 iterations (0 to 4), 4 MoE layers, 8 source ranks, 16 experts" in output
    assert "fullest rank / mean, under EP" in output
    code, output = fssdp("generate", tmp_path / "x", "--kind", "no")
    assert (code, "use one of even" in output) == (2, True)

    loads = torch.arange(24).reshape(2, 3, 4)
    dump = tmp_path / "expert_distribution_recorder_1.5.pt"
    utilization = {"average_utilization_rate_over_window": None}
    torch.save({"rank": 0, "logical_count": loads, **utilization}, dump)
    code, output = fssdp("import", dump, imported, "--ranks", 2)
    assert code == 0, output
    assert "dealt out evenly over 2 ranks" in output
    assert "2 iterations (0 to 1), 3 MoE layers, 2 source ranks, 4 experts" in output
    assert fssdp("info", imported)[0] == 0
    dump.write_bytes(b"no")
    code, output = fssdp("import", dump, tmp_path / "y")
    assert (code, "cannot be read" in output) == (2, True)
    assert "weights_only" not in output, "torch advises to run what the file holds"

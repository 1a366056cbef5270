# SPDX-License-Identifier: Apache-2.0

"""What training runs recorded (--fssdp-record-trace), as a result for the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fssdp.planning.files import read_yaml
from megatron_fssdp.simulation.recording import Recording, open_recording
from megatron_fssdp.simulation.result import Float64Array, Result, SystemResult
from megatron_fssdp.simulation.traces import owned_loads

# Of longer runs so many iterations are shown, evenly chosen.
MOST_ITERATIONS = 2000

# Figures of an iteration that are shown, besides its time, and the most that any can be.
FIGURES = (
    *("copies-exposed-ms", "copied-inside-nodes-mb", "copied-between-nodes-mb", "moved-experts"),
)
MOST = 1e12

TITLES = {"ep": "Plain EP", "fssdp": "FSSDP (this project)"}


@dataclass(frozen=True, eq=False)
class Run:
    """One folder.

    Attributes:
        recording: its loads.
        start: what the last start of the job told.
        stages: for each pipeline stage the figures of each iteration, by name.
        first: iterations in which the job was started.
        notes: sentences on what could not be read.
    """

    recording: Recording
    start: Mapping[str, Any]
    stages: tuple[Mapping[int, Mapping[str, float]], ...]
    first: frozenset[int]
    notes: tuple[str, ...]

    def figure(self, name: str, iteration: int) -> list[float]:
        """Return a figure of an iteration, of each stage that has it."""
        found = [stage.get(iteration, {}).get(name) for stage in self.stages]
        return [float(value) for value in found if value is not None]


def open_run(folder: str | Path) -> Run:
    """Open a folder that a run wrote.

    Raises:
        ValueError: it holds no trace, or no record of its iterations.
    """
    recording = open_recording(folder)
    files = sorted(Path(folder).glob("iterations-stage*.jsonl"))
    if not files:
        raise ValueError(
            f"{folder} has loads, but no iterations-stage*.jsonl: it is no run's. See its loads "
            "with `fssdp trace info`, or what it would take with `fssdp simulate`"
        )
    start: dict[str, Any] = {}
    stages: list[dict[int, dict[str, float]]] = []
    first: set[int] = set()
    notes = list(recording.notes)
    for file in files:
        stages.append({})
        has_started = False
        wrong: list[str] = []
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            try:
                values = json.loads(line)
                is_line = "start" in values or "iteration" in values
            except (ValueError, TypeError, RecursionError):
                is_line = False
            if not (is_line and isinstance(values, dict)):
                notes.append(f"{file.name}: line {number} is torn and was left out")
                continue
            if "start" in values:
                start, has_started = _start(values["start"], f"{file}: line {number}"), True
                continue
            if reason := _why_wrong(values):
                wrong.append(f"in line {number} {reason}")
                continue
            stages[-1][values["iteration"]] = values
            if has_started:
                first.add(values["iteration"])
            has_started = False
        if wrong:
            notes.append(f"{file.name}: {len(wrong)} lines cannot be and were left out: {wrong[0]}")
    return Run(recording, start, tuple(stages), frozenset(first), tuple(notes))


def _start(start: Any, where: str) -> dict[str, Any]:
    """Return what a start of the job told.

    Raises:
        ValueError: it is no such record.
    """
    told = start if isinstance(start, dict) else {"moe-parallel": None}
    nodes = told.get("nodes", 1)
    is_known = str(told.get("moe-parallel", "fssdp")) in TITLES
    is_count = type(nodes) is int and nodes > 0
    if not (is_known and is_count and isinstance(told.get("flags", {}), dict)):
        raise ValueError(
            f"{where}: 'start' is {start!r}; it must have moe-parallel (ep or fssdp), flags (a "
            "mapping) and nodes (1 or more), as --fssdp-record-trace writes it"
        )
    return told


def _why_wrong(values: Mapping[str, Any]) -> str | None:
    """Say what of an iteration's figures cannot be; None: all can."""
    iteration = values["iteration"]
    time_ms: Any = values.get("time-ms")
    if type(iteration) is not int or iteration < 0:
        return f"iteration is {iteration!r}, no whole number of at least 0"
    if type(time_ms) not in (int, float) or not 0 < time_ms <= MOST:
        return f"time-ms is {time_ms!r}, no finite number above 0"
    for name in FIGURES:
        value = values.get(name, 0)
        if type(value) not in (int, float) or not 0 <= value <= MOST:
            return f"{name} is {value!r}, no finite number of at least 0"
    return None


def measured(folders: Sequence[str | Path]) -> Result:
    """Read runs of one model, each a system of the result.

    Args:
        folders: of one run, or of a run under EP and one under FSSDP.

    Raises:
        ValueError: a folder is none, or the runs have no iteration or shape in common.
    """
    runs = [open_run(folder) for folder in folders]
    shapes = sorted({(r.recording.num_layers, r.recording.num_ranks, r.recording.num_experts)
                     for r in runs})  # fmt: skip
    if len(shapes) != 1:
        raise ValueError(f"the runs differ in (layers, ranks, experts): {shapes}")
    timed = [set(r.recording.iterations).intersection(*r.stages) for r in runs]
    common = sorted(set.intersection(*timed))
    notes = [note for run in runs for note in run.notes]
    if not common:
        told = "".join(f"; {note}" for note in notes)
        raise ValueError(
            f"{', '.join(map(str, folders))}: no iteration that all of them finished{told}"
        )
    starts = frozenset.union(*(run.first for run in runs)) & set(common)
    if len(starts) < len(common):
        common = [iteration for iteration in common if iteration not in starts]
        if starts:
            told = ", ".join(str(each) for each in sorted(starts))
            notes.append(f"left out, as the job started in them: iterations {told} (from 0)")
    if len(common) > MOST_ITERATIONS:
        step = -(-len(common) // MOST_ITERATIONS)
        notes.append(f"one of {step} iterations is shown, of {len(common)}")
        common = common[::step]
    notes.append("times are those of the first rank of each pipeline stage")
    notes.append("exposed is what copies of experts exposed; the tokens' exchange was not measured")
    systems: list[SystemResult] = []
    owners: list[tuple[Float64Array, Float64Array]] = []
    for run, folder in zip(runs, folders, strict=True):
        system, owner = _system(run, common, Path(folder).name)
        taken = [each.name for each in systems]
        systems.append(
            system
            if system.name not in taken
            else replace(system, name=Path(folder).name, title=Path(folder).name)
        )
        owners.append(owner)
    return Result(
        source="measured",
        model=" and ".join(Path(folder).name for folder in folders),
        cluster=f"{shapes[0][1]} expert-parallel ranks",
        trace=" and ".join(str(folder) for folder in folders),
        num_ranks=_read_gpus(Path(folders[0]), shapes[0][1]),
        num_nodes=runs[0].start.get("nodes", 1),
        iterations=np.array(common, dtype=np.int64),
        layers=_layer_numbers(runs[0].recording),
        owner_straggler_IL=owners[0][0],
        owner_loads_LR=owners[0][1],
        systems=tuple(systems),
        layout={"ep": shapes[0][1], "experts": shapes[0][2]},
        notes=tuple(dict.fromkeys(notes)),
    )


def _read_gpus(folder: Path, num_ranks: int) -> int:
    """Return the GPUs that a run's model.yaml tells; if it tells none, the ranks of its loads."""
    path = folder / "model.yaml"
    values = read_yaml(path) if path.exists() else {}
    gpus = values.get("GPUS", num_ranks) if isinstance(values, dict) else num_ranks
    if type(gpus) is not int or gpus < 1:
        raise ValueError(f"{path}: GPUS is {gpus!r}; use a whole number of at least 1")
    return gpus


def _layer_numbers(recording: Recording) -> np.ndarray[Any, np.dtype[np.int64]]:
    numbers = sorted(number for stage in recording.stages for number in stage.numbers)
    known = all(numbers) and len(set(numbers)) == len(numbers)
    return np.array(numbers if known else range(1, len(numbers) + 1), dtype=np.int64)


def straggler(loads: Float64Array) -> Float64Array:
    """Return (...,) the fullest rank's tokens over the mean, of (..., R) loads."""
    mean = loads.mean(axis=-1)
    factor: Float64Array = np.where(mean > 0, loads.max(axis=-1) / np.maximum(mean, 1e-9), 1.0)
    return factor


def _system(
    run: Run, iterations: Sequence[int], folder: str
) -> tuple[SystemResult, tuple[Float64Array, Float64Array]]:
    """Return what ran, and the stragglers and mean loads of owners alone."""
    place = {iteration: at for at, iteration in enumerate(run.recording.iterations)}
    records = [run.recording.read(place[iteration]) for iteration in iterations]
    loads_ILR = np.stack([record.loads_LR for record in records]).astype(np.float64)
    if not loads_ILR.any():
        raise ValueError(f"{run.recording.folder} counts no token in any iteration; record another")
    owned_ILR = np.stack(
        [owned_loads(record.counts_LRE.astype(np.int64)) for record in records]
    ).astype(np.float64)

    def total(name: str) -> Float64Array:
        return np.array([sum(run.figure(name, iteration)) for iteration in iterations])

    def worst(name: str) -> Float64Array:
        return np.array([max(run.figure(name, each), default=0.0) for each in iterations])

    moved_I = np.diff(moves_I := total("moved-experts"), prepend=moves_I[:1])
    copied_mb_I = total("copied-inside-nodes-mb") + total("copied-between-nodes-mb")
    name = str(run.start.get("moe-parallel", "fssdp"))
    flags = run.start.get("flags", {})
    told = " ".join(f"{flag} {value}" for flag, value in flags.items())
    system = SystemResult(
        name=name,
        title=TITLES.get(name, folder),
        iteration_s=worst("time-ms") / 1e3,
        straggler_IL=straggler(loads_ILR),
        loads_LR=loads_ILR.mean(axis=0),
        exposed_s=worst("copies-exposed-ms") / 1e3,
        replicas_I=np.array([record.replicas_L.sum() for record in records], dtype=np.int64),
        copied_bytes_I=(1e6 * copied_mb_I).astype(np.int64),
        far_bytes_I=(1e6 * total("copied-between-nodes-mb")).astype(np.int64),
        moved_I=np.maximum(moved_I, 0).astype(np.int64),
        notes=(f"ran with {told}",) if told and name == "fssdp" else (),
    )
    return system, (straggler(owned_ILR), owned_ILR.mean(axis=0))

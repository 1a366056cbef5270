# SPDX-License-Identifier: Apache-2.0

"""What a run records with --fssdp-record-trace: append-only files that numpy alone can read.

A folder has three files per pipeline stage that owns MoE layers:

    trace-stageP.json       header: format version, pipeline stages of the run, and for each MoE
                            layer its [R, E] and its number in the model
    trace-stageP.bin        frames, one an iteration
    iterations-stageP.jsonl what the iteration took and copied (`integration/metrics.py`)

A frame is 20 bytes of `FRAME` (crc32: of the payload, started with the iteration) and `num_bytes`
of payload: zlib-compressed byte planes (all lowest bytes first) of little-endian int32 numbers. For
each layer: counts (R * E), the tokens that each source rank routed to each expert; loads (R), the
tokens that each rank computed; replicas in use; KB (1000 bytes) of parameters copied. In numpy:

    frame = np.frombuffer(data, FRAME, count=1, offset=position)[0]
    payload = zlib.decompress(data[position + 20 : position + 20 + frame["num_bytes"]])
    values = np.frombuffer(payload, np.uint8).reshape(4, -1).T.copy().view("<i4")

A killed job leaves at most one torn frame at the end. Readers skip what is torn or damaged, and of
an iteration that a resumed run repeated they take the last.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.files import reading
from megatron_fssdp.presets.files import read_preset
from megatron_fssdp.presets.sizes import count_parameters

VERSION = 2
# Counts are kept in 4 bytes.
MOST = 2**31 - 1
MOST_STAGES = 4096
MAGIC = b"FSSDP\x00TR"
FRAME = np.dtype(
    [("magic", "S8"), ("iteration", "<i4"), ("num_bytes", "<u4"), ("crc32", "<u4")], align=False
)

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RecordedIteration:
    """One iteration of all layers.

    Attributes:
        counts_LRE: (L, R, E) int32, tokens by source rank and expert, all micro-batches.
        loads_LR: (L, R) int32, tokens that each rank computed.
        replicas_L: (L,) int32, replicas in use.
        copied_kb_L: (L,) int32, kilobytes (1000 bytes) of parameters fetched by replicas.
    """

    counts_LRE: Int32Array
    loads_LR: Int32Array
    replicas_L: Int32Array
    copied_kb_L: Int32Array


@dataclass(frozen=True, eq=False)
class Stage:
    """One pipeline stage's file: where the readable frame of each iteration is.

    Attributes:
        path: the `.bin` file.
        layers: (R, E) of each layer.
        numbers: the layers' numbers in the model, from 1; 0: not known.
        num_stages: pipeline stages of the run.
        frames: for each iteration, where its payload starts and its bytes.
        notes: sentences on what could not be read.
    """

    path: Path
    layers: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]
    num_stages: int
    frames: dict[int, tuple[int, int]]
    notes: tuple[str, ...]

    def read(self, iteration: int) -> Int32Array:
        """Return an iteration's numbers.

        Raises:
            ValueError: they are not as many as the header tells, some are negative, or it is
                damaged.
        """
        start, num_bytes = self.frames[iteration]
        with reading(self.path), self.path.open("rb") as file:
            file.seek(start)
            planes = np.frombuffer(zlib.decompress(file.read(num_bytes)), dtype=np.uint8)
            if len(planes) % 4:
                raise ValueError(f"iteration {iteration} has {len(planes)} bytes, not 4 a number")
        values = np.ascontiguousarray(planes.reshape(4, -1).T).view("<i4").ravel()
        # Of each layer its counts, loads, replicas and kilobytes.
        expected = sum(ranks * experts + ranks + 2 for ranks, experts in self.layers)
        if len(values) != expected:
            raise ValueError(
                f"{self.path}: iteration {iteration} has {len(values)} numbers, and its header "
                f"tells of {expected}; the two are of different runs"
            )
        if values.min() < 0:
            raise ValueError(
                f"{self.path}: iteration {iteration} has the count {values.min()}; counts are 0 or "
                "more: another program wrote it, record it again"
            )
        return values


@dataclass(frozen=True, eq=False)
class Recording:
    """A folder that a run wrote; layers of all stages, in the model's order. Read on demand.

    Attributes:
        folder: where.
        stages: its files.
        iterations: Megatron's numbers, from 0, of those that all stages finished.
        num_layers, num_ranks, num_experts: L, R, E.
        notes: sentences on what could not be read.
    """

    folder: Path
    stages: tuple[Stage, ...]
    iterations: tuple[int, ...]
    num_layers: int
    num_ranks: int
    num_experts: int
    notes: tuple[str, ...]

    def read(self, position: int) -> RecordedIteration:
        """Return the iteration at a position of `iterations`."""
        iteration = self.iterations[position]
        values = np.concatenate([stage.read(iteration) for stage in self.stages])
        values_LV = values.reshape(self.num_layers, -1)
        numbers = [number for stage in self.stages for number in stage.numbers]
        values_LV = values_LV[np.argsort(numbers, kind="stable")]
        split = self.num_ranks * self.num_experts
        return RecordedIteration(
            counts_LRE=values_LV[:, :split].reshape(-1, self.num_ranks, self.num_experts),
            loads_LR=values_LV[:, split : split + self.num_ranks],
            replicas_L=values_LV[:, -2],
            copied_kb_L=values_LV[:, -1],
        )


class TraceWriter:
    """Appends frames to one stage's file, after those of the run that this one resumes.

    Raises:
        ValueError: if the folder holds the trace of a model of another shape.
        OSError: if the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        stage: int,
        num_stages: int,
        shapes: Sequence[tuple[int, int]],
        numbers: Sequence[int] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        layers = [list(shape) for shape in shapes]
        facts = {"version": VERSION, "stages": num_stages, "layers": layers}
        header = json.dumps({**facts, "numbers": list(numbers or [0] * len(layers))})
        path = folder / f"trace-stage{stage}.json"
        if path.exists() and path.read_text(encoding="utf-8") != header:
            raise ValueError(
                f"{path} is of a run with other MoE layers or another parallel layout; "
                "give --fssdp-record-trace another folder"
            )
        # Whole or not at all, whenever the job is killed.
        unfinished = path.with_suffix(".partial")
        unfinished.write_text(header, encoding="utf-8")
        unfinished.replace(path)
        path = path.with_suffix(".bin")
        self._file = path.open("ab")
        # A job that was killed may have left a torn frame. Readers would find the next ones after
        # it, but it can never become whole.
        # Without its checksums: a job that resumes must not read all that it ever wrote.
        frames = _index(path, reads_all=False)[0]
        ends = [start + num_bytes for start, num_bytes in frames.values()]
        self._file.truncate(max(ends, default=0))

    def append(
        self,
        iteration: int,
        counts_LRE: Sequence[Int64Array],
        loads_LR: Sequence[Int64Array],
        replicas_L: Sequence[int],
        copied_kb_L: Sequence[int],
    ) -> None:
        """Write one iteration. One write, flushed: a killed job loses nothing before it.

        Raises:
            ValueError: a count is too large for the format.
        """
        parts: list[npt.NDArray[Any]] = []
        for counts, loads, replicas, kb in zip(
            counts_LRE, loads_LR, replicas_L, copied_kb_L, strict=True
        ):
            parts += [counts.ravel(), loads, np.array([replicas, kb])]
        values = np.concatenate(parts)
        if values.max(initial=0) > MOST:
            raise ValueError(f"a count of {values.max()} tokens; the format holds at most {MOST}")
        values = values.astype("<i4")
        # Byte planes: the high bytes are nearly all zero and shrink to nothing.
        planes = np.ascontiguousarray(values.view(np.uint8).reshape(-1, 4).T)
        payload = zlib.compress(planes.tobytes(), level=1)
        crc32 = zlib.crc32(payload, iteration)
        frame = np.array([(MAGIC, iteration, len(payload), crc32)], dtype=FRAME)
        self._file.write(frame.tobytes() + payload)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _index(path: Path, reads_all: bool = True) -> tuple[dict[int, tuple[int, int]], list[str]]:
    """Find the whole frames of a file, and say what is none; `reads_all`: by their checksums."""
    if not path.stat().st_size:
        return {}, []
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = memoryview(data)
    frames: dict[int, tuple[int, int]] = {}
    position = num_skipped = 0
    while position + FRAME.itemsize <= len(view):
        frame = np.frombuffer(view, FRAME, count=1, offset=position)[0]
        start = position + FRAME.itemsize
        end = start + int(frame["num_bytes"])
        is_frame = frame["magic"] == MAGIC and end <= len(view)
        iteration = int(frame["iteration"])
        if is_frame and reads_all:
            is_frame = zlib.crc32(view[start:end], iteration & 0xFFFFFFFF) == frame["crc32"]
        if is_frame:
            frames[iteration] = (start, end - start)
            position = end
            continue
        following = data.find(MAGIC, position + 1)
        if following < 0:
            break
        num_skipped += 1
        position = following
    notes = []
    if num_skipped:
        notes.append(f"{path.name}: {num_skipped} damaged records were left out")
    if position < len(view):
        notes.append(f"{path.name}: its last record is torn and was left out")
    return frames, notes


def _is_header(header: dict[str, Any]) -> bool:
    layers, numbers = header.get("layers"), header.get("numbers")
    if not isinstance(layers, list) or not isinstance(numbers, list):
        return False
    sizes = [size for pair in layers if isinstance(pair, list) for size in pair]
    are_pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in layers)
    are_whole = all(type(each) is int for each in (*sizes, *numbers, header.get("stages")))
    is_like = are_pairs and are_whole and len(numbers) == len(layers)
    return is_like and min(sizes, default=0) > 0 and 0 < header["stages"] <= MOST_STAGES


def _open_stage(header_path: Path) -> Stage:
    try:
        header = json.loads(header_path.read_text(encoding="utf-8"))
        version = header.get("version")
    except (ValueError, RecursionError, AttributeError):
        raise ValueError(f"{header_path} is no header of a trace: no JSON object") from None
    if version != VERSION:
        raise ValueError(f"{header_path} has format {version}; this reads {VERSION}")
    if not _is_header(header):
        raise ValueError(
            f"{header_path} is damaged: 'layers' must be pairs of ranks and experts, one or more, "
            f"'numbers' as many whole numbers, 'stages' one from 1 to {MOST_STAGES}"
        )
    path = header_path.with_suffix(".bin")
    if not path.exists():
        raise ValueError(f"{path} is missing; its header {header_path.name} is there")
    frames, notes = _index(path)
    return Stage(
        path=path,
        layers=tuple((int(ranks), int(experts)) for ranks, experts in header["layers"]),
        numbers=tuple(header["numbers"]),
        num_stages=int(header["stages"]),
        frames=frames,
        notes=tuple(notes),
    )


def _check_stages(folder: Path, stages: Sequence[Stage]) -> None:
    """Refuse a folder that lacks a pipeline stage's file, or has a layer twice.

    A stage without MoE layers writes none: then the run's model.yaml tells as many layers.
    """
    numbers = [number for stage in stages for number in stage.numbers if number]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        raise ValueError(f"{folder} mixes runs: layers {twice} are there twice; use one a run")
    there = {stage.path.stem.removeprefix("trace-stage") for stage in stages}
    missing = [stage for stage in range(stages[0].num_stages) if str(stage) not in there]
    if missing and sum(len(stage.layers) for stage in stages) != _count_moe_layers(folder):
        raise ValueError(
            f"{folder} has {len(stages)} of the run's {stages[0].num_stages} pipeline stages: "
            f"trace-stageP.* are missing for P = {', '.join(map(str, missing))}. Copy them here; "
            "if those stages have no MoE layers, copy the run's model.yaml, which tells"
        )


def _count_moe_layers(folder: Path) -> int | None:
    """Return how many MoE layers the model.yaml of a run tells; None: there is none."""
    path = folder / "model.yaml"
    if not path.is_file():
        return None
    with reading(path):
        args = read_preset(str(path)).args
        return sum(count_parameters(args).is_moe_L) + int(args.get("--mtp-num-layers", 0))


def open_recording(folder: str | Path) -> Recording:
    """Open a folder that a run wrote; the iterations that all its stages finished.

    Raises:
        ValueError: if there is no readable trace, its layers differ in R or E or are there twice,
            or a pipeline stage is missing.
    """
    headers = sorted(Path(folder).glob("trace-stage*.json"))
    if not headers:
        raise ValueError(
            f"{folder} holds no trace (trace-stage*.json); run with --fssdp-record-trace"
        )
    stages = tuple(_open_stage(path) for path in headers)
    counts = sorted({stage.num_stages for stage in stages})
    if len(counts) != 1:
        raise ValueError(f"{folder} mixes runs of {counts} pipeline stages; use one folder a run")
    _check_stages(Path(folder), stages)
    shapes = sorted({shape for stage in stages for shape in stage.layers})
    if len(shapes) != 1:
        raise ValueError(f"{folder}: layers differ in (ranks, experts): {shapes}")
    common = set.intersection(*(set(stage.frames) for stage in stages))
    if not common:
        raise ValueError(f"{folder} holds no iteration that all its stages finished")
    num_ranks, num_experts = shapes[0]
    return Recording(
        folder=Path(folder),
        stages=stages,
        iterations=tuple(sorted(common)),
        num_layers=sum(len(stage.layers) for stage in stages),
        num_ranks=num_ranks,
        num_experts=num_experts,
        notes=tuple(note for stage in stages for note in stage.notes),
    )


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """All iterations of a recording at once.

    Attributes:
        iterations: (I,) int32.
        counts_ILRE, loads_ILR, replicas_IL, copied_kb_IL: as `RecordedIteration`, stacked.
    """

    iterations: Int32Array
    counts_ILRE: Int32Array
    loads_ILR: Int32Array
    replicas_IL: Int32Array
    copied_kb_IL: Int32Array

    def imbalance_IL(self) -> npt.NDArray[np.float64]:
        """(I, L) tokens of the fullest rank over the mean."""
        imbalance: npt.NDArray[np.float64] = self.loads_ILR.max(axis=2) / np.maximum(
            self.loads_ILR.mean(axis=2), 1e-9
        )
        return imbalance


def read_recording(folder: str | Path) -> RecordedRun:
    """Read a whole folder into memory. See `open_recording`."""
    recording = open_recording(folder)
    every = [recording.read(position) for position in range(len(recording.iterations))]
    return RecordedRun(
        iterations=np.array(recording.iterations, dtype=np.int32),
        counts_ILRE=np.stack([each.counts_LRE for each in every]),
        loads_ILR=np.stack([each.loads_LR for each in every]),
        replicas_IL=np.stack([each.replicas_L for each in every]),
        copied_kb_IL=np.stack([each.copied_kb_L for each in every]),
    )

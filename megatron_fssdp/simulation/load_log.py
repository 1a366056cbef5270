# SPDX-License-Identifier: Apache-2.0

"""The load log: what every iteration routed, in append-only files that numpy alone can read.

A folder has one pair of files per pipeline stage that owns MoE layers:

    loads-stageP.json   the header: format version, pipeline stages of the run, and for each layer
                        its R and E
    loads-stageP.bin    records of equal size, one an iteration, all int32: the iteration, then
                        for each layer: counts (R * E), loads (R), replicas, copied KB

A killed job leaves at most one torn record at the end, which readers ignore.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

VERSION = 1

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class LoadLog:
    """A run's recorded loads; layers of all stages that have the same R and E, in stage order.

    Attributes:
        iterations: (I,) int32, Megatron's iteration numbers, from 0. A run that resumed from an
            older checkpoint repeats some.
        counts_ILRE: (I, L, R, E) int32, tokens by source rank and expert.
        loads_ILR: (I, L, R) int32, tokens that each rank computed.
        replicas_IL: (I, L) int32, replicas in use.
        copied_kb_IL: (I, L) int32, kilobytes (1000 bytes) of parameters fetched by replicas.
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


class LoadLogWriter:
    """Appends records to one stage's files, after those of the run that this one resumes.

    Raises:
        ValueError: if the folder holds the log of a model of another shape.
        OSError: if the folder cannot be written.
    """

    def __init__(
        self, folder: Path, stage: int, num_stages: int, shapes: Sequence[tuple[int, int]]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        layers = [list(shape) for shape in shapes]
        header = json.dumps({"version": VERSION, "stages": num_stages, "layers": layers})
        path = folder / f"loads-stage{stage}.json"
        if path.exists() and path.read_text(encoding="utf-8") != header:
            raise ValueError(
                f"{path} is of a run with other MoE layers or another parallel layout; "
                "give --fssdp-load-log another folder"
            )
        path.write_text(header, encoding="utf-8")
        self._file = path.with_suffix(".bin").open("ab")
        # A job that was killed may have left a torn record, which must not shift the next ones.
        size = 4 * record_size(shapes)
        self._file.truncate(self._file.tell() // size * size)

    def append(
        self,
        iteration: int,
        counts_LRE: Sequence[npt.NDArray[np.int64]],
        loads_LR: Sequence[npt.NDArray[np.int64]],
        replicas_L: Sequence[int],
        copied_kb_L: Sequence[int],
    ) -> None:
        """Write one iteration. One write, flushed: a killed job loses nothing before it."""
        parts: list[npt.NDArray[np.int32]] = [np.array([iteration], dtype=np.int32)]
        for counts, loads, replicas, kb in zip(
            counts_LRE, loads_LR, replicas_L, copied_kb_L, strict=True
        ):
            parts += [counts.ravel().astype(np.int32), loads.astype(np.int32)]
            parts.append(np.array([replicas, kb], dtype=np.int32))
        self._file.write(np.concatenate(parts).tobytes())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def record_size(shapes: Sequence[tuple[int, int]]) -> int:
    """Return the int32 numbers of one record, for layers of these (ranks, experts)."""
    return 1 + sum(ranks * experts + ranks + 2 for ranks, experts in shapes)


def read_load_log(folder: str | Path) -> LoadLog:
    """Read a folder that a run wrote; the iterations that all its stages finished.

    Raises:
        ValueError: if there is no readable log, or its layers differ in R or E.
    """
    headers = sorted(Path(folder).glob("loads-stage*.json"))
    if not headers:
        raise ValueError(
            f"{folder} holds no load log (loads-stage*.json); run with --fssdp-load-log"
        )
    shapes: list[tuple[int, int]] = []
    stages = set()
    records = []
    for path in headers:
        header = json.loads(path.read_text(encoding="utf-8"))
        if header.get("version") != VERSION:
            raise ValueError(f"{path} has format {header.get('version')}; this reads {VERSION}")
        stages.add(header["stages"])
        stage_shapes = [(int(ranks), int(experts)) for ranks, experts in header["layers"]]
        size = record_size(stage_shapes)
        values = np.fromfile(path.with_suffix(".bin"), dtype=np.int32)
        records.append(values[: len(values) // size * size].reshape(-1, size))
        shapes += stage_shapes
    if len(stages) != 1:
        raise ValueError(
            f"{folder} mixes runs of {sorted(stages)} pipeline stages; use one folder a run"
        )
    if len(set(shapes)) != 1:
        raise ValueError(f"{folder}: layers differ in (ranks, experts): {sorted(set(shapes))}")
    ranks, experts = shapes[0]
    num = min(len(record) for record in records)
    layers = np.concatenate([record[:num, 1:] for record in records], axis=1)
    layers = layers.reshape(num, len(shapes), -1)
    split = ranks * experts
    return LoadLog(
        iterations=records[0][:num, 0],
        counts_ILRE=layers[:, :, :split].reshape(num, len(shapes), ranks, experts),
        loads_ILR=layers[:, :, split : split + ranks],
        replicas_IL=layers[:, :, -2],
        copied_kb_IL=layers[:, :, -1],
    )

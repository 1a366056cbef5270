# SPDX-License-Identifier: Apache-2.0

"""Traces: how many tokens each source rank routed to each expert, by iteration and layer.

`open_trace` reads what --fssdp-record-trace wrote, Megatron's own router trace, the dumps of vLLM
and SGLang, and plain counts (`simulation/importers.py` has the formats). `write_trace` writes any
of them in the recorded format (`simulation/recording.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from megatron_fssdp.simulation import importers
from megatron_fssdp.simulation.recording import (
    Int64Array,
    Recording,
    TraceWriter,
    open_recording,
)


@dataclass(frozen=True, eq=False)
class Trace:
    """Token counts, read an iteration at a time.

    Attributes:
        source: where they are from, for messages.
        iterations: the iterations' numbers in the run; some may be missing.
        num_layers, num_ranks, num_experts: L, R (source ranks), E.
        notes: sentences on what could not be read, and what had to be assumed.
        read: returns the counts at a position. Other processes get it too, so it is no closure.
    """

    source: str
    iterations: tuple[int, ...]
    num_layers: int
    num_ranks: int
    num_experts: int
    notes: tuple[str, ...]
    read: Callable[[int], Int64Array]

    @property
    def num_iterations(self) -> int:
        """How many iterations it has."""
        return len(self.iterations)

    def counts(self, iteration: int) -> Int64Array:
        """Return the counts at a position, 0 to num_iterations - 1: (L, R, E) int64."""
        return self.read(iteration)

    def with_ranks(self, num_ranks: int) -> Trace:
        """Return the same loads from another number of source ranks.

        The tokens of each expert are dealt out evenly, so that a rank's own taste is lost.
        """
        if num_ranks == self.num_ranks:
            return self
        note = f"{self.num_ranks} source ranks were made {num_ranks}: every one routes alike"
        return replace(
            self,
            num_ranks=num_ranks,
            notes=(*self.notes, note),
            read=partial(_deal, self.read, num_ranks),
        )

    @classmethod
    def of(cls, counts_ILRE: Int64Array, source: str, notes: tuple[str, ...] = ()) -> Trace:
        """Make a trace of (I, L, R, E) counts in memory."""
        counts_ILRE = np.asarray(counts_ILRE)
        num_iterations, num_layers, num_ranks, num_experts = counts_ILRE.shape
        return cls(
            source=source,
            iterations=tuple(range(num_iterations)),
            num_layers=num_layers,
            num_ranks=num_ranks,
            num_experts=num_experts,
            notes=notes,
            read=partial(_pick, counts_ILRE),
        )


def _pick(counts_ILRE: Int64Array, position: int) -> Int64Array:
    counts_LRE: Int64Array = counts_ILRE[position].astype(np.int64)
    return counts_LRE


def _deal(read: Callable[[int], Int64Array], num_ranks: int, position: int) -> Int64Array:
    dealt_LRE: Int64Array = importers.deal(read(position).sum(axis=1), num_ranks)
    return dealt_LRE


def _recorded(recording: Recording, position: int) -> Int64Array:
    return recording.read(position).counts_LRE.astype(np.int64)


def open_trace(
    path: str | Path, num_ranks: int | None = None, num_experts: int | None = None
) -> Trace:
    """Open a trace of any known format.

    Args:
        path: a folder or file.
        num_ranks: R, where the file does not tell tokens' source ranks (they are dealt out evenly).
        num_experts: E, where the file names chosen experts only (default: the highest, plus one).

    Raises:
        ValueError: if nothing of it can be read, or it counts no token; the message says what was
            expected.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a trace's folder or file")
    if path.is_dir() and any(path.glob("trace-stage*.json")):
        recording = open_recording(path)
        trace = Trace(
            source=str(path),
            iterations=recording.iterations,
            num_layers=recording.num_layers,
            num_ranks=recording.num_ranks,
            num_experts=recording.num_experts,
            notes=recording.notes,
            read=partial(_recorded, recording),
        )
    else:
        counts_ILRE, notes = importers.read_foreign(path, num_ranks or 1, num_experts)
        trace = Trace.of(counts_ILRE, str(path), tuple(notes))
    # Ends at the first iteration that has some.
    if not any(trace.counts(position).any() for position in range(trace.num_iterations)):
        raise ValueError(f"{path} counts no token in any iteration; record or make another")
    return trace if num_ranks is None else trace.with_ranks(num_ranks)


def owned_loads(counts_LRE: Int64Array) -> Int64Array:
    """Return (L, R) int64: the tokens that each rank computes where experts stay as EP puts them.

    Expert e of E is on rank e * R // E, as Megatron has it.
    """
    _, num_ranks, num_experts = counts_LRE.shape
    owner_E = np.arange(num_experts) * num_ranks // num_experts
    owns_ER = np.eye(num_ranks, dtype=np.int64)[owner_E]
    loads_LR: Int64Array = counts_LRE.sum(axis=1) @ owns_ER
    return loads_LR


def write_trace(trace: Trace, folder: str | Path) -> None:
    """Write a trace in the recorded format, as plain EP would have recorded it.

    Raises:
        ValueError: if there is a trace already, or a count is too large. Then nothing is left.
    """
    folder = Path(folder)
    if any(folder.glob("trace-stage*")):
        raise ValueError(f"{folder} holds a trace already; give another folder")
    shapes = [(trace.num_ranks, trace.num_experts)] * trace.num_layers
    writer = TraceWriter(folder, 0, 1, shapes, range(1, trace.num_layers + 1))
    nothing = [0] * trace.num_layers
    try:
        for position, iteration in enumerate(trace.iterations):
            counts_LRE = trace.counts(position)
            loads_LR = owned_loads(counts_LRE)
            writer.append(iteration, list(counts_LRE), list(loads_LR), nothing, nothing)
    except ValueError:
        # Half a trace would read as a whole one.
        for path in folder.glob("trace-stage0.*"):
            path.unlink()
        raise
    finally:
        writer.close()

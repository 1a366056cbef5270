# SPDX-License-Identifier: Apache-2.0

"""What a simulation found, or a training run measured: plain data, and its JSON form.

Shape letters: I iterations, L MoE layers (of all pipeline stages, in the model's order), R ranks of
the loads' matrix (those of one expert-parallel group a layer), W ranks of the world.

Seconds are of one iteration, bytes of one rank, unless a name says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FORMAT = "fssdp-result"
VERSION = 1

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

PERCENTILES = (5, 50, 95, 99)

# What a rank's iteration is made of. Means over the ranks; they add up to the iteration.
PARTS = (
    "attention",  # and everything else that is computed outside the experts
    "experts",  # the experts' products
    "planning",  # counts, quotas and the plan, as far as they are waited for
    "tokens",  # dispatch and combine
    # spAG and spRS (or what a system has in their place) that is waited for, or that slows what
    # hides it
    "copies",
    "reduction",  # data-parallel gradients and parameters that are waited for
    "moves",  # experts on their way to new owners
    "straggling",  # waiting for the fullest rank of a layer
    "bubble",  # waiting for other pipeline stages
    "optimizer",  # and passes over gradient buffers
)

# Parts of a rank's memory.
MEMORY_PARTS = (
    "dense parameters",
    "dense gradients",
    "dense optimizer",
    "expert parameters",
    "expert gradients",
    "expert optimizer",
    "replicas",  # parameters and gradients in replica slots
    "activations",
    "moves",  # what is in flight when experts move
)

Stream = Literal["compute", "copies", "tokens", "reduction"]
Phase = Literal["forward", "backward", "step"]


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """Something that a rank does in an iteration.

    Attributes:
        name: "attention", "gate", "spAG", "dispatch", "experts", "combine", "spRS", "reduction",
            "optimizer", "moves", "wait", "copying" by cores that compute; a system may have names
            of its own.
        rank: in the world.
        stream: what it keeps busy.
        start_s: since the iteration began.
        duration_s: of the event.
        layer: number of the MoE layer, from 0; None: of no layer.
        phase: of the iteration.
        micro_batch: number, from 0; None: of none.
    """

    name: str
    rank: int
    stream: Stream
    start_s: float
    duration_s: float
    layer: int | None = None
    phase: Phase = "forward"
    micro_batch: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class SystemResult:
    """What one system does on the trace.

    Attributes:
        name: "ep", "fssdp", ...
        title: for people, "FSSDP (this project)".
        iteration_s: (I,) seconds of each iteration.
        parts_s: for each of `PARTS` that there is, (I,) seconds, mean over ranks; their sum is
            `iteration_s`. Empty where nobody knows.
        exposed_s: (I,) seconds by which communication made computation longer or wait, mean over
            ranks.
        straggler_IL: (I, L) tokens of the layer's fullest rank over the mean, as it ran.
        loads_LR: (L, R) tokens that each rank computed, mean over iterations.
        replicas_I: (I,) replicas of all layers of an expert-parallel group.
        copied_bytes_I: (I,) bytes of weights and gradients of replicas, that all ranks of an
            expert-parallel group send.
        far_bytes_I: (I,) bytes that cross between nodes, tokens and replicas, the same.
        moved_I: (I,) experts that changed owners before the iteration.
        memory_bytes: for each of `MEMORY_PARTS` that there is, (W,) bytes of each rank at its
            peak; (1,) if all ranks are alike. Empty where nobody knows.
        timelines: iteration -> its events, for the iterations that were asked for.
        notes: what a reader must know about how this system was modelled.
    """

    name: str
    title: str
    iteration_s: Float64Array
    straggler_IL: Float64Array
    loads_LR: Float64Array
    exposed_s: Float64Array
    parts_s: Mapping[str, Float64Array] = field(default_factory=dict)
    replicas_I: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    copied_bytes_I: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    far_bytes_I: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    moved_I: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    memory_bytes: Mapping[str, Int64Array] = field(default_factory=dict)
    timelines: Mapping[int, tuple[TimelineEvent, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def mean_s(self) -> float:
        """Mean seconds of an iteration."""
        return float(self.iteration_s.mean())

    def percentiles_s(self) -> dict[int, float]:
        """Return the `PERCENTILES` of the iterations' seconds."""
        values = np.percentile(self.iteration_s, PERCENTILES)
        return dict(zip(PERCENTILES, values.tolist(), strict=True))

    @property
    def peak_bytes(self) -> int | None:
        """Memory of the fullest rank; None where nobody knows."""
        if not self.memory_bytes:
            return None
        return int(np.max(sum(np.asarray(part) for part in self.memory_bytes.values())))

    @property
    def peak_parts(self) -> dict[str, int]:
        """The parts of the fullest rank's memory."""
        if not self.memory_bytes:
            return {}
        total = np.asarray(sum(np.asarray(part) for part in self.memory_bytes.values()))
        at = int(total.argmax())
        return {
            name: int(part[at if len(part) > 1 else 0]) for name, part in self.memory_bytes.items()
        }

    def summary(self) -> dict[str, Any]:
        """Return the figures of a table's row, as plain numbers."""
        return {
            "mean_s": self.mean_s,
            "percentiles_s": {str(key): value for key, value in self.percentiles_s().items()},
            "exposed_s": float(self.exposed_s.mean()) if self.exposed_s.size else None,
            "straggler_mean": float(self.straggler_IL.mean()) if self.straggler_IL.size else None,
            "straggler_max": float(self.straggler_IL.max()) if self.straggler_IL.size else None,
            "peak_bytes": self.peak_bytes,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """All systems on one model, cluster and trace.

    Attributes:
        source: "simulated" or "measured"; every picture and table says which.
        model, cluster, trace: names, for titles.
        num_ranks: W, of the world.
        num_nodes: nodes of the world.
        layout: parallel sizes, {"tp": 1, "pp": 8, "ep": 64, ...}, and the micro-batches.
        iterations: (I,) numbers of the iterations in the trace.
        layers: (L,) numbers of the MoE layers in the model, from 1.
        owner_straggler_IL: (I, L) tokens of the fullest rank over the mean if every expert is
            computed by its owner under even ownership: the "before" of every system.
        owner_loads_LR: (L, R) tokens of each rank under the same, mean over iterations.
        systems: in the order in which they were asked for.
        notes: what a reader must know: how the trace was spread over ranks, what is assumed.
    """

    source: Literal["simulated", "measured"]
    model: str
    cluster: str
    trace: str
    num_ranks: int
    num_nodes: int
    iterations: Int64Array
    layers: Int64Array
    owner_straggler_IL: Float64Array
    owner_loads_LR: Float64Array
    systems: tuple[SystemResult, ...]
    layout: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def system(self, name: str) -> SystemResult:
        """Return a system's result.

        Raises:
            KeyError: if it is not there; the message says which are.
        """
        for each in self.systems:
            if each.name == name:
                return each
        raise KeyError(f"no system {name!r} here; there are {[s.name for s in self.systems]}")

    def speed_up(self, name: str, over: str = "ep") -> float:
        """Return the mean iteration of `over` divided by that of `name`."""
        return self.system(over).mean_s / self.system(name).mean_s

    def to_json(self) -> str:
        """Return the result as JSON; `summary` of each system is for readers, not read back."""
        values = {"format": FORMAT, "version": VERSION, **_plain(self)}
        for system, mapping in zip(self.systems, values["systems"], strict=True):
            mapping["summary"] = system.summary()
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Read what `to_json` wrote.

        Raises:
            ValueError: if it is something else, or of another version.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is no JSON: {error}") from None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f'this is no result file: its "format" is not "{FORMAT}"')
        if values.get("version") != VERSION:
            raise ValueError(
                f"the result file has version {values.get('version')}, this program reads "
                f"{VERSION}; write it again with `fssdp simulate --json`"
            )
        systems = []
        for mapping in values["systems"]:
            timelines = {
                int(iteration): tuple(TimelineEvent(**event) for event in events)
                for iteration, events in mapping["timelines"].items()
            }
            systems.append(
                SystemResult(**_arrays(SystemResult, mapping | {"timelines": timelines}))
            )
        return cls(**_arrays(cls, values | {"systems": tuple(systems)}))


def write_result(path: str | Path, result: Result) -> None:
    """Write a result file."""
    Path(path).write_text(result.to_json(), encoding="utf-8")


def read_result(path: str | Path) -> Result:
    """Read a result file.

    Raises:
        ValueError: if it is none; the message names the file.
    """
    try:
        return Result.from_json(Path(path).read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _plain(value: Any) -> Any:
    """Turn dataclasses, arrays and mappings into what JSON has."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return value


# Numbers of dimensions, so that empty arrays keep theirs; and the types that are not float64.
_MATRICES = ("straggler_IL", "loads_LR", "owner_straggler_IL", "owner_loads_LR")
_WHOLE = ("replicas_I", "copied_bytes_I", "far_bytes_I", "moved_I", "iterations", "layers")
_REAL = ("iteration_s", "exposed_s")


def _arrays(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn lists back into what the dataclass's fields are."""
    found: dict[str, Any] = {}
    for each in fields(cls):
        if each.name not in values:
            continue
        value = values[each.name]
        if each.name in _MATRICES:
            value = np.array(value, dtype=np.float64)
            value = value if value.ndim == 2 else value.reshape(len(value), 0)
        elif each.name in _WHOLE:
            value = np.array(value, dtype=np.int64)
        elif each.name in _REAL:
            value = np.array(value, dtype=np.float64)
        elif each.name == "parts_s":
            value = {key: np.array(part, dtype=np.float64) for key, part in value.items()}
        elif each.name == "memory_bytes":
            value = {key: np.array(part, dtype=np.int64) for key, part in value.items()}
        elif each.name == "notes":
            value = tuple(value)
        found[each.name] = value
    return found

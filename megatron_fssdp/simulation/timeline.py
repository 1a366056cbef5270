# SPDX-License-Identifier: Apache-2.0

"""The events of an iteration, of some ranks, and their form for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megatron_fssdp.simulation.costs import Costs
from megatron_fssdp.simulation.layers import BACKWARD, Clock
from megatron_fssdp.simulation.passes import BACK, FIRST, LAST, MIDDLE, Passes
from megatron_fssdp.simulation.pipeline import Scheduled
from megatron_fssdp.simulation.result import Phase, Result, TimelineEvent

# Worlds up to this size are shown whole; of larger ones, each stage's fullest and emptiest rank.
MOST_RANKS = 16
# Of more micro-batches than this the first and the last are shown, half of it each.
MOST_MICRO_BATCHES = 8
STREAMS = ("compute", "tokens", "copies", "reduction")


def build_timeline(
    costs: Costs, stages: Sequence[Passes], scheduled: Scheduled, move_s: float
) -> tuple[TimelineEvent, ...]:
    """Place the recorded spans of an iteration in time, for the first group of each stage.

    Args:
        costs: of the job.
        stages: recorded passes.
        scheduled: when each stage begins what, of one case.
        move_s: seconds that experts moved before.
    """
    layout = costs.job.layout
    micro = layout.num_microbatches
    events: list[TimelineEvent] = []
    first_layer = 0
    for stage, passes in enumerate(stages):
        ranks = _shown(costs, stage, passes)
        places = dict.fromkeys(passes.layers, None) | {
            number: first_layer + index for index, number in enumerate(costs.moe_layers_of(stage))
        }
        first_layer += len(costs.moe_layers_of(stage))
        for index in _shown_micro_batches(micro):
            begin = move_s + float(scheduled.forward_SMK[stage, index, 0])
            kind = FIRST if index == 0 else MIDDLE
            events += _pass_events(passes, kind, begin, index, ranks, places)
            begin = move_s + float(scheduled.backward_SMK[stage, index, 0])
            kind = LAST if index == micro - 1 else BACK
            events += _pass_events(passes, kind, begin, index, ranks, places)
        end = move_s + float(scheduled.end_SK[stage, 0])
        events += _step_events(costs, passes, stage, end, ranks, move_s)
    return tuple(sorted(events, key=lambda each: (each.rank, each.stream, each.start_s)))


def _shown(costs: Costs, stage: int, passes: Passes) -> list[tuple[int, int]]:
    """Return (rank in the world, rank in the group) of the ranks to show."""
    layout = costs.job.layout
    first = stage * layout.ranks_per_stage
    positions = list(range(layout.ep))
    if layout.num_ranks > MOST_RANKS:
        busy_R = np.zeros(layout.ep)
        for clock in passes.clocks[FIRST]:
            if clock is not None:
                for span in clock.spans:
                    busy_R += span.duration_R if span.name == "experts" else 0.0
        positions = sorted({int(busy_R.argmax()), int(busy_R.argmin())})
    return [(first + position * layout.etp, position) for position in positions]


def _shown_micro_batches(number: int) -> list[int]:
    ends = MOST_MICRO_BATCHES // 2
    return [at for at in range(number) if at < ends or at >= max(number - ends, ends)]


def _pass_events(
    passes: Passes,
    kind: int,
    begin: float,
    micro_batch: int,
    ranks: list[tuple[int, int]],
    places: dict[int, int | None],
) -> Iterable[TimelineEvent]:
    is_forward = kind in (FIRST, MIDDLE)
    phase: Phase = "forward" if is_forward else "backward"
    common: dict[str, Any] = {"phase": phase, "micro_batch": micro_batch}
    seconds = passes.layer_s(kind)
    head_s = passes.head_s * (1.0 if is_forward else BACKWARD)
    if head_s and not is_forward:
        yield from _same("output", ranks, begin, head_s, common)
        begin += head_s
    order = range(len(seconds)) if is_forward else reversed(range(len(seconds)))
    for position in order:
        clock = passes.clocks[kind][position]
        layer = common | {"layer": places[passes.layers[position]]}
        if clock is None:
            yield from _same("dense layer", ranks, begin, seconds[position], layer)
        else:
            yield from _clock_events(clock, ranks, begin, layer)
        begin += seconds[position]
    if head_s and is_forward:
        yield from _same("output", ranks, begin, head_s, common)


def _clock_events(
    clock: Clock, ranks: list[tuple[int, int]], begin: float, common: dict[str, Any]
) -> Iterable[TimelineEvent]:
    for span in clock.spans:
        for rank, position in ranks:
            duration = float(span.duration_R[position])
            if duration > 0:
                start = max(begin + float(span.start_R[position]), 0.0)
                yield TimelineEvent(
                    name=span.name,
                    rank=rank,
                    stream=span.stream,
                    start_s=start,
                    duration_s=duration,
                    **common,
                )


def _same(
    name: str, ranks: list[tuple[int, int]], start: float, seconds: float, common: dict[str, Any]
) -> Iterable[TimelineEvent]:
    for rank, _ in ranks:
        yield TimelineEvent(
            name=name, rank=rank, stream="compute", start_s=start, duration_s=seconds, **common
        )


def _step_events(
    costs: Costs,
    passes: Passes,
    stage: int,
    end: float,
    ranks: list[tuple[int, int]],
    move_s: float,
) -> Iterable[TimelineEvent]:
    """The step's: moves before, the reduction's exposed part and the optimizer after."""
    exposed_s, optimizer_s = passes.exposed_reduction_s(costs, stage), costs.step_s(stage)
    for rank, _ in ranks:
        for name, stream, start, seconds in (
            ("moves", "copies", 0.0, move_s),
            ("reduction", "reduction", end, exposed_s),
            ("optimizer", "compute", end + exposed_s, optimizer_s),
        ):
            if seconds > 0:
                yield TimelineEvent(
                    name=name,
                    rank=rank,
                    stream=stream,  # type: ignore[arg-type]
                    start_s=start,
                    duration_s=seconds,
                    phase="step",
                )


def chrome_trace(result: Result) -> str:
    """Return all timelines of a result in the Trace Event Format, for Perfetto.

    A process is a rank under one system and iteration, a thread one of its streams. Times are in
    microseconds. Format: "Trace Event Format" (Google), complete events (ph X) and metadata (ph M).
    """
    events: list[dict[str, Any]] = []
    process = 0
    for system in result.systems:
        for iteration, timeline in system.timelines.items():
            by_rank: dict[int, list[TimelineEvent]] = {}
            for event in timeline:
                by_rank.setdefault(event.rank, []).append(event)
            for rank, mine in sorted(by_rank.items()):
                name = f"{system.name}, iteration {iteration}, rank {rank}"
                events += _names(process, name)
                events += [_complete(process, event) for event in mine]
                process += 1
    other = {"model": result.model, "cluster": result.cluster, "source": result.source}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _names(process: int, name: str) -> list[dict[str, Any]]:
    found = [_metadata(process, 0, "process_name", {"name": name})]
    found.append(_metadata(process, 0, "process_sort_index", {"sort_index": process}))
    for thread, stream in enumerate(STREAMS):
        found.append(_metadata(process, thread, "thread_name", {"name": stream}))
        found.append(_metadata(process, thread, "thread_sort_index", {"sort_index": thread}))
    return found


def _metadata(process: int, thread: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": name, "args": args}


def _complete(process: int, event: TimelineEvent) -> dict[str, Any]:
    args = {"phase": event.phase, "layer": event.layer, "micro_batch": event.micro_batch}
    return {
        "ph": "X",
        "pid": process,
        "tid": STREAMS.index(event.stream),
        "name": event.name,
        "cat": event.phase,
        "ts": event.start_s * 1e6,
        "dur": event.duration_s * 1e6,
        "args": {key: value for key, value in args.items() if value is not None},
    }

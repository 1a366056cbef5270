# SPDX-License-Identifier: Apache-2.0

"""The report's timeline: what some ranks do in one iteration, stream by stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from megatron_fssdp.simulation.report.figures import PART_COLORS
from megatron_fssdp.simulation.report.svg import WIDE, Picture, draw
from megatron_fssdp.simulation.result import SystemResult, TimelineEvent

EVENT_COLORS = {
    "attention": PART_COLORS["attention"],
    "gate": PART_COLORS["planning"],
    "experts": PART_COLORS["experts"],
    "dispatch": PART_COLORS["tokens"],
    "combine": "#f0c987",
    "spAG": PART_COLORS["copies"],
    "spRS": "#b35309",
    "copying": "#b35309",
    "reduction": PART_COLORS["reduction"],
    "moves": PART_COLORS["moves"],
    "optimizer": PART_COLORS["optimizer"],
    "wait": PART_COLORS["straggling"],
}
OTHER_COLOR = "#9a9a9a"
# Beyond it a vector drawing gets slow to open; the picture is dots then.
MOST_SHAPES = 1500
STREAMS = ("compute", "tokens", "copies", "reduction")


def timeline(system: SystemResult) -> Picture | None:
    """Draw the iteration whose events the result has; the fullest rank and two others."""
    if not system.timelines:
        return None
    iteration, events = next(iter(sorted(system.timelines.items())))
    events = tuple(event for event in events if event.duration_s > 0)
    if not events:
        return None
    return _picture(
        f"One iteration, {system.name}",
        f"Iteration {iteration} of {system.title}.",
        _of_some_ranks(events),
    )


def close_up(system: SystemResult) -> Picture | None:
    """Draw two layers of the same iteration and pipeline stage, forward, where there are more."""
    if not system.timelines:
        return None
    iteration, events = next(iter(sorted(system.timelines.items())))
    micro = min((event.micro_batch for event in events if event.micro_batch is not None), default=0)
    ranks = {
        rank: [
            event
            for event in of_rank
            if event.phase == "forward" and event.micro_batch in (None, micro)
        ]
        for rank, of_rank in _of_some_ranks(events).items()
    }
    layers = _layers(next(iter(ranks.values()), []))
    if len(layers) < 3:
        return None
    middle = layers[len(layers) // 2 - 1 : len(layers) // 2 + 1]
    near = {
        rank: [event for event in of_rank if event.layer in middle and event.duration_s > 0]
        for rank, of_rank in ranks.items()
    }
    return _picture(
        f"Close-up: MoE layers {middle[0] + 1} and {middle[1] + 1}, forward, {system.name}",
        f"Two MoE layers of iteration {iteration}, forward, of {system.title}.",
        near,
    )


def _layers(events: Sequence[TimelineEvent]) -> list[int]:
    return sorted({event.layer for event in events if event.layer is not None})


def _of_some_ranks(events: Sequence[TimelineEvent]) -> dict[int, list[TimelineEvent]]:
    """Choose the rank that computes longest, and of its stage one between and the shortest."""
    by_rank: dict[int, list[TimelineEvent]] = defaultdict(list)
    for event in events:
        by_rank[event.rank].append(event)
    busy_s = {
        rank: sum(event.duration_s for event in of_rank if event.name == "experts")
        for rank, of_rank in by_rank.items()
    }
    by_load = sorted(busy_s, key=lambda rank: (-busy_s[rank], rank))
    stage = [rank for rank in by_load if _layers(by_rank[rank]) == _layers(by_rank[by_load[0]])]
    last = len(stage) - 1
    chosen = list(dict.fromkeys([stage[0], stage[last // 2], stage[last]]))
    return {rank: by_rank[rank] for rank in chosen}


def _picture(title: str, told: str, ranks: dict[int, list[TimelineEvent]]) -> Picture:
    every = [event for events in ranks.values() for event in events]
    start_s = min(event.start_s for event in every)
    names = [name for name in EVENT_COLORS if any(event.name == name for event in every)]
    names += sorted({event.name for event in every} - set(names))
    rows = [
        (rank, stream)
        for rank, events in ranks.items()
        for stream in STREAMS
        if any(event.stream == stream for event in events)
    ]

    def paint(figure: Figure, narrow: bool) -> None:
        axis = figure.add_subplot()
        axis.grid(axis="y", visible=False)
        for place, (rank, stream) in enumerate(rows):
            for name in names:
                spans = [
                    (1e3 * (event.start_s - start_s), 1e3 * event.duration_s)
                    for event in ranks[rank]
                    if event.stream == stream and event.name == name
                ]
                axis.broken_barh(
                    spans,
                    (place - 0.38, 0.76),
                    color=EVENT_COLORS.get(name, OTHER_COLOR),
                    linewidth=0,
                    rasterized=len(every) > MOST_SHAPES,
                )
        labels = [
            f"{rank}: {stream}" if narrow else f"rank {rank}: {stream}" for rank, stream in rows
        ]
        axis.set_yticks(range(len(rows)), labels)
        axis.invert_yaxis()
        axis.xaxis.set_major_locator(MaxNLocator(4 if narrow else 10))
        axis.set_xlabel("milliseconds")
        patches = [Patch(color=EVENT_COLORS.get(name, OTHER_COLOR), label=name) for name in names]
        figure.legend(handles=patches, loc="outside lower center", ncols=3 if narrow else 11)

    height = 90 + 22 * len(rows)
    end_s = max(event.start_s + event.duration_s for event in every)
    names_of = ", ".join(map(str, ranks))
    alt = f"{told} Streams of ranks {names_of} over {1e3 * (end_s - start_s):.1f} ms."
    wide, narrow = draw(paint, WIDE, (height + 20, height + 20 * -(-len(names) // 3)), alt)
    busy: dict[tuple[int, str], float] = defaultdict(float)
    for event in every:
        busy[event.rank, event.name] += event.duration_s
    table = (
        ("milliseconds", *(f"rank {rank}" for rank in ranks)),
        *((name, *(f"{1e3 * busy[rank, name]:.2f}" for rank in ranks)) for name in names),
    )
    caption = (
        "Ranks of one pipeline stage, the one with the most tokens first, the fewest last. "
        "Bars under each other run at the same time; gaps are waiting."
    )
    return Picture(title, alt, wide, narrow, caption, table=table)

# SPDX-License-Identifier: Apache-2.0

"""The report's figures. Each function returns a `Picture`, or None where the result lacks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_fssdp.simulation.report.svg import HALF, INK, WIDE, Picture, draw
from megatron_fssdp.simulation.report.words import gigabytes, seconds
from megatron_fssdp.simulation.result import MEMORY_PARTS, PARTS, Float64Array, Result, SystemResult

# Computation is blue and green, communication orange, waiting red. Seen well on light and dark.
PART_COLORS = dict(
    zip(
        PARTS,
        ("#5b8fc7", "#2563a8", "#8f6bb8", "#e3a83f", "#d97b1f", "#a8641f", "#7d4a2a",
         "#cf4436", "#e79a92", "#5f9e6e"),
        strict=True,
    )
)  # fmt: skip
MEMORY_COLORS = dict(
    zip(
        MEMORY_PARTS,
        ("#9bb8d9", "#7599c4", "#4d77a8", "#e3a83f", "#d98e2f", "#b8701f", "#cf4436",
         "#5f9e6e", "#7d4a2a"),
        strict=True,
    )
)  # fmt: skip
SYSTEM_COLORS = {"ep": "#8a8f98", "fssdp": "#1f7a8c"}
OTHER_COLORS = ("#c48f2c", "#8f6bb8", "#5f9e6e", "#b85c5c", "#7d7d33", "#a8641f", "#5b8fc7")


def system_colors(names: Sequence[str]) -> dict[str, str]:
    """Give each system a color; plain EP and FSSDP always have theirs."""
    others = [name for name in names if name not in SYSTEM_COLORS]
    return {
        name: SYSTEM_COLORS.get(name) or OTHER_COLORS[others.index(name) % len(OTHER_COLORS)]
        for name in names
    }


def _stacked(
    title: str,
    alt: str,
    caption: str,
    unit: str,
    rows: Mapping[str, Mapping[str, float]],
    colors: Mapping[str, str],
) -> Picture:
    """Draw a horizontal bar for each row, made of parts."""
    parts = [part for part in colors if any(row.get(part, 0) > 0 for row in rows.values())]

    def paint(figure: Figure, narrow: bool) -> None:
        axis = figure.add_subplot()
        axis.grid(axis="y", visible=False)
        left = np.zeros(len(rows))
        for part in parts:
            values = np.array([row.get(part, 0.0) for row in rows.values()])
            axis.barh(list(rows), values, left=left, color=colors[part], label=part, height=0.62)
            left += values
        for place, total in enumerate(left):
            axis.text(total, place, f" {total:.3g}", va="center", fontsize=11)
        axis.set_xlim(0, left.max() * 1.14 or 1)
        axis.xaxis.set_major_locator(MaxNLocator(4 if narrow else 7))
        axis.invert_yaxis()
        axis.set_xlabel(unit)
        figure.legend(loc="outside lower center", ncols=2 if narrow else 3)

    height = 110 + 34 * len(rows)
    lines = (-(-len(parts) // 3), -(-len(parts) // 2))
    wide, narrow = draw(paint, HALF, (height + 19 * lines[0], height + 19 * lines[1]), alt)
    head = ("", *parts)
    body = [(name, *(f"{row.get(part, 0.0):.4g}" for part in parts)) for name, row in rows.items()]
    return Picture(title, alt, wide, narrow, caption, is_half=True, table=(head, *body))


def time_by_system(result: Result) -> Picture | None:
    """Draw what each system's mean iteration is made of."""
    systems = [system for system in result.systems if system.parts_s]
    if not systems:
        return None
    rows = {
        system.name: {part: float(values.mean()) for part, values in system.parts_s.items()}
        for system in systems
    }
    told = ", ".join(f"{system.name} {seconds(system.mean_s)}" for system in systems)
    return _stacked(
        "Time of an iteration",
        f"Stacked bars: mean seconds of an iteration by system. {told}.",
        "Mean over iterations and ranks. Straggling: waiting for the fullest rank of a layer; "
        "bubble: waiting for other pipeline stages.",
        "seconds",
        rows,
        PART_COLORS,
    )


def memory_by_system(result: Result) -> Picture | None:
    """Draw the fullest rank's memory in each system."""
    systems = [system for system in result.systems if system.memory_bytes]
    if not systems:
        return None
    rows = {
        system.name: {part: size / 1e9 for part, size in system.peak_parts.items()}
        for system in systems
    }
    told = ", ".join(f"{system.name} {gigabytes(system.peak_bytes or 0)}" for system in systems)
    return _stacked(
        "Memory of the fullest rank",
        f"Stacked bars: peak memory by system. {told}.",
        "Decimal gigabytes. Fragmentation and the framework's own buffers are not in it.",
        "GB",
        rows,
        MEMORY_COLORS,
    )


def stragglers(result: Result) -> Picture | None:
    """Draw the imbalance over iterations, a line a system, and before balancing."""
    systems = [system for system in result.systems if system.straggler_IL.size]
    if not systems or not result.iterations.size:
        return None
    colors = system_colors([system.name for system in systems])
    # Under plain EP the line "owners alone" is EP's own.
    shows_owners = all(system.name != "ep" for system in systems)

    def paint(figure: Figure, narrow: bool) -> None:
        axis = figure.add_subplot()
        if shows_owners:
            axis.plot(
                result.iterations,
                result.owner_straggler_IL.mean(axis=1),
                color=SYSTEM_COLORS["ep"],
                label="owners alone (as EP)",
            )
        for system in systems:
            strong = system.name in ("ep", "fssdp")
            color, factor_IL = colors[system.name], system.straggler_IL
            axis.plot(
                result.iterations,
                factor_IL.mean(axis=1),
                color=color,
                linewidth=2 if strong else 1.2,
                label=system.name,
            )
            if strong and factor_IL.shape[1] > 1:
                low, high = factor_IL.min(axis=1), factor_IL.max(axis=1)
                axis.fill_between(
                    result.iterations, low, high, color=color, alpha=0.16, linewidth=0
                )
        axis.axhline(1, color=INK, linewidth=0.8, linestyle="dotted")
        axis.set_ylim(bottom=0.95)
        axis.xaxis.set_major_locator(MaxNLocator(4 if narrow else 9, integer=True))
        axis.set_xlabel("iteration")
        axis.set_ylabel("fullest rank / mean tokens")
        figure.legend(loc="outside upper left", ncols=2 if narrow else 8)

    means = {system.name: system.straggler_IL.mean() for system in systems}
    told = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
    alt = f"Lines over iterations: tokens of the fullest rank over the mean. Means: {told}."
    wide, narrow = draw(paint, WIDE, (300, 320), alt)
    caption = "Mean over layers; the band spans all layers. 1 is perfect balance."
    percentiles = (50, 95, 100)
    table = (
        ("", "mean", "p50", "p95", "max"),
        *(
            (
                system.name,
                f"{system.straggler_IL.mean():.3f}",
                *(f"{each:.3f}" for each in np.percentile(system.straggler_IL, percentiles)),
            )
            for system in systems
        ),
    )
    return Picture("Straggler factor over iterations", alt, wide, narrow, caption, table=table)


# Rows of the table of slow iterations.
MOST_SLOW = 5


def slow_iterations(result: Result, system: SystemResult) -> Picture | None:
    """Draw iteration times, and list the slowest iterations beside what could have slowed them."""
    if len(system.iteration_s) < 3:
        return None
    shown = [each for each in result.systems if each.name in ("ep", system.name)]
    colors = system_colors([each.name for each in shown])

    def paint(figure: Figure, narrow: bool) -> None:
        axis = figure.add_subplot()
        for each in shown:
            color = colors[each.name]
            axis.plot(result.iterations, 1e3 * each.iteration_s, color=color, label=each.name)
            if each.exposed_s.any():
                axis.plot(
                    result.iterations,
                    1e3 * each.exposed_s,
                    color=color,
                    linewidth=1,
                    linestyle="dashed",
                    label=f"{each.name}, exposed",
                )
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(MaxNLocator(4 if narrow else 9, integer=True))
        axis.set_xlabel("iteration")
        axis.set_ylabel("milliseconds")
        figure.legend(loc="outside upper left", ncols=2 if narrow else 4)

    slowest = np.argsort(-system.iteration_s, kind="stable")[:MOST_SLOW]
    head = ("iteration", "time", "worst layer's straggler factor", "exposed", "experts moved")
    rows = [
        (
            str(result.iterations[at]),
            seconds(float(system.iteration_s[at])),
            f"{system.straggler_IL[at].max():.2f}",
            seconds(float(system.exposed_s[at])),
            str(system.moved_I[at]) if system.moved_I.size else "-",
        )
        for at in slowest
    ]
    told = ", ".join(f"{row[0]} ({row[1]})" for row in rows[:3])
    alt = f"Lines over iterations: milliseconds of each. The slowest of {system.name}: {told}."
    wide, narrow = draw(paint, WIDE, (260, 290), alt)
    caption = (
        "Dashed: what computation waited for. The table has the slowest iterations; where neither "
        "factor, exposed time nor moves stand out, it was not the experts."
    )
    title = f"Slow iterations, {system.name}"
    return Picture(title, alt, wide, narrow, caption, table=(head, *rows))


def heat_maps(result: Result, system: SystemResult) -> Picture | None:
    """Draw tokens over layers and ranks, before and after, on one scale."""
    before_LR, after_LR = _relative(result.owner_loads_LR), _relative(system.loads_LR)
    if not before_LR.size or before_LR.shape != after_LR.shape:
        return None
    # Small differences look small.
    top = max(float(before_LR.max()), float(after_LR.max()), 1.5)
    num_layers, num_ranks = before_LR.shape
    names = ("owners alone, as EP", f"{system.name}, as it ran")

    def paint(figure: Figure, narrow: bool) -> None:
        shape = (2, 1) if narrow else (1, 2)
        axes = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).ravel()
        image: Any = None
        for axis, name, loads_LR in zip(axes, names, (before_LR, after_LR), strict=True):
            axis.grid(visible=False)
            image = axis.imshow(
                loads_LR,
                cmap="RdBu_r",
                # White is the mean; both colors reach as far.
                vmin=2 - top,
                vmax=top,
                aspect="auto",
                interpolation="none",
                extent=(-0.5, num_ranks - 0.5, num_layers - 0.5, -0.5),
            )
            axis.set_title(f"{name}: worst {loads_LR.max():.2f}")
            step = max(-(-num_layers // 12), 1)
            axis.set_yticks(range(0, num_layers, step), result.layers[::step].tolist())
            axis.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        for axis in axes if not narrow else axes[1:]:
            axis.set_xlabel("rank of the expert-parallel group")
        for axis in axes if narrow else axes[:1]:
            axis.set_ylabel("MoE layer")
        bar = figure.colorbar(image, ax=axes.tolist(), shrink=0.9, aspect=30)
        bar.ax.set_ylim(max(0.0, 2 - top), top)
        bar.outline.set_visible(False)
        bar.set_label("tokens / mean")

    height = int(np.clip(120 + 14 * num_layers, 220, 560))
    alt = (
        f"Two heat maps, {num_layers} layers by {num_ranks} ranks: tokens over the layer's mean. "
        f"{names[0]}: up to {before_LR.max():.2f}; {names[1]}: up to {after_LR.max():.2f}."
    )
    wide, narrow = draw(paint, WIDE, (height, 2 * height), alt)
    caption = "Mean over iterations. Red ranks compute more than the mean, blue ones less."
    table = (
        ("MoE layer", f"fullest rank, {names[0]}", f"fullest rank, {names[1]}"),
        *(
            (str(number), f"{before_R.max():.3f}", f"{after_R.max():.3f}")
            for number, before_R, after_R in zip(result.layers, before_LR, after_LR, strict=True)
        ),
    )
    return Picture("Load of layers and ranks", alt, wide, narrow, caption, table=table)


def _relative(loads_LR: Float64Array) -> Float64Array:
    """(L, R) loads over their layer's mean; a layer without tokens is balanced."""
    if not loads_LR.size:
        return loads_LR
    mean_L = loads_LR.mean(axis=1, keepdims=True)
    relative: Float64Array = np.where(mean_L > 0, loads_LR / np.maximum(mean_L, 1e-9), 1.0)
    return relative

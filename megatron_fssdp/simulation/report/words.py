# SPDX-License-Identifier: Apache-2.0

"""The report in plain words: the summary, the figures on top, and the table of systems."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fssdp.simulation.result import Result, SystemResult

# Below it a difference is not worth a sentence.
SMALL = 0.005


def seconds(value_s: float) -> str:
    """Write a time as people say it: 1.25 s, 12.3 ms, 40 us."""
    if value_s >= 1:
        return f"{value_s:.2f} s"
    if value_s >= 1e-3 or value_s == 0:
        return f"{1e3 * value_s:.1f} ms"
    return f"{1e6 * value_s:.0f} us"


def gigabytes(num_bytes: float) -> str:
    """Write bytes in decimal units: 12.3 GB, 400 MB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


@dataclass(frozen=True)
class Card:
    """A figure on top of the page.

    Attributes:
        name: what it is.
        value: in large print.
        note: below it.
    """

    name: str
    value: str
    note: str


def subject(result: Result) -> SystemResult:
    """Return the system that the report is about: FSSDP if it is there, else the last."""
    return next((each for each in result.systems if each.name == "fssdp"), result.systems[-1])


def _baseline(result: Result) -> SystemResult | None:
    """Return plain EP's result, if it is there and not all there is."""
    ep = next((each for each in result.systems if each.name == "ep"), None)
    return None if ep is subject(result) else ep


def _mean(values: object) -> float | None:
    """Return the mean of an array; None if it is empty."""
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()) if array.size else None


def summary(result: Result) -> list[str]:
    """Return the sentences that come first."""
    system, ep = subject(result), _baseline(result)
    would = "would take" if result.source == "simulated" else "took"
    name = "FSSDP" if system.name == "fssdp" else system.title
    count = len(system.iteration_s)
    sentences = []
    if ep is None:
        sentences.append(f"An iteration {would} {seconds(system.mean_s)}, mean of {count}.")
    else:
        gain = ep.mean_s / system.mean_s
        times = f"{seconds(system.mean_s)} instead of {seconds(ep.mean_s)}, mean of {count}"
        if gain > 1 + SMALL:
            sentences.append(f"{name} makes an iteration {gain:.2f} times as fast as EP: {times}.")
        elif gain < 1 - SMALL:
            sentences.append(
                f"{name} does not pay here: an iteration is {gain:.2f} times as fast as with EP "
                f"({times}). Keep --moe-parallel ep."
            )
        else:
            sentences.append(f"{name} makes no difference here: {times}.")
    before = _mean(result.owner_straggler_IL)
    if before is not None:
        sentences.append(
            f"With owners alone, as EP has it, the fullest rank of a layer computes {before:.2f} "
            f"times the mean tokens (worst {result.owner_straggler_IL.max():.2f})"
            + _as_it_ran(system)
        )
    sentences += _copies(result, system)
    exposed = _mean(system.exposed_s)
    if exposed is not None and system.name != "ep":
        what = "communication" if result.source == "simulated" else "copies of experts"
        sentences.append(f"Computation waits {seconds(exposed)} of an iteration for {what}.")
    if system.peak_bytes is not None:
        more = ""
        if ep is not None and ep.peak_bytes is not None:
            difference = system.peak_bytes - ep.peak_bytes
            sign = "more" if difference >= 0 else "less"
            more = f", {gigabytes(abs(difference))} {sign} than with EP"
        sentences.append(
            f"The fullest rank's memory peaks at {gigabytes(system.peak_bytes)}{more}."
        )
    others = [each for each in result.systems if each not in (system, ep)]
    if others:
        best = min(others, key=lambda each: each.mean_s)
        sentences.append(
            f"The fastest of the other systems is {best.title}, with {seconds(best.mean_s)}."
        )
    return sentences


def _as_it_ran(system: SystemResult) -> str:
    after = _mean(system.straggler_IL)
    if system.name == "ep" or after is None:
        return "."
    return f"; as it ran, {after:.2f} (worst {system.straggler_IL.max():.2f})."


def _copies(result: Result, system: SystemResult) -> list[str]:
    copied, replicas = _mean(system.copied_bytes_I), _mean(system.replicas_I)
    if not copied or replicas is None:
        return []
    text = f"{replicas:.0f} replicas and {gigabytes(copied)} of copies an iteration"
    moved = int(system.moved_I.sum()) if system.moved_I.size else 0
    if moved:
        text += f", and {moved} experts changed owners"
    return [f"That takes {text}."]


def cards(result: Result) -> list[Card]:
    """Return the figures on top of the page."""
    system, ep = subject(result), _baseline(result)
    found = []
    if ep is not None:
        speed_up = f"{ep.mean_s / system.mean_s:.2f}x"
        found.append(Card("Speed-up over EP", speed_up, f"{system.name}, {result.source}"))
    p95 = system.percentiles_s()[95]
    found.append(Card("Iteration", seconds(system.mean_s), f"p95 {seconds(p95)}"))
    before, after = _mean(result.owner_straggler_IL), _mean(system.straggler_IL)
    if before is not None and after is not None:
        value = f"{before:.2f}" if system.name == "ep" else f"{before:.2f} to {after:.2f}"
        found.append(Card("Fullest rank / mean", value, "before and after balancing"))
    exposed = _mean(system.exposed_s)
    if exposed is not None:
        share = exposed / max(system.mean_s, 1e-12)
        found.append(Card("Exposed", seconds(exposed), f"{share:.1%} of an iteration"))
    if system.peak_bytes is not None:
        found.append(Card("Memory peak", gigabytes(system.peak_bytes), "of the fullest rank"))
    return found


def systems_table(result: Result) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows of the table of systems."""
    head = (
        "system", "mean", "p50", "p95", "p99", "speed-up over EP", "exposed", "straggler factor",
        "memory peak",
    )  # fmt: skip
    ep = next((each for each in result.systems if each.name == "ep"), None)
    rows = []
    for each in result.systems:
        percentiles = each.percentiles_s()
        exposed, straggler = _mean(each.exposed_s), _mean(each.straggler_IL)
        rows.append(
            (
                each.title,
                seconds(each.mean_s),
                *(seconds(percentiles[key]) for key in (50, 95, 99)),
                f"{ep.mean_s / each.mean_s:.2f}x" if ep else "-",
                "-" if exposed is None else seconds(exposed),
                "-" if straggler is None else f"{straggler:.2f}",
                "-" if each.peak_bytes is None else gigabytes(each.peak_bytes),
            )
        )
    # A column that nobody knows says nothing.
    known = [at for at in range(len(head)) if any(row[at] != "-" for row in rows)]
    return tuple(head[at] for at in known), [tuple(row[at] for at in known) for row in rows]

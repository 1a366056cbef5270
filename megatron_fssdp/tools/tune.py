# SPDX-License-Identifier: Apache-2.0

"""`fssdp tune`: which flags a job should take, or none."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megatron_fssdp.simulation.report.words import gigabytes, seconds
from megatron_fssdp.simulation.simulate import WARM_UP
from megatron_fssdp.simulation.tune import LEAST_HELD_OUT, Advice, tune
from megatron_fssdp.tools.traces import open_job


def run(
    model: str,
    cluster: str,
    trace: str,
    console: Console,
    *,
    nodes: int | None = None,
    iterations: int | None = None,
    global_batch: int | None = None,
    planning_us: float | None = None,
) -> Advice:
    """Read the files, search and print. The arguments are those of the command line.

    Raises:
        ValueError: if a file, a name or a size is wrong; the message is for the user.
    """
    job, machine, loads = open_job(
        model, cluster, trace, nodes=nodes, iterations=iterations, global_batch=global_batch
    )
    with Console(stderr=True).status("simulating plain EP") as status:
        advice = tune(
            job,
            machine,
            loads,
            num_iterations=iterations,
            planning_s=None if planning_us is None else planning_us * 1e-6,
            progress=lambda flags: status.update(f"simulating {flags}"),
        )
    show(advice, console, (*loads.notes, *advice.notes))
    return advice


def show(advice: Advice, console: Console, notes: tuple[str, ...] = ()) -> None:
    """Print what was tried, and the advice under it."""
    ep = advice.ep
    count = len(ep.iteration_s)
    table = Table(title=f"Simulated, {count} iterations", pad_edge=False)
    table.add_column("flags")
    for name in ("iteration", "over EP", "fullest / mean", "exposed", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [("--moe-parallel ep", ep, True)]
    rows += [(each.settings.flags, each.result, each.fits) for each in advice.tried]
    for flags, result, fits in rows:
        is_best = advice.is_enough and advice.best is not None and result is advice.best.result
        memory = "-" if result.peak_bytes is None else gigabytes(result.peak_bytes)
        table.add_row(
            flags.removeprefix("--moe-parallel fssdp ").replace("--fssdp-", ""),
            seconds(result.mean_s),
            f"{ep.mean_s / result.mean_s:.3f}",
            f"{result.straggler_IL.mean():.2f}",
            seconds(float(result.exposed_s.mean())),
            memory + ("" if fits else " (too much)"),
            style="bold" if is_best else None,
        )
    console.print(table)
    for line in advise(advice):
        console.print(line, soft_wrap=True, highlight=False)
    for note in dict.fromkeys(notes):
        console.print(f"- {note}")


def advise(advice: Advice) -> list[str]:
    """Return the advice in words."""
    if advice.best is None:
        return [
            "Leave it off: no setting fits in memory. Free some first: more nodes, recomputation, "
            "or a smaller micro-batch.",
            "    --moe-parallel ep",
        ]
    if not advice.is_enough:
        needed = 2 * LEAST_HELD_OUT
        return [
            f"No verdict: {len(advice.ep.iteration_s)} iterations after the warm-up are too few. "
            f"Choosing takes one half and judging the other, of at least {LEAST_HELD_OUT}: record "
            f"{needed + WARM_UP} iterations or more, and leave out --iterations, or give {needed}."
        ]
    gain = f"{advice.gain:.3f} (95 %: {advice.low:.3f} to {advice.high:.3f})"
    if not advice.is_worth_it:
        return [
            f"Leave it off: the best settings are worth {gain} times EP's speed, which is not "
            f"surely above 1.01. {_why(advice)}",
            "    --moe-parallel ep",
            _planning(advice),
        ]
    return [
        f"Turn it on: expect {gain} times EP's speed. The interval is over iterations of the "
        "trace; the simulator's own error (docs/simulator.md) comes on top.",
        f"    {advice.best.settings.flags}",
        _planning(advice),
    ]


def _planning(advice: Advice) -> str:
    """Tell what the gain hangs on: the time of quotas."""
    charged = (
        f"Quotas: {advice.planning_s * 1e6:,.0f} us a MoE layer and micro-batch "
        f"({advice.planning_source}). "
    )
    if advice.break_even_s is None:
        return charged + "Even quotas that take no time would not make these settings faster."
    return charged + (
        f"Break-even: with these settings the gain is gone at {advice.break_even_s * 1e6:,.0f} us."
    )


def _why(advice: Advice) -> str:
    """Tell what keeps it from paying."""
    assert advice.best is not None, "there is a best"
    before, after = advice.ep.straggler_IL.mean(), advice.best.result.straggler_IL.mean()
    parts = advice.ep.parts_s
    waits = float(parts["straggling"].mean()) / advice.ep.mean_s if "straggling" in parts else 0.0
    if before < 1.05:
        return f"Loads are even: the fullest rank has {before:.2f} times the mean tokens."
    if waits < 0.02:
        return (
            f"The fullest rank has {before:.2f} times the mean tokens, but only {waits:.1%} of an "
            "iteration waits for it."
        )
    if after > 0.9 * before:
        return f"Replicas do not balance these loads: {before:.2f} becomes {after:.2f}."
    return "Copies and plans take what balance saves."

# SPDX-License-Identifier: Apache-2.0

"""`fssdp simulate`: what a job would take under each system, as a table and as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_fssdp.simulation.apart import simulate_apart
from megatron_fssdp.simulation.cluster import Cluster
from megatron_fssdp.simulation.model import Job
from megatron_fssdp.simulation.report import write_report
from megatron_fssdp.simulation.report.words import gigabytes
from megatron_fssdp.simulation.result import Result, SystemResult, write_result
from megatron_fssdp.simulation.simulate import WARM_UP
from megatron_fssdp.simulation.spread import Trace
from megatron_fssdp.simulation.systems import SYSTEMS, Options
from megatron_fssdp.simulation.timeline import chrome_trace
from megatron_fssdp.tools.traces import DEFAULT_ITERATIONS, open_job


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for; see `fssdp simulate --help`."""

    model: str
    cluster: str
    trace: str
    systems: tuple[str, ...]
    nodes: int | None = None
    iterations: int | None = None
    global_batch: int | None = None
    slots: int | None = None
    planning_us: float | None = None
    timeline: int | None = None
    keeps_events: bool = False


def run(request: Request, console: Console) -> Result:
    """Read the files, simulate with a progress bar, and print the table.

    Raises:
        ValueError: if a file, a name or a size is wrong; the message is for the user.
    """
    job, cluster, trace = open_job(
        request.model,
        request.cluster,
        request.trace,
        nodes=request.nodes,
        iterations=request.iterations,
        global_batch=request.global_batch,
    )
    options, timelines = _options(request, job), _timelines(request, trace)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, quiet=console.quiet),
        transient=True,
    ) as bar:
        task = bar.add_task("simulating", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total or None)

        result = simulate_apart(
            job,
            cluster,
            trace,
            request.systems,
            options=options,
            num_iterations=_iterations(request, trace),
            timelines=timelines,
            trace_name=request.trace,
            progress=advance,
        )
    show(result, job, cluster, console)
    return result


def _options(request: Request, job: Job) -> Options:
    options = Options.of_flags(job.fssdp_args)
    if request.slots is not None:
        if request.slots > job.most_slots:
            raise ValueError(
                f"--slots {request.slots} is more than the {job.most_slots} experts that a rank "
                f"does not own; use 0 to {job.most_slots}"
            )
        options = replace(options, num_replica_slots=request.slots)
    if request.planning_us is not None:
        options = replace(options, planning_s=request.planning_us * 1e-6)
    return options


def _timelines(request: Request, trace: Trace) -> tuple[int, ...]:
    """Which iterations' events to keep: the one asked for, or the first that counts.

    Raises:
        ValueError: the one asked for is not simulated.
    """
    start = min(WARM_UP, trace.num_iterations - 1)
    if request.timeline is None:
        return (trace.iterations[start],) if request.keeps_events else ()
    counted = trace.iterations[start : start + _iterations(request, trace)]
    if request.timeline not in counted:
        raise ValueError(
            f"--timeline {request.timeline} is not simulated; use one of the trace's iterations "
            f"that are: {counted[0]} to {counted[-1]}"
        )
    return (request.timeline,)


def _iterations(request: Request, trace: Trace) -> int:
    if request.iterations is not None:
        return request.iterations
    return min(trace.num_iterations - min(WARM_UP, trace.num_iterations - 1), DEFAULT_ITERATIONS)


def show(result: Result, job: Job, cluster: Cluster, console: Console) -> None:
    """Print a result as a table, with what a reader must know under it."""
    layout = " ".join(f"{name} {size}" for name, size in result.layout.items())
    table = Table(
        title=f"Simulated: {result.model} on {result.num_nodes} x {result.cluster}, "
        f"{len(result.iterations)} iterations of {result.trace}",
        caption=layout,
        # Within the 80 columns of a terminal: no lines between columns.
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("system", no_wrap=True)
    has_ep = any(system.name == "ep" for system in result.systems)
    over = "ep" if has_ep else result.systems[0].name
    for name in (
        "ms",
        "p95",
        f"x {over}",
        "exposed",
        "fullest",
        "replicas",
        "far GB",
        "peak GB",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for system in result.systems:
        table.add_row(*_row(result, system, over, cluster.usable_bytes))
    console.print(table)
    before = float(result.owner_straggler_IL.mean())
    console.print(
        "Simulated, not run. ms: of an iteration; exposed: communication that computation waits "
        "for; fullest: tokens of a layer's fullest rank over the mean "
        f"({before:.2f} with experts at home); replicas of all layers and far GB (sent between "
        "nodes) are of an expert-parallel group; peak GB of the fullest rank."
    )
    for note in result.notes:
        console.print(f"- {note}")
    if any(_overflows(system, cluster.usable_bytes) for system in result.systems):
        console.print(
            f"! needs more than {gigabytes(cluster.usable_bytes or 0)}, what CUDA and NCCL leave "
            f"of a {cluster.name} GPU: more nodes, smaller micro-batches or recomputation"
        )


def _overflows(system: SystemResult, usable_bytes: float | None) -> bool:
    return usable_bytes is not None and (system.peak_bytes or 0) > usable_bytes


def _row(
    result: Result, system: SystemResult, over: str, usable_bytes: float | None
) -> Sequence[str]:
    peak = (system.peak_bytes or 0) / 1e9
    return (
        system.title,
        _ms(system.mean_s),
        _ms(system.percentiles_s()[95]),
        f"{result.speed_up(system.name, over):.2f}",
        f"{system.exposed_s.mean() / system.mean_s:.0%}",
        f"{system.straggler_IL.mean():.2f}",
        f"{system.replicas_I.mean():.0f}",
        f"{system.far_bytes_I.mean() / 1e9:.3g}",
        f"{peak:.1f}" + (" !" if _overflows(system, usable_bytes) else ""),
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 10 else f"{1e3 * seconds:,.0f}"


def check_outputs(paths: Sequence[Path | None]) -> None:
    """Refuse files that could not be written, before work for them starts.

    Raises:
        ValueError: one is a folder, in no folder or given twice.
    """
    given = [path for path in paths if path is not None]
    for path in given:
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} to write {path.name} to")
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give the name of a file to write")
        if [each.resolve() for each in given].count(path.resolve()) > 1:
            raise ValueError(f"{path} is to be written twice; give each output a file of its own")


def write_files(
    result: Result,
    json_path: Path | None = None,
    chrome_path: Path | None = None,
    html_path: Path | None = None,
) -> list[Path]:
    """Write what was asked for; return the files."""
    written = []
    if json_path is not None:
        write_result(json_path, result)
        written.append(json_path)
    if chrome_path is not None:
        chrome_path.write_text(chrome_trace(result), encoding="utf-8")
        written.append(chrome_path)
    if html_path is not None:
        write_report(result, html_path)
        written.append(html_path)
    return written


def split_systems(text: str) -> tuple[str, ...]:
    """Read a comma-separated list of systems.

    Raises:
        ValueError: if one is unknown; the message lists them.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown or not names:
        raise ValueError(
            f"--systems {text}: {', '.join(unknown) or 'none'} unknown; "
            f"choose from {', '.join(SYSTEMS)}"
        )
    return names

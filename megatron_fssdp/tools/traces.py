# SPDX-License-Identifier: Apache-2.0

"""`fssdp trace`: open any trace, torch's files too, and show what it is like."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_fssdp.planning.files import reading
from megatron_fssdp.presets.files import find_file
from megatron_fssdp.simulation import importers, spread
from megatron_fssdp.simulation.cluster import Cluster, load_cluster
from megatron_fssdp.simulation.measured import straggler
from megatron_fssdp.simulation.model import Job, read_job
from megatron_fssdp.simulation.simulate import WARM_UP
from megatron_fssdp.simulation.traces import Trace, open_trace, owned_loads

# Iterations of a generated trace, and of a long recorded one, if nothing else is asked for.
DEFAULT_ITERATIONS = 20
# Iterations that `show_info` looks at, evenly chosen.
MOST_LOOKED_AT = 200


def open_any(path: Path, num_ranks: int | None = None, num_experts: int | None = None) -> Trace:
    """Open a trace as `open_trace` does, or a `.pt` file or a folder of them.

    Raises:
        ValueError: nothing of it can be read.
    """
    files = [path] if path.suffix == ".pt" else []
    if path.is_dir():
        # SGLang writes one for each dump, or one for each rank.
        files = sorted(path.glob("expert_distribution_recorder_*.pt"))
    if not files:
        return open_trace(path, num_ranks, num_experts)
    tables = [_load(file) for file in files]
    with reading(path):
        counts_ILRE, notes = importers.from_dumps(tables, str(path), num_ranks or 1)
    return Trace.of(counts_ILRE, str(path), tuple(notes))


def open_job(
    model: str,
    cluster: str,
    trace: str,
    *,
    nodes: int | None = None,
    iterations: int | None = None,
    global_batch: int | None = None,
) -> tuple[Job, Cluster, spread.Trace]:
    """Read what the command lines of `simulate` and `tune` name.

    Raises:
        ValueError: if a file, a name or a size is wrong; the message is for the user.
    """
    machine = load_cluster(find_file("clusters", cluster))
    num_ranks = None if nodes is None else nodes * machine.ranks_per_node
    changes = {} if global_batch is None else {"--global-batch-size": global_batch}
    with reading(model):
        job = read_job(model, num_ranks, changes)
    return job, machine, open_loads(trace, job, iterations)


def open_loads(name: str, job: Job, num_iterations: int | None = None) -> spread.Trace:
    """Open what `--trace` names: a folder or file, or `zipf:EXPONENT`, made up for the job.

    Args:
        name: of the command line.
        job: whose sizes made-up loads have.
        num_iterations: of made-up loads, after the warm-up; None: `DEFAULT_ITERATIONS`.

    Raises:
        ValueError: it cannot be read, or the exponent is none.
    """
    kind, colon, value = name.partition(":")
    if kind != "zipf" or not colon:
        return open_trace(name, num_experts=job.shape.num_experts)
    try:
        exponent = float(value)
    except ValueError:
        exponent = math.nan
    # No NaN passes; above 10 one expert draws everything.
    if not 0 <= exponent <= 10:
        raise ValueError(
            f"--trace {name}: write zipf:EXPONENT with 0 (even) to 10, such as zipf:0.8"
        )
    return spread.ZipfTrace(
        exponent=exponent,
        num_experts=job.shape.num_experts,
        num_layers=len(job.shape.moe_layers),
        num_ranks=job.layout.ep,
        num_iterations=(num_iterations or DEFAULT_ITERATIONS) + WARM_UP,
        tokens=job.tokens_per_rank * job.shape.topk,
    )


def _load(file: Path) -> Any:
    import torch

    try:
        # Data only: a file from elsewhere must not run code.
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own message is advice to run what the file holds.
        raise ValueError(
            f"{file} cannot be read ({type(error).__name__}): it is damaged, or has more than "
            "tensors, numbers, words, lists and mappings; write those with torch.save, or JSON"
        ) from None


def show_info(trace: Trace, console: Console) -> None:
    """Print a trace's size and the tokens of its fullest rank and expert."""
    step = -(-trace.num_iterations // MOST_LOOKED_AT)
    counts = [trace.counts(position) for position in range(0, trace.num_iterations, step)]
    ranks = np.stack([straggler(owned_loads(each).astype(float)) for each in counts])
    experts = np.stack([straggler(each.sum(axis=1).astype(float)) for each in counts])
    console.print(
        f"{trace.source}: {trace.num_iterations} iterations "
        f"({trace.iterations[0]} to {trace.iterations[-1]}), {trace.num_layers} MoE layers, "
        f"{trace.num_ranks} source ranks, {trace.num_experts} experts, "
        f"{counts[0][0].sum():,} routed tokens a layer",
        soft_wrap=True,
        highlight=False,
    )
    table = Table(pad_edge=False)
    table.add_column("over iterations and layers", no_wrap=True)
    for name in ("mean", "p50", "p95", "max"):
        table.add_column(name, justify="right")
    for name, values in (
        ("fullest rank / mean, under EP", ranks),
        ("fullest expert / mean", experts),
    ):
        figures = [values.mean(), *np.percentile(values, [50, 95, 100])]
        table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    console.print(table)
    for note in trace.notes:
        console.print(f"- {note}")

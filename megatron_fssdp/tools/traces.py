# SPDX-License-Identifier: Apache-2.0

"""`fssdp trace`: open any trace, torch's files too, and show what it is like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_fssdp.simulation import importers
from megatron_fssdp.simulation.measured import straggler
from megatron_fssdp.simulation.traces import Trace, open_trace, owned_loads

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
    counts_ILRE, notes = importers.from_dumps(tables, str(path), num_ranks or 1)
    return Trace.of(counts_ILRE, str(path), tuple(notes))


def _load(file: Path) -> Any:
    import torch

    try:
        # Data only: a file from elsewhere must not run code.
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{file} cannot be read: {error}") from None


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

# SPDX-License-Identifier: Apache-2.0

"""What systems would gain at scale, simulated: speed-up over EP against nodes and against skew.

DeepSeek-V3 on 8 to 256 nodes of 8 H100, Mixtral 8x22B on 16 to 128, Qwen3-235B on 1 to 8 GB200
NVL72 racks; EP, LAER, MoonEP-style, FSSDP. DeepSeek-V3 from 16 nodes and Mixtral have layouts of
their presets; DeepSeek-V3 on 8 nodes has a smaller one of ours, Qwen3 one of ours for its racks.
FSSDP takes the preset's FSSDP_ARGS for so many nodes. What does not fit a GPU's memory is drawn
hollow.

    python benchmarks/scale.py [--iterations 2] [--processes 2] [--output docs/scale.png]
        [--json FILE | --from-json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from tables import Row, show

from megatron_fssdp.presets.files import choose_layout, find_file, merge, read_preset, to_words
from megatron_fssdp.simulation.cluster import load_cluster
from megatron_fssdp.simulation.model import Job, job_from_flags, with_fssdp_args
from megatron_fssdp.simulation.simulate import WARM_UP, simulate
from megatron_fssdp.simulation.spread import ZipfTrace

SYSTEMS = ("ep", "laer", "moonep", "fssdp", "fssdp-rm")
# Zipf exponents, mild to strong, and the one of the figure's left half.
EXPONENTS = (0.0, 0.2, 0.4, 0.6, 0.8)
EXPONENT = 0.4
# Layers whose loads differ; the model's take them in turn.
TRACE_LAYERS = 4
# Label, color, marker, line.
STYLES = {
    "laer": ("LAER-MoE (FSEP)", "tab:orange", "s", "-"),
    "moonep": ("MoonEP-style", "tab:green", "^", "-"),
    "fssdp": ("FSSDP", "tab:blue", "o", "-"),
    "fssdp-rm": ("FSSDP, re-materialized", "tab:cyan", "v", "-"),
}


@dataclass(frozen=True)
class Sweep:
    """A model on growing clusters.

    Attributes:
        model, cluster: presets.
        nodes: of the cluster, ascending.
        ranks_per_node: GPUs of a node that are used.
        skew_nodes: nodes on which the skew varies.
        changes: flags for all sizes, instead of the preset's layouts.
        smallest: flags for fewer GPUs than the preset has a layout for.
    """

    model: str
    cluster: str
    nodes: tuple[int, ...]
    ranks_per_node: int
    skew_nodes: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    smallest: Mapping[str, Any] = field(default_factory=dict)


SWEEPS = (
    Sweep(
        "deepseek_v3",
        "h100_dgx",
        (8, 16, 32, 64, 128, 256),
        8,
        64,
        smallest={
            "--pipeline-model-parallel-size": 4,
            "--decoder-first-pipeline-num-layers": 16,
            "--decoder-last-pipeline-num-layers": 15,
            "--expert-model-parallel-size": 16,
            "--recompute-granularity": "full",
        },
    ),
    Sweep("mixtral_8x22b", "h100_dgx", (16, 32, 64, 128), 8, 64),
    # 64 of a rack's 72 GPUs, so that sizes divide; 128 experts over the rack.
    Sweep(
        "qwen3_235b_a22b",
        "gb200_nvl72",
        (1, 2, 4, 8),
        64,
        2,
        changes={"--expert-model-parallel-size": 32, "--pipeline-model-parallel-size": 2},
    ),
)


def make_job(sweep: Sweep, nodes: int) -> tuple[Job, bool]:
    """Return the job on so many nodes, and whether its layout is the preset's for so many GPUs."""
    preset = read_preset(sweep.model)
    num_ranks = nodes * sweep.ranks_per_node
    is_presets = not sweep.changes and num_ranks >= min(preset.layouts)
    layout = sweep.changes or (choose_layout(preset, num_ranks) if is_presets else sweep.smallest)
    args = merge([preset.args, layout])
    args["--global-batch-size"] = _batch(args, num_ranks)
    return with_fssdp_args(job_from_flags(args, sweep.model, num_ranks), preset), is_presets


def _batch(args: dict[str, Any], num_ranks: int) -> int:
    """The preset's global batch, at least enough for 2 micro-batches a stage of each pipeline."""
    stages = args.get("--pipeline-model-parallel-size", 1)
    dense = stages * args.get("--tensor-model-parallel-size", 1)
    step = args["--micro-batch-size"] * num_ranks // dense
    wanted = max(args["--global-batch-size"], 2 * stages * step)
    return -(-wanted // step) * step


def run(point: tuple[int, int, float], num_iterations: int) -> Row:
    """Simulate a point: a sweep, nodes, and an exponent."""
    index, nodes, exponent = point
    sweep = SWEEPS[index]
    job, is_presets = make_job(sweep, nodes)
    cluster = load_cluster(find_file("clusters", sweep.cluster), sweep.ranks_per_node)
    trace = ZipfTrace(
        exponent,
        job.shape.num_experts,
        TRACE_LAYERS,
        job.layout.ep,
        num_iterations + WARM_UP,
        tokens=job.tokens_per_rank * job.shape.topk,
    )
    result = simulate(job, cluster, trace, SYSTEMS, num_iterations=num_iterations)
    peaks = {name: result.system(name).peak_bytes or 0 for name in SYSTEMS}
    room = cluster.memory_bytes
    layout = job.layout
    return {
        "model": sweep.model,
        "cluster": sweep.cluster,
        "nodes": nodes,
        "GPUs": layout.num_ranks,
        "layout": f"tp{layout.tp} pp{layout.pp} ep{layout.ep} m{layout.num_microbatches}",
        "of": "preset" if is_presets else "ours",
        "zipf": exponent,
        "fullest": float(result.owner_straggler_IL.mean()),
        "EP s": result.system("ep").mean_s,
        **{name: result.speed_up(name) for name in SYSTEMS[1:]},
        **{f"GB {name}": peak / 1e9 for name, peak in peaks.items()},
        **{f"fits {name}": room is None or peak <= room for name, peak in peaks.items()},
    }


def table_row(row: Row) -> Row:
    """Return a row for people: what does not fit in brackets."""
    wanted = ("model", "nodes", "GPUs", "layout", "of", "zipf", "fullest", "EP s")
    short = {name: name.replace("fssdp-", "") for name in SYSTEMS}
    shown: Row = {key: row[key] for key in wanted}
    if not row["fits ep"]:
        shown["EP s"] = f"({row['EP s']:.2f})"
    for name in SYSTEMS[1:]:
        value = f"{row[name]:.2f}"
        shown[short[name]] = value if row[f"fits {name}"] else f"({value})"
    for name in SYSTEMS:
        shown[f"GB {short[name]}"] = f"{row[f'GB {name}']:.0f}"
    return shown


def draw(rows: list[Row], path: Path) -> None:
    """Draw speed-up against nodes and against skew, a column a model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(SWEEPS), figsize=(12, 6.4), sharey="row")
    for column, sweep in enumerate(SWEEPS):
        mine = [row for row in rows if row["model"] == sweep.model]
        by_nodes = [row for row in mine if row["zipf"] == EXPONENT]
        by_skew = [row for row in mine if row["nodes"] == sweep.skew_nodes]
        by_skew.sort(key=lambda row: row["zipf"])
        for name in STYLES:
            _draw_line(axes[0, column], by_nodes, "nodes", name)
            _draw_line(axes[1, column], by_skew, "fullest", name)
        unit = "racks of 64 GB200" if sweep.cluster == "gb200_nvl72" else "nodes of 8 H100"
        preset = read_preset(sweep.model)
        args = merge([preset.fssdp_args_for(sweep.skew_nodes * sweep.ranks_per_node)])
        flags = " ".join(to_words(args)).replace("--fssdp-", "")
        title = preset.title + (f" (preset: {flags})" if flags else "")
        axes[0, column].set(xscale="log", xlabel=unit, title=title)
        axes[0, column].set_xticks(sweep.nodes, [str(nodes) for nodes in sweep.nodes])
        axes[0, column].minorticks_off()
        axes[1, column].set(xlabel=f"fullest rank / mean under EP, on {sweep.skew_nodes}")
        for axis in axes[:, column]:
            axis.axhline(1.0, color="gray", linewidth=0.8)
            axis.grid(alpha=0.3)
    for row in range(2):
        axes[row, 0].set_ylabel("iteration of EP / of the system")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="lower center", ncols=len(STYLES))
    figure.suptitle(
        f"Simulated, not run: speed-up over EP (above: Zipf {EXPONENT} loads). "
        "Hollow: does not fit in a GPU's memory"
    )
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=110)


def _draw_line(axis: Any, rows: list[Row], x: str, name: str) -> None:
    """Draw a system's line; points whose memory does not fit are hollow."""
    label, color, marker, line = STYLES[name]
    axis.plot([row[x] for row in rows], [row[name] for row in rows], color=color, linestyle=line)
    for fits in (True, False):
        mine = [row for row in rows if bool(row[f"fits {name}"]) == fits]
        face = color if fits else "white"
        values = [row[name] for row in mine]
        style = {"linestyle": "none", "marker": marker, "color": color, "markerfacecolor": face}
        axis.plot([row[x] for row in mine], values, **style)
    axis.plot([], [], color=color, marker=marker, linestyle=line, label=label)


def main() -> int:
    """Simulate all points, print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=2, help="of each point")
    parser.add_argument("--output", type=Path, default=Path("docs/scale.png"))
    parser.add_argument("--processes", type=int, default=2, help="that simulate side by side")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--from-json", type=Path, help="draw what --json wrote, simulate nothing")
    args = parser.parse_args()
    if args.from_json:
        rows = json.loads(args.from_json.read_text())
    else:
        rows = simulate_all(args.iterations, args.processes)
    console = Console(width=190)
    shown = [table_row(row) for row in rows]
    show(console, "Simulated speed-up over EP", shown, sections=("model",), places=2)
    console.print(
        "GB: memory of the fullest GPU. In brackets: does not fit the GPU. of: whose layout. "
        "fssdp: with the preset's FSSDP_ARGS."
    )
    draw(rows, args.output)
    console.print(f"wrote {args.output}")
    if args.json:
        args.json.write_text(json.dumps(rows))
    return 0


def simulate_all(num_iterations: int, processes: int) -> list[Row]:
    """Simulate all points."""
    points = [(i, nodes, EXPONENT) for i, sweep in enumerate(SWEEPS) for nodes in sweep.nodes]
    points += [
        (i, sweep.skew_nodes, exponent)
        for i, sweep in enumerate(SWEEPS)
        for exponent in EXPONENTS
        if exponent != EXPONENT
    ]
    with ProcessPoolExecutor(processes) as pool:
        runs = pool.map(partial(run, num_iterations=num_iterations), points)
        return list(track(runs, "simulating", len(points), console=Console(stderr=True)))


if __name__ == "__main__":
    sys.exit(main())

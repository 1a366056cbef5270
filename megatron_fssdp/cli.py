# SPDX-License-Identifier: Apache-2.0

"""The `fssdp` command. Thin: each command parses, calls the library and prints."""

from pathlib import Path
from typing import Annotated

import typer

from megatron_fssdp.version import __version__

app = typer.Typer(
    help="Fully Sharded Sparse Data Parallelism for MoE training in Megatron-LM.",
    no_args_is_help=True,
    add_completion=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and end."),
    ] = False,
) -> None:
    """Take the options that every command shares."""


@app.command()
def doctor() -> None:
    """Show the versions found, and whether this plugin supports them."""
    from megatron_fssdp.integration import versions

    found = versions.find_versions()
    lines = {
        "megatron-fssdp": __version__,
        "torch": found.torch,
        "CUDA": found.cuda or "no device: runs on CPUs over gloo",
        "megatron-core": found.megatron_core or "not found",
        "Transformer Engine": found.transformer_engine or "not found: experts use torch",
        "NVIDIA Apex": found.apex or "not found: Megatron uses torch instead",
    }
    for name, value in lines.items():
        typer.echo(f"{name:<20}{value}")
    if not found.is_core_supported:
        typer.echo(f"Not supported: this plugin needs {versions.SUPPORTED_CORES_TEXT}.", err=True)
        raise typer.Exit(code=1)
    typer.echo(f"Supported: {versions.SUPPORTED_CORES_TEXT}.")


@app.command()
def calibrate(
    output: Annotated[Path, typer.Argument(help="Cluster file (YAML) to write.")],
    hidden_size: Annotated[int, typer.Option(help="Width of the model.")] = 2048,
    ffn_size: Annotated[int, typer.Option(help="Width of an expert's hidden layer.")] = 2048,
) -> None:
    """Measure this machine's products and links. Under torchrun, the links between its ranks."""
    from megatron_fssdp.tools.calibrate import calibrate as measure

    measured = measure(output, hidden_size=hidden_size, ffn_size=ffn_size)
    typer.echo(f"wrote {output}; measured: {measured['measured']}")


@app.command()
def simulate(
    model: Annotated[str, typer.Option(help="Preset in configs/models, or a file like one.")],
    cluster: Annotated[str, typer.Option(help="Cluster in configs/clusters, or a cluster file.")],
    trace: Annotated[
        str, typer.Option(help="Recorded loads (a folder or file), or zipf:EXPONENT, made up.")
    ],
    systems: Annotated[
        str, typer.Option(help="What to compare, separated by commas.")
    ] = "ep,fastermoe,smartmoe,flexmoe,eplb,laer,moonep,fssdp",
    nodes: Annotated[
        int | None, typer.Option(help="Nodes of the cluster. Default: the preset's fewest.")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="Iterations that count, after 5 that are only watched.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences of an iteration. Default: the preset's.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Spare expert slots of a rank and layer.")] = 2,
    timeline: Annotated[
        int | None,
        typer.Option(help="Iteration of the trace whose events are kept. Default: the first."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    chrome_trace: Annotated[
        Path | None, typer.Option(help="Write the iteration's events for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Simulate a job under several systems: time, memory, balance, traffic. Needs no GPU."""
    from rich.console import Console

    from megatron_fssdp.simulation.systems import Options
    from megatron_fssdp.tools import simulate as tool

    try:
        request = tool.Request(
            model=model,
            cluster=cluster,
            trace=trace,
            systems=tool.split_systems(systems),
            nodes=nodes,
            iterations=iterations,
            global_batch=global_batch,
            options=Options(num_replica_slots=slots),
            timeline=timeline,
            keeps_events=json is not None or chrome_trace is not None,
        )
        result = tool.run(request, Console())
    except ValueError as error:
        typer.echo(f"fssdp simulate: {error}", err=True)
        raise typer.Exit(code=2) from None
    for path in tool.write_files(result, json, chrome_trace):
        typer.echo(f"wrote {path}")


def main() -> None:
    """Run the command line."""
    app()

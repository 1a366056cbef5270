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


def main() -> None:
    """Run the command line."""
    app()

# SPDX-License-Identifier: Apache-2.0

"""The `fssdp` command. Thin: each command parses, calls the library and prints."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatron_fssdp.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

# Of ranks, and of experts.
MOST_RANKS = 65536
# Columns of a pipe or a job's log: what the widest table takes.
LEAST_WIDTH = 120

MoeParallel = Literal["fssdp", "ep"]
Launcher = Literal["torchrun", "srun"]

_PLANNING = (
    "What FSSDP's quotas take in each MoE layer and micro-batch, in microseconds. Default: what "
    "the cluster file says (compute: planning_s), or what the routine was measured to take."
)

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
    """Show what is found here, and what of it will slow or break a run, with the fix."""
    import contextlib
    import io
    import warnings
    from dataclasses import asdict

    from megatron_fssdp.integration import versions
    from megatron_fssdp.tools import doctor as tool

    # Megatron warns of every optional package that it does not find; that is our job here.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        found = versions.find_versions()
        facts = tool.look(asdict(found), found.is_core_supported, versions.SUPPORTED_CORES_TEXT)
    for name, value in {"megatron-fssdp": __version__, **tool.describe(facts)}.items():
        typer.echo(f"{name:<20}{value}")
    findings = tool.examine(facts)
    for finding in findings:
        typer.echo(f"\n{finding.effect.upper()}: {finding.what}\n    fix: {finding.fix}")
    if facts.is_core_supported:
        typer.echo(f"\nSupported: {versions.SUPPORTED_CORES_TEXT}.")
    if any(finding.effect == "breaks" for finding in findings):
        raise typer.Exit(code=1)
    if not findings:
        typer.echo("Nothing found that slows or breaks a run.")


@app.command()
def calibrate(
    output: Annotated[Path, typer.Argument(help="Cluster file (YAML) to write.")],
    hidden_size: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 2048,
    ffn_size: Annotated[int, typer.Option(min=1, help="Width of an expert's hidden layer.")] = 2048,
) -> None:
    """Measure this machine's products and links. Under torchrun, the links between its ranks."""
    from megatron_fssdp.tools.calibrate import calibrate as measure

    with _user_errors("calibrate"):
        measured = measure(output, hidden_size=hidden_size, ffn_size=ffn_size)
    typer.echo(f"wrote {output}; measured: {measured['measured']}")


@app.command()
def train(
    preset: Annotated[str, typer.Option(help="Model: a name in configs/models, or a file.")],
    megatron: Annotated[
        list[str] | None, typer.Argument(help="After --: flags that override the preset's.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each.")] = 8,
    cluster: Annotated[
        str | None,
        typer.Option(help="Cluster: a name in configs/clusters, or a file (default: H100s)."),
    ] = None,
    moe_parallel: Annotated[MoeParallel, typer.Option(help="fssdp, or plain ep.")] = "fssdp",
    data_path: Annotated[
        str, typer.Option(help="Megatron's --data-path, in one word (default: mock data).")
    ] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="--flag=value; --flag=false drops a flag.")
    ] = None,
    script: Annotated[str, typer.Option(help="The pretraining script.")] = "pretrain_gpt.py",
    launcher: Annotated[
        Launcher, typer.Option(help="torchrun, or srun with one task a GPU.")
    ] = "torchrun",
    master_addr: Annotated[
        str | None, typer.Option(envvar="MASTER_ADDR", help="The first node.")
    ] = None,
    master_port: Annotated[
        int, typer.Option(envvar="MASTER_PORT", min=1, max=65535, help="A free port of it.")
    ] = 29500,
    node_rank: Annotated[
        int | None,
        typer.Option(envvar=["NODE_RANK", "SLURM_NODEID"], min=0, help="This node, from 0."),
    ] = None,
    check_memory: Annotated[bool, typer.Option(help="Refuse what cannot fit.")] = True,
    dry_run: Annotated[bool, typer.Option(help="Only print the command.")] = False,
) -> None:
    """Train a preset: print its whole command, and run it."""
    from megatron_fssdp.presets.command import Request
    from megatron_fssdp.tools import train as tool

    with _user_errors("train"):
        words = [word for setting in settings or () for word in _split("--set", setting)]
        request = Request(
            preset=preset,
            num_nodes=nodes,
            gpus_per_node=gpus_per_node,
            cluster=cluster,
            moe_parallel=moe_parallel,
            data_path=_split("--data-path", data_path),
            settings=[*words, *(megatron or ())],
            script=script,
            launcher=launcher,
            master_addr=master_addr or None,
            master_port=master_port,
            node_rank=node_rank,
            checks_memory=check_memory,
        )
        tool.train(request, dry_run=dry_run)


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
        int | None, typer.Option(min=1, help="Nodes of the cluster. Default: the preset's fewest.")
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1, max=1_000_000, help="Iterations that count, after 5 that are only watched."
        ),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of an iteration. Default: the preset's.")
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(min=0, help="Spare expert slots of a rank and layer. Default: the preset's."),
    ] = None,
    planning_us: Annotated[float | None, typer.Option(help=_PLANNING, min=0, max=1e9)] = None,
    timeline: Annotated[
        int | None,
        typer.Option(help="Iteration of the trace whose events are kept. Default: the first."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    chrome_trace: Annotated[
        Path | None, typer.Option(help="Write the iteration's events for ui.perfetto.dev.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with figures.")] = None,
) -> None:
    """Simulate a job under several systems: time, memory, balance, traffic. Needs no GPU."""
    from megatron_fssdp.tools import simulate as tool

    with _user_errors("simulate"):
        tool.check_outputs((json, chrome_trace, html))
        request = tool.Request(
            model=model,
            cluster=cluster,
            trace=trace,
            systems=tool.split_systems(systems),
            nodes=nodes,
            iterations=iterations,
            global_batch=global_batch,
            slots=slots,
            planning_us=planning_us,
            timeline=timeline,
            keeps_events=any((json, chrome_trace, html)),
        )
        result = tool.run(request, _console())
        for path in tool.write_files(result, json, chrome_trace, html):
            typer.echo(f"wrote {path}")


trace_app = typer.Typer(help="Look at, import and make traces of expert loads.")
app.add_typer(trace_app, name="trace")


@trace_app.command("info")
def trace_info(
    path: Annotated[Path, typer.Argument(help="Folder or file.")],
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANKS, help="Source ranks, where the trace tells none."),
    ] = None,
) -> None:
    """Show a trace's size and how uneven its loads are."""
    from megatron_fssdp.tools import traces as tool

    with _user_errors("trace info"):
        tool.show_info(tool.open_any(path, ranks), _console())


@trace_app.command("import")
def trace_import(
    source: Annotated[
        Path,
        typer.Argument(
            help="Megatron's router trace, a dump of vLLM or SGLang (.json, .jsonl, .pt), "
            ".npz or .csv."
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Folder to write the trace to.")],
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANKS, help="Source ranks to deal out to, if none are told."),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANKS, help="Experts, where only chosen ones are named."),
    ] = None,
) -> None:
    """Turn what another program recorded into a trace."""
    from megatron_fssdp.simulation.traces import write_trace
    from megatron_fssdp.tools import traces as tool

    with _user_errors("trace import"):
        trace = tool.open_any(source, ranks, experts)
        write_trace(trace, folder)
        tool.show_info(trace, _console())
    typer.echo(f"wrote {folder}")


@trace_app.command("generate")
def trace_generate(
    folder: Annotated[Path, typer.Argument(help="Folder to write the trace to.")],
    kind: Annotated[
        str, typer.Option(help="even, zipf, drift, bursts, hot-rank or domains.")
    ] = "zipf",
    experts: Annotated[int, typer.Option(min=1, help="E.")] = 64,
    ranks: Annotated[int, typer.Option(min=1, help="Source ranks.")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="MoE layers.")] = 4,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations.")] = 50,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a source rank in an iteration.")
    ] = 8192,
    topk: Annotated[int, typer.Option(min=1, help="Experts of a token.")] = 8,
    skew: Annotated[float, typer.Option(help="Zipf exponent of the experts' shares.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same trace.")] = 0,
) -> None:
    """Make a trace up."""
    from megatron_fssdp.simulation import generate
    from megatron_fssdp.simulation.traces import write_trace
    from megatron_fssdp.tools import traces as tool

    with _user_errors("trace generate"):
        shape = generate.Shape(
            num_iterations=iterations,
            num_layers=layers,
            num_ranks=ranks,
            num_experts=experts,
            tokens=tokens,
            topk=topk,
            skew=skew,
        )
        trace = generate.generate(kind, shape, seed)
        write_trace(trace, folder)
        tool.show_info(trace, _console())
    typer.echo(f"wrote {folder}")


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of --fssdp-record-trace: one run, or EP's and FSSDP's."),
    ],
    html: Annotated[
        Path | None, typer.Option(help="Page to write. Default: report.html in the first folder.")
    ] = None,
) -> None:
    """Write one HTML page about what training runs recorded."""
    from megatron_fssdp.simulation.measured import measured
    from megatron_fssdp.simulation.report import write_report
    from megatron_fssdp.simulation.report.words import summary

    with _user_errors("report"):
        result = measured(runs)
        path = html or runs[0] / "report.html"
        write_report(result, path)
        typer.echo("\n".join([*summary(result), f"wrote {path}"]))


@app.command()
def tune(
    model: Annotated[
        str, typer.Option(help="Preset in configs/models, or a file like one: RUN/model.yaml.")
    ],
    cluster: Annotated[str, typer.Option(help="Cluster in configs/clusters, or a cluster file.")],
    trace: Annotated[
        str, typer.Option(help="Recorded loads (a folder or file), or zipf:EXPONENT, made up.")
    ],
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of the cluster. Default: the preset's fewest.")
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1, max=1_000_000, help="Iterations that count, after 5 only watched. Default: all."
        ),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of an iteration. Default: the preset's.")
    ] = None,
    planning_us: Annotated[float | None, typer.Option(help=_PLANNING, min=0, max=1e9)] = None,
) -> None:
    """Search the flags that make a job fastest, and say what they are worth, or to leave it off."""
    from megatron_fssdp.tools import tune as tool

    with _user_errors("tune"):
        tool.run(
            model,
            cluster,
            trace,
            _console(),
            nodes=nodes,
            iterations=iterations,
            global_batch=global_batch,
            planning_us=planning_us,
        )


def _split(flag: str, words: str) -> list[str]:
    """Split a flag's value as a shell does."""
    try:
        return shlex.split(words)
    except ValueError as error:
        raise ValueError(f"{flag} {words}: {error}") from None


def _console() -> "Console":
    """Return a console wide enough for the tables, where no terminal sets the width."""
    from rich.console import Console

    # Paths and names of users may have brackets and colons.
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, LEAST_WIDTH)
    return console


@contextmanager
def _user_errors(command: str) -> Iterator[None]:
    """Show what is wrong with a user's files or flags in a sentence, without a traceback."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        typer.echo(f"fssdp {command}: {error}", err=True)
        raise typer.Exit(code=2) from None
    except KeyboardInterrupt:
        typer.echo(f"fssdp {command}: interrupted", err=True)
        raise typer.Exit(code=130) from None


def main() -> None:
    """Run the command line."""
    app()

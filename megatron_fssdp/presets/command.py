# SPDX-License-Identifier: Apache-2.0

"""The command that trains a preset: its words and environment. Pure; `tools/train.py` runs it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.planning.topology import read_cluster
from megatron_fssdp.presets.files import (
    Args,
    choose_layout,
    find_file,
    from_words,
    merge,
    read_preset,
    to_words,
)
from megatron_fssdp.presets.layout import Layout, estimate_memory, read_layout
from megatron_fssdp.presets.sizes import RESERVED_BYTES, usable_bytes

# Whose links the cost model takes where no cluster file is given (planning/topology.py).
DEFAULT_CLUSTER = "h100_dgx"
# In a printed command, where the launch will know more.
MASTER_ADDR, NODE_RANK = "$MASTER_ADDR", "$NODE_RANK"
# Flags that say where data is from.
DATA_FLAGS = ("--data-path", "--train-data-path", "--per-split-data-args-path", "--data-args-path")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for.

    Attributes:
        preset: name or path of a model file.
        num_nodes: hosts; gpus_per_node: GPUs of each.
        cluster: name or path of a cluster file; None: `DEFAULT_CLUSTER`, without telling the run.
        moe_parallel: fssdp or ep.
        data_path: words of Megatron's --data-path; empty: mock data.
        settings: words of flags that override the preset's.
        script: the pretraining script.
        launcher: torchrun starts one process a GPU here; srun: this process is one of them.
        master_addr: the first node; None: on one node unneeded, else a placeholder.
        master_port: a free port of it.
        node_rank: this node, from 0; None as for `master_addr`.
        checks_memory: whether to refuse what cannot fit.
    """

    preset: str
    num_nodes: int = 1
    gpus_per_node: int = 8
    cluster: str | None = None
    moe_parallel: Literal["fssdp", "ep"] = "fssdp"
    data_path: Sequence[str] = ()
    settings: Sequence[str] = ()
    script: str = "pretrain_gpt.py"
    launcher: Literal["torchrun", "srun"] = "torchrun"
    master_addr: str | None = None
    master_port: int = 29500
    node_rank: int | None = None
    checks_memory: bool = True

    @property
    def num_gpus(self) -> int:
        """Ranks of the job."""
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command to run.

    Attributes:
        words: program and arguments.
        env: variables to set, where the environment does not set them.
        notes: what the user should know, a sentence each.
    """

    words: list[str]
    env: dict[str, str]
    notes: list[str] = field(default_factory=list)

    def to_shell(self) -> str:
        """Spell it for a shell, a flag a line."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        start = self.words.index("megatron_fssdp.launch") + 2
        lines.append(" ".join(map(_quote, self.words[:start])))
        for word in self.words[start:]:
            if word.startswith("--"):
                lines.append(f"    {_quote(word)}")
            else:
                lines[-1] += f" {_quote(word)}"
        return " \\\n".join(lines)


def _quote(word: str) -> str:
    return f'"{word}"' if word in (MASTER_ADDR, NODE_RANK) else shlex.quote(word)


def build_command(request: Request) -> Command:
    """Join preset, layout and the user's settings (later ones win), and check them.

    Raises:
        ValueError: an unknown name or --fssdp-* flag, a wrong value, sizes that do not divide, or a
            model that cannot fit.
    """
    preset = read_preset(request.preset)
    path = find_file("clusters", request.cluster or DEFAULT_CLUSTER)
    cluster = read_cluster(path)
    notes: list[str] = []
    user = from_words(request.settings)
    if request.data_path:
        user = {"--data-path": list(request.data_path), **user}
    args = merge(
        [
            preset.args,
            preset.fssdp_args_for(request.num_gpus) if request.moe_parallel == "fssdp" else {},
            choose_layout(preset, request.num_gpus),
            _fssdp_flags(request, str(path), cluster),
            _mock_data(preset.args, user, notes),
        ]
    )
    _check_values(user, args)
    args = merge([args, user])
    _check_fssdp(FSSDPConfig.from_flags(args), args)
    layout = read_layout(args, request.num_gpus)
    _check_gpu(args, cluster)
    if request.checks_memory:
        _check_memory(args, request, cluster, notes)
    program = [sys.executable, *_launcher_words(request), "-m", "megatron_fssdp.launch"]
    return Command(
        words=[*program, request.script, *to_words(args)],
        env={**preset.env, **layout_environment(layout, _capability(cluster))},
        notes=notes,
    )


def _check_values(user: Args, preset: Args) -> None:
    """Refuse a flag without a value where the preset has one."""
    for flag, value in user.items():
        if not re.fullmatch("--[a-z][a-z0-9-]*", flag):
            raise ValueError(f"{flag!r} is no flag; flags start with --, and a small letter")
        is_switch = isinstance(preset.get(flag, True), bool)
        if value == "" or (value is True and not is_switch):
            example = "" if is_switch else f", such as {flag}={preset[flag]}"
            raise ValueError(f"{flag} needs a value{example}; {flag}=false drops it")


def _check_fssdp(config: FSSDPConfig, args: Args) -> None:
    """Refuse what every rank would refuse, after the job has waited for its nodes."""
    if config.fssdp_cluster is not None:
        read_cluster(config.fssdp_cluster)
    if config.fssdp_owners is not None and not Path(config.fssdp_owners).is_file():
        raise ValueError(f"--fssdp-owners: there is no file {config.fssdp_owners}")
    if config.moe_parallel == "ep":
        return
    sizes = args.get("--num-experts"), args.get("--expert-model-parallel-size", 1)
    if all(size is None or isinstance(size, int) for size in sizes):  # others `read_layout` refuses
        config.check_experts(*sizes)


def _fssdp_flags(request: Request, cluster_path: str, cluster: Mapping[str, Any]) -> Args:
    flags: Args = {"--moe-parallel": request.moe_parallel}
    if request.moe_parallel == "ep" or request.cluster is None:
        return flags
    flags["--fssdp-cluster"] = cluster_path
    # Hosts that share a NVLink domain have different names and are one node all the same.
    domain = cluster["topology"]["ranks_per_node"]
    if isinstance(domain, int) and request.gpus_per_node < request.num_gpus <= domain:
        flags["--fssdp-ranks-per-node"] = request.num_gpus
    return flags


def _mock_data(preset: Args, user: Args, notes: list[str]) -> Args:
    if any(flag in user for flag in DATA_FLAGS):
        return {}
    if "--mock-data" not in user:
        notes.append("no --data-path: the run trains on Megatron's mock data, without a tokenizer")
    return {
        "--mock-data": True,
        "--tokenizer-type": "NullTokenizer",
        "--tokenizer-model": False,
        # One token more is the tokenizer's end of document.
        "--vocab-size": preset["--padded-vocab-size"] - 1,
    }


def _launcher_words(request: Request) -> list[str]:
    if request.launcher == "srun":
        return []
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(request.gpus_per_node)]
    if request.num_nodes == 1:
        return [*words, "--standalone"]
    rank = NODE_RANK if request.node_rank is None else str(request.node_rank)
    return [
        *words,
        *("--nnodes", str(request.num_nodes), "--node-rank", rank),
        *("--master-addr", request.master_addr or MASTER_ADDR),
        *("--master-port", str(request.master_port)),
    ]


def layout_environment(layout: Layout, capability: float) -> dict[str, str]:
    """Return the environment variables that a layout needs.

    Args:
        layout: sizes of the parallel groups.
        capability: compute capability of the GPUs.
    """
    # NVLink SHARP takes buffers for each communicator, and Megatron makes one a parallel group: its
    # own release tests switch it off too.
    env = {"NCCL_NVLS_ENABLE": "0"}
    if layout.pp > 1:
        # A stage's activations are one large message: larger chunks fill the network's adapters.
        env["NCCL_P2P_NET_CHUNKSIZE"] = "2097152"
    if (layout.tp > 1 or layout.cp > 1) and capability < 10:
        # One hardware queue, so that a collective of tensor or context parallelism starts before
        # the product that is to hide it; Megatron insists. Blackwell needs no such help. With TP =
        # CP = 1 it stays unset: one queue would make everything wait for FSSDP's and EP's copies.
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return env


def _capability(cluster: Mapping[str, Any]) -> float:
    # Calibrated files have no GPU part; before Blackwell is the careful answer.
    return float(cluster.get("gpu", {}).get("compute_capability", 9.0))


def _check_gpu(args: Args, cluster: Mapping[str, Any]) -> None:
    if _capability(cluster) < 8 and ("--bf16" in args or "--moe-grouped-gemm" in args):
        raise ValueError(
            f"the GPUs of {cluster.get('name')} (compute capability {_capability(cluster)}) have "
            "neither bf16 nor grouped products; "
            "add --set --bf16=false --set --fp16 --set --moe-grouped-gemm=false"
        )


def _check_memory(
    args: Args, request: Request, cluster: Mapping[str, Any], notes: list[str]
) -> None:
    available = cluster.get("gpu", {}).get("memory_bytes")
    if available is None:
        return
    available = float(available)
    memory = estimate_memory(args, request.num_gpus)
    found = (
        f"weights, gradients and optimizer state {memory.state / 1e9:.0f} GB, replicas "
        f"{memory.replicas / 1e9:.1f} GB, activations about {memory.activations / 1e9:.0f} GB; "
        f"a GPU of {cluster.get('name')} has {available / 1e9:.0f} GB, {RESERVED_BYTES / 1e9:.0f} "
        "of them for CUDA and NCCL"
    )
    if memory.state + memory.replicas > usable_bytes(available):
        raise ValueError(
            f"{request.preset} does not fit {request.num_gpus} GPUs: {found}. Use more nodes, "
            "another layout (--set), a --cluster with more memory, or --no-check-memory"
        )
    if memory.total > available:
        notes.append(f"may run out of memory: {found}")

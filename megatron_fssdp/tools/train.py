# SPDX-License-Identifier: Apache-2.0

"""Run a preset's command in place of this process, under torchrun or as a task of srun."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from megatron_fssdp.presets.command import MASTER_ADDR, NODE_RANK, Command, Request, build_command


def train(request: Request, *, dry_run: bool = False) -> None:
    """Print the command and become it; the process's status is the training's.

    Args:
        request: what to train, and where.
        dry_run: print the command for a shell on standard output and return.

    Raises:
        ValueError: the request cannot be, or the launch lacks something; see `build_command`.
    """
    if request.launcher == "srun" and not dry_run:
        request, ranks = _read_slurm(request, os.environ)
    else:
        ranks = {}
    command = build_command(request)
    is_first = ranks.get("RANK", str(request.node_rank or 0)) == "0"
    if is_first:
        for note in command.notes:
            print(f"fssdp train: {note}", file=sys.stderr)
    if dry_run:
        print(command.to_shell())
        return
    _check_launch(request, command, os.environ)
    if is_first:
        print(command.to_shell(), flush=True)
    # What the user set wins: a preset's variables are defaults.
    os.execve(command.words[0], command.words, {**command.env, **os.environ, **ranks})


def _read_slurm(request: Request, environ: Mapping[str, str]) -> tuple[Request, dict[str, str]]:
    """Read from a task of srun which rank it is.

    Raises:
        ValueError: this is no task, or there is not one task for each GPU.
    """
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
    missing = [name for name in names if name not in environ]
    if missing:
        raise ValueError(
            f"--launcher srun is for the tasks of srun, and {missing[0]} is not set; start it with "
            "srun, or use --launcher torchrun"
        )
    rank, local_rank, num_tasks = (environ[name] for name in names)
    if int(num_tasks) != request.num_gpus:
        raise ValueError(
            f"--launcher srun needs one task for each GPU: {request.num_nodes} nodes x "
            f"{request.gpus_per_node} GPUs, and srun started {num_tasks} tasks; set "
            f"--ntasks-per-node={request.gpus_per_node}, or use --launcher torchrun"
        )
    if not (request.master_addr or environ.get("MASTER_ADDR")):
        raise ValueError("MASTER_ADDR is not set: the name of the job's first node, on all nodes")
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": num_tasks,
        "MASTER_ADDR": request.master_addr or environ["MASTER_ADDR"],
        "MASTER_PORT": str(request.master_port),
    }
    return replace(request, node_rank=int(rank) // request.gpus_per_node), ranks


def _check_launch(request: Request, command: Command, environ: Mapping[str, str]) -> None:
    """Refuse a launch that would hang or fail on all ranks.

    Raises:
        ValueError: what is missing, and how to give it.
    """
    if not Path(request.script).is_file():
        raise ValueError(
            f"there is no file {request.script}; give Megatron-LM's or this repository's "
            "pretrain_gpt.py with --script"
        )
    if request.node_rank is not None and request.node_rank >= request.num_nodes:
        raise ValueError(
            f"--node-rank is {request.node_rank}; with --nodes {request.num_nodes} use 0 to "
            f"{request.num_nodes - 1}"
        )
    for word, name in ((MASTER_ADDR, "--master-addr"), (NODE_RANK, "--node-rank")):
        if word in command.words:
            raise ValueError(
                f"{request.num_nodes} nodes find each other by {name} (or the variable "
                f"{word[1:]}), and it is not given"
            )
    num_tasks = int(environ.get("SLURM_NTASKS", request.num_nodes))
    is_task = request.launcher == "torchrun" and "SLURM_PROCID" in environ
    if is_task and num_tasks != request.num_nodes:
        raise ValueError(
            f"--launcher torchrun needs one task a node, as it starts the ranks itself, and srun "
            f"started {num_tasks} tasks on {request.num_nodes} nodes; set --ntasks-per-node=1, or "
            "use --launcher srun"
        )

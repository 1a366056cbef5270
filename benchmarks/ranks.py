# SPDX-License-Identifier: Apache-2.0

"""Run a benchmark on gloo ranks of this machine, one thread each."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def become_rank(num_ranks: int, script: str) -> bool:
    """Start a script's ranks, each with this process's command line; or be one of them.

    Args:
        num_ranks: how many.
        script: the benchmark's own file.

    Returns:
        Whether this process is a rank, with Megatron's CPU platform and the group ready; if not,
        the ranks have run.
    """
    if "RANK" not in os.environ:
        from torch.distributed.run import main as torchrun

        os.environ["OMP_NUM_THREADS"] = "1"
        torchrun(["--standalone", f"--nproc-per-node={num_ranks}", script, *sys.argv[1:]])
        return False
    torch.set_num_threads(1)
    from megatron_fssdp.integration import cpu_platform

    cpu_platform.enable()
    dist.init_process_group("gloo")
    return True

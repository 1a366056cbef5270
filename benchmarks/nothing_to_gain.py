# SPDX-License-Identifier: Apache-2.0

"""What FSSDP costs where there is nothing to gain: one MoE layer with perfectly balanced routing.

EP and FSSDP take turns in one process group of 2 gloo ranks, one thread each. Held to: no replica,
no byte copied, and at most 2 % more time and memory. Memory is the peak of all live tensors
(parameters, gradients, activations, FSSDP's own) over three iterations from the start, as torch's
MemTracker counts them: the same bytes in every run. Time is the machine's: of each turn's two times
the ratio is taken, and of the ratios the median, so that a machine that others use disturbs little;
CPU time, which others disturb less, stands beside it.

    python benchmarks/nothing_to_gain.py [--repeats 31] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layer import EXPERTS, FFN, HIDDEN, RANKS, TOKENS, TOPK, Case
from ranks import become_rank
from rich.console import Console
from rich.progress import track
from tables import show
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves, tree_map_only

MOST = 1.02


class Counter(MemTracker):
    """Counts the bytes of live tensors, the same in every run.

    gloo's threads let go of a collective's tensors some time after `wait` returns: whether that was
    before the peak was chance (16 MB of 320). So gloo gets copies, which are not counted.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return super().__torch_dispatch__(func, types, args, kwargs)
        copies = tree_map_only(torch.Tensor, torch.clone, args)
        answer = func(*copies, **kwargs or {})
        work = answer[-1] if isinstance(answer, tuple) else answer
        work.wait()
        for tensor, copy in zip(tree_leaves(args), tree_leaves(copies), strict=True):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(copy)
        return answer


def build(moe_parallel: str) -> tuple[Case, int]:
    """Build a layer and run some iterations, by which FSSDP learns the loads.

    Returns:
        The layer, and the most bytes that its live tensors took, whenever they were made, on the
        fullest rank.
    """
    with Counter() as counter:
        case = Case(moe_parallel, "balanced")
        for _ in range(3):
            case.run()
            counter.reset_mod_stats()
    (peak,) = counter.get_tracker_snapshot("peak").values()
    most = torch.tensor([peak["Total"]])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return case, int(most.item())


def measure(repeats: int) -> list[dict[str, Any]]:
    """Time both kinds in turns. Runs on every rank; rank 0's answer counts."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=RANKS, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    cases, peaks_bytes = zip(*map(build, ("ep", "fssdp")), strict=True)
    cpu_s: dict[str, list[float]] = {case.name: [] for case in cases}
    copied: list[int] = []
    cases[1].runtime.listeners.append(
        lambda record: copied.append(sum(gather.num_bytes for gather in record.gathers))
    )
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    for turn in track(range(repeats), description="timing", console=console):
        # Each goes first every other time: who follows finds other caches.
        for case in cases[:: 1 if turn % 2 else -1]:
            begin = time.process_time()
            case.seconds.append(case.run())
            cpu_s[case.name].append(time.process_time() - begin)
    return [
        {
            "": "EP" if case is cases[0] else "FSSDP",
            "median ms": 1e3 * statistics.median(case.seconds),
            "least ms": 1e3 * min(case.seconds),
            "over EP": _over(case.seconds, cases[0].seconds),
            "CPU over EP": _over(cpu_s[case.name], cpu_s[cases[0].name]),
            "peak MB": peak_bytes / 1e6,
            "replicas": getattr(case, "replicas", 0),
            "MB copied": sum(copied) / 1e6 if case is cases[1] else 0.0,
        }
        for case, peak_bytes in zip(cases, peaks_bytes, strict=True)
    ]


def _over(mine: list[float], other: list[float]) -> float:
    """Return the median of the turns' ratios."""
    return statistics.median(a / b for a, b in zip(mine, other, strict=True))


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return FSSDP's figures over EP's, and whether they hold."""
    ep, fssdp = rows
    measured = {
        "time": fssdp["over EP"],
        "CPU time": fssdp["CPU over EP"],
        "memory": fssdp["peak MB"] / ep["peak MB"],
    }
    compared = [
        {
            "FSSDP over EP": name,
            "measured": ratio,
            "held to": f"<= {MOST}",
            "holds": ratio <= MOST,
        }
        for name, ratio in measured.items()
    ]
    nothing = fssdp["replicas"] == 0 and fssdp["MB copied"] == 0
    compared.append(
        {
            "FSSDP over EP": "replicas",
            "measured": float(fssdp["replicas"]),
            "held to": "0",
            "holds": nothing,
        }
    )
    return compared


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=31, help="timed iterations of each kind")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    if not become_rank(RANKS, __file__):
        return 0
    rows = measure(args.repeats)
    if dist.get_rank() == 0:
        console = Console()
        compared = ratios(rows)
        show(
            console,
            f"Balanced routing: {EXPERTS} experts, top-{TOPK}, hidden {HIDDEN}, ffn {FFN}, "
            f"{TOKENS} tokens a rank, {RANKS} gloo ranks",
            rows,
        )
        show(console, "Nothing to gain", compared)
        if args.json:
            args.json.write_text(json.dumps({"rows": rows, "ratios": compared}))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

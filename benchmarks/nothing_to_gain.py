# SPDX-License-Identifier: Apache-2.0

"""What FSSDP costs where there is nothing to gain: one MoE layer with perfectly balanced routing.

EP and FSSDP take turns in one process group of 2 gloo ranks, one thread each. Held to: no replica,
no byte copied, and at most 2 % more time and memory. Memory is the peak of all live tensors of an
iteration (parameters, gradients, activations), as torch's own MemTracker counts them: the same
bytes in every run. Time is the machine's: of each turn's two times the ratio is taken, and of the
ratios the median, so that a machine that others use disturbs little; CPU time, which others disturb
less, stands beside it.

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

MOST = 1.02


def peak_bytes(case: Case) -> int:
    """Run an iteration and return the most bytes that live tensors took, on the fullest rank."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(case.layer, case.inputs, case.probs)
    with tracker:
        case.run()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    most = torch.tensor([peak["Total"]])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most.item())


def measure(repeats: int) -> list[dict[str, Any]]:
    """Time both kinds in turns. Runs on every rank; rank 0's answer counts."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=RANKS, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    cases = [Case("ep", "balanced"), Case("fssdp", "balanced")]
    cpu_s: dict[str, list[float]] = {case.name: [] for case in cases}
    copied: list[int] = []
    cases[1].runtime.listeners.append(
        lambda record: copied.append(sum(gather.num_bytes for gather in record.gathers))
    )
    for _ in range(3):  # warm up; FSSDP learns the loads
        for case in cases:
            case.run()
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
            "peak MB": peak_bytes(case) / 1e6,
            "replicas": getattr(case, "replicas", 0),
            "MB copied": sum(copied) / 1e6 if case is cases[1] else 0.0,
        }
        for case in cases
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

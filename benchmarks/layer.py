# SPDX-License-Identifier: Apache-2.0

"""Time one MoE layer, EP against FSSDP, forward and backward, on 2 gloo ranks of one thread each.

Routing is fixed, not learned, so that every run computes the same: `skewed` sends 80 % of all
tokens to rank 0's experts, `balanced` the same number to every expert. The runs take turns
(A B A B ...) in one process group, so that a noisy machine disturbs all alike. The ideal is what
the token counts allow: a rank's time is its tokens' time, nothing else costs anything.

    python benchmarks/layer.py [--repeats 15] [--json FILE]
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
from moe_config import moe_config
from ranks import become_rank
from rich.console import Console
from rich.progress import track
from rich.table import Table

HIDDEN, FFN, EXPERTS, TOPK = 512, 1024, 8, 2
TOKENS = 4096
SKEWED_SHARE = 0.8
RANKS = 2


def make_routing(kind: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's probabilities and routing map, (T, E) each."""
    generator = torch.Generator().manual_seed(rank)
    half = EXPERTS // RANKS
    if kind == "skewed":
        # Rank 0's experts differ in load too, and each token's two experts are on one rank.
        to_first = torch.rand(TOKENS, generator=generator) < SKEWED_SHARE
        weights = torch.tensor([4.0, 3.0, 2.0, 1.0])
        choice = torch.multinomial(weights.expand(TOKENS, half), TOPK, generator=generator)
        experts = choice + torch.where(to_first, 0, half).unsqueeze(1)
    else:
        tokens = torch.arange(TOKENS).unsqueeze(1)
        experts = (tokens * TOPK + torch.arange(TOPK)) % EXPERTS
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, experts, True)
    probs = torch.where(routing_map, 1.0 / TOPK, 0.0)
    return probs, routing_map


class Case:
    """A layer of one kind with one routing, and the seconds that its iterations took."""

    def __init__(self, moe_parallel: str, kind: str) -> None:
        from megatron.core.models.backends import LocalSpecProvider
        from megatron.core.models.gpt import moe_module_specs

        from megatron_fssdp.config import FSSDPConfig
        from megatron_fssdp.integration import spec

        self.name = f"{moe_parallel} {kind}"
        if moe_parallel == "fssdp":
            self.runtime = spec.register(FSSDPConfig(moe_parallel="fssdp"))
            self.runtime.listeners.append(self._listen)
        builder = moe_module_specs.get_moe_module_spec_for_backend(
            LocalSpecProvider(), num_experts=EXPERTS, moe_grouped_gemm=True
        )
        torch.manual_seed(7)
        self.layer = builder(
            moe_config(
                num_layers=1,
                hidden_size=HIDDEN,
                num_attention_heads=8,
                ffn_hidden_size=FFN,
                num_moe_experts=EXPERTS,
                moe_router_topk=TOPK,
                expert_model_parallel_size=RANKS,
                gated_linear_unit=True,
                activation_func=torch.nn.functional.silu,
            )
        )
        spec.unregister()
        self.layer.set_layer_number(1)
        probs, routing_map = make_routing(kind, dist.get_rank())
        self.probs = probs.requires_grad_()
        self.layer.router.forward = lambda *unused: (self.probs, routing_map)
        generator = torch.Generator().manual_seed(100 + dist.get_rank())
        self.inputs = torch.randn(TOKENS, 1, HIDDEN, generator=generator).requires_grad_()
        # A step of any optimizer ends the iteration; this one changes nothing, so that all
        # repetitions compute the same.
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.0)
        self.seconds: list[float] = []
        self.fullest = float(owner_loads(routing_map).max())

    def _listen(self, record: Any) -> None:
        self.fullest = float(record.loads_LR[0].max())
        self.replicas = record.num_replicas

    def run(self) -> float:
        """Run one iteration and return its seconds on the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        output, _ = self.layer(self.inputs)
        output.square().mean().backward()
        seconds = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seconds.item()


def owner_loads(routing_map: torch.Tensor) -> torch.Tensor:
    """Return the (R,) tokens that each rank's own experts get from all ranks."""
    counts = routing_map.sum(0)
    dist.all_reduce(counts)
    return counts.view(RANKS, -1).sum(1)


def measure(repeats: int) -> dict[str, Any]:
    """Time all cases in turns. Runs on every rank; rank 0's answer counts."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=RANKS, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    cases = [
        Case(moe_parallel, kind)
        for kind in ("skewed", "balanced")
        for moe_parallel in ("ep", "fssdp")
    ]
    check_routing()
    for _ in range(3):  # warm up; FSSDP learns the loads
        for case in cases:
            case.run()
    # One bar, on rank 0's standard error.
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    for _ in track(range(repeats), description="timing", console=console):
        for case in cases:
            case.seconds.append(case.run())
    mean_tokens = TOKENS * TOPK
    return {
        case.name: {
            "seconds": case.seconds,
            "median_s": statistics.median(case.seconds),
            "fullest_over_mean": case.fullest / mean_tokens,
        }
        for case in cases
    }


def check_routing() -> None:
    """Prove the forced routing before anything is timed."""
    skewed = owner_loads(make_routing("skewed", dist.get_rank())[1])
    share = skewed[0].item() / skewed.sum().item()
    assert abs(share - SKEWED_SHARE) < 0.02, f"{share:.3f} of the tokens go to rank 0"
    counts = make_routing("balanced", dist.get_rank())[1].sum(0)
    assert (counts == TOKENS * TOPK // EXPERTS).all(), counts


def report(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the comparisons: measured ratio, ideal ratio, and the bound that we hold."""
    median = {name: result["median_s"] for name, result in results.items()}
    fullest = {name: result["fullest_over_mean"] for name, result in results.items()}

    def compare(text: str, slow: str, fast: str, bound: str, holds: Any) -> dict[str, Any]:
        measured = median[slow] / median[fast]
        ideal = fullest[slow] / fullest[fast]
        return {
            "comparison": text,
            "measured": measured,
            "ideal": ideal,
            "bound": bound,
            "holds": bool(holds(measured)),
        }

    # The ideals of the last two compare with perfect balance: FSSDP would cost nothing.
    return [
        compare(
            "skewed: EP time / FSSDP time",
            "ep skewed",
            "fssdp skewed",
            ">= 1.40",
            lambda ratio: ratio >= 1.40,
        ),
        compare(
            "FSSDP skewed / EP balanced",
            "fssdp skewed",
            "ep balanced",
            "<= 1.12",
            lambda ratio: ratio <= 1.12,
        ),
        compare(
            "balanced: FSSDP time / EP time",
            "fssdp balanced",
            "ep balanced",
            "<= 1.03",
            lambda ratio: ratio <= 1.03,
        ),
    ]


def print_tables(results: dict[str, Any], comparisons: list[dict[str, Any]]) -> None:
    """Print times and comparisons."""
    console = Console()
    times = Table(
        title=f"One MoE layer, forward + backward: {EXPERTS} experts, top-{TOPK}, hidden {HIDDEN}, "
        f"ffn {FFN}, {TOKENS} tokens a rank, {RANKS} gloo ranks"
    )
    for column in ("case", "fullest rank / mean", "min ms", "median ms", "max ms"):
        times.add_column(column, justify="left" if column == "case" else "right")
    for name, result in results.items():
        seconds = result["seconds"]
        figures = (min(seconds), statistics.median(seconds), max(seconds))
        times.add_row(
            name, f"{result['fullest_over_mean']:.3f}", *(f"{1e3 * each:.1f}" for each in figures)
        )
    console.print(times)
    ratios = Table(title="Ratios of medians")
    for column in ("comparison", "measured", "ideal", "bound", "holds"):
        ratios.add_column(column, justify="left" if column == "comparison" else "right")
    for row in comparisons:
        ratios.add_row(
            row["comparison"],
            f"{row['measured']:.3f}",
            f"{row['ideal']:.3f}",
            row["bound"],
            "yes" if row["holds"] else "NO",
        )
    console.print(ratios)


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="timed iterations of each case")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    if not become_rank(RANKS, __file__):
        return 0
    results = measure(args.repeats)
    if dist.get_rank() == 0:
        comparisons = report(results)
        print_tables(results, comparisons)
        if args.json:
            args.json.write_text(json.dumps({"cases": results, "comparisons": comparisons}))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

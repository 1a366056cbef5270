# SPDX-License-Identifier: Apache-2.0

"""Measure both ways of tokens to the shards of an expert: EP 2 x ETP 2 on 4 gloo ranks.

Dispatch and combine alone, forward and backward (four trips), without experts, routing spread
evenly: Megatron's all-to-all and all-gather (and the reverse), and the fused all-to-all. Bytes are
counted where the collectives are called; their ideal is `planning.token_trips`'s. Seconds are set
beside what the cost model says with this machine's link and memory, measured first.

    python benchmarks/etp.py [--repeats 15] [--json FILE]
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
from tables import Row, show

from megatron_fssdp.planning.cost import TOKEN_TRIPS, ComputeRate, LayerShape
from megatron_fssdp.planning.token_trips import token_trip
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.tools.calibrate import measure_links, measure_memory

EP, ETP, EXPERTS, TOPK = 2, 2, 8, 2
# (tokens of a rank, hidden size): from messages of some KB to some MB.
SIZES = ((16, 64), (128, 256), (1024, 512), (4096, 1024))
PROB_BYTES = 4


class SentBytes:
    """Counts what this rank sends to others in all-to-all, which is all that runs here.

    The CPU platform gathers and scatters parts of unequal size by all-to-all too.
    """

    def __init__(self) -> None:
        self.total = 0
        self._stock = dist.all_to_all_single
        dist.all_to_all_single = self._count  # type: ignore[assignment]

    def _count(self, output: torch.Tensor, rows: torch.Tensor, *sizes: Any, **named: Any) -> Any:
        received, sent = named.get("output_split_sizes"), named.get("input_split_sizes")
        received, sent = (*sizes, received, sent)[:2] if sizes else (received, sent)
        group = named["group"]
        others = len(rows) - int(sent[group.rank()])
        self.total += others * rows[:1].nbytes
        return self._stock(output, rows, received, sent, group=group)


class Case:
    """One schedule at one size, and the seconds that its rounds took."""

    def __init__(self, tokens: int, hidden: int, schedule: str) -> None:
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        from megatron_fssdp.integration.fused_dispatch import FusedAlltoAllDispatcher

        groups = get_default_pg_collection()
        config = moe_config(
            num_layers=1,
            hidden_size=hidden,
            num_attention_heads=1,
            ffn_hidden_size=hidden,
            num_moe_experts=EXPERTS,
            moe_router_topk=TOPK,
            expert_model_parallel_size=EP,
            expert_tensor_parallel_size=ETP,
        )
        kind = FusedAlltoAllDispatcher if schedule == "fused" else MoEAlltoAllTokenDispatcher
        mine, first = EXPERTS // EP, groups.ep.rank() * EXPERTS // EP
        indices = list(range(first, first + mine))
        self.dispatcher = kind(mine, indices, config=config, pg_collection=groups)
        # A rank's tokens spread evenly over all experts.
        choice = (torch.arange(tokens)[:, None] * TOPK + torch.arange(TOPK)) % EXPERTS
        self.routing = torch.zeros(tokens, EXPERTS, dtype=torch.bool).scatter_(1, choice, True)
        self.probs = (self.routing / TOPK).requires_grad_()
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.inputs = torch.randn(tokens, 1, hidden, generator=generator).requires_grad_()
        self.seconds: list[float] = []
        self.num_bytes = 0

    def run(self, sent: SentBytes) -> torch.Tensor:
        """Run one round; the slowest rank's seconds count. Returns the output."""
        dispatcher = self.dispatcher
        dist.barrier()
        before, start = sent.total, time.perf_counter()
        rows, probs = dispatcher.dispatch_preprocess(self.inputs, self.routing, self.probs)
        rows, probs = dispatcher.token_dispatch(rows, probs)
        rows, _, probs = dispatcher.dispatch_postprocess(rows, probs)
        # Each shard's part of a result that is linear in the token.
        rows = dispatcher.combine_preprocess(rows * probs[:, None] / ETP)
        output: torch.Tensor = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
        output.sum().backward()
        seconds = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.seconds.append(seconds.item())
        self.num_bytes = sent.total - before
        return output.detach()


def measure(repeats: int) -> dict[str, Any]:
    """Time all cases in turns. Runs on every rank; rank 0's answer counts."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=EP,
        expert_tensor_parallel_size=ETP,
        create_gloo_process_groups=False,
    )
    _, links, _ = measure_links(1 << 24)
    memory_bytes_per_s = measure_memory(1 << 24, torch.float32, torch.device("cpu"))
    topology = Topology((0,) * EP, intra_node=links["intra_node"])
    rate = ComputeRate(flops_per_s=1.0, memory_bytes_per_s=memory_bytes_per_s)
    sent = SentBytes()
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    rows: list[Row] = []
    for tokens, hidden in track(SIZES, description="timing", console=console):
        cases = {name: Case(tokens, hidden, name) for name in ("megatron", "fused")}
        for _ in range(2 + repeats):
            outputs = [case.run(sent) for case in cases.values()]
        # Each of a token's experts returned the token, weighed; so the sum is the token.
        for output in outputs:
            torch.testing.assert_close(output, cases["fused"].inputs.detach())
        rows += _rows(tokens, hidden, cases, topology, rate)
    link = topology.intra_node
    return {
        "link": {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s},
        "memory_bytes_per_s": rate.memory_bytes_per_s,
        "rows": rows,
    }


def _rows(
    tokens: int, hidden: int, cases: dict[str, Case], topology: Topology, rate: ComputeRate
) -> list[Row]:
    """Return a size's rows of the table."""
    shape = LayerShape(hidden_size=hidden, ffn_size=hidden, activation_bytes=4, num_shards=ETP)
    trips = {name: token_trip(tokens * TOPK, topology, shape, fused=name == "fused")
             for name in cases}  # fmt: skip
    modelled = {name: TOKEN_TRIPS * trip.time_s(topology, rate) for name, trip in trips.items()}
    medians = {name: statistics.median(case.seconds[2:]) for name, case in cases.items()}
    auto = min(modelled, key=lambda name: modelled[name])
    rows = []
    for name, case in cases.items():
        # Probabilities travel with the tokens there, and their gradients back.
        num_rows = trips[name].sent_bytes / shape.row_bytes
        ideal = num_rows * (TOKEN_TRIPS * shape.row_bytes + 2 * PROB_BYTES)
        rows.append(
            {
                "tokens": tokens,
                "hidden": hidden,
                "schedule": name,
                "MB": case.num_bytes / 1e6,
                "ideal MB": ideal / 1e6,
                "ms": 1e3 * medians[name],
                "model ms": 1e3 * modelled[name],
                "x megatron": medians[name] / medians["megatron"],
                "auto": "picked" if name == auto else "",
                "holds": abs(case.num_bytes / ideal - 1) < 1e-9,
            }
        )
    return rows


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds of each case")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    if not become_rank(EP * ETP, __file__):
        return 0
    results = measure(args.repeats)
    if dist.get_rank() == 0:
        link = results["link"]
        title = (
            f"Tokens to {ETP} shards and back, forward + backward, without experts: EP {EP} x ETP "
            f"{ETP}, top-{TOPK}; link {link['bytes_per_s'] / 1e9:.2f} GB/s, "
            f"{1e6 * link['latency_s']:.0f} us; memory "
            f"{results['memory_bytes_per_s'] / 1e9:.1f} GB/s"
        )
        show(Console(width=110), title, results["rows"], sections=("tokens",))
        if args.json:
            args.json.write_text(json.dumps(results))
    dist.destroy_process_group()
    return 0 if all(row["holds"] for row in results["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())

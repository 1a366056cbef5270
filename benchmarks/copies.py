# SPDX-License-Identifier: Apache-2.0

"""Measure the copies: bytes and time over a real, slow link; what hides; what replicas take.

Three tables, each with its baseline in the same run:

    link     two nodes (network namespaces, a cable of limited rate): bytes that the kernel counted
             beside our accounts, and seconds, flat against tree
    overlap  one rank a node, link so slow that spAG takes 60 % of the attention: time that
             computation waits for copies, --fssdp-overlap on against off
    memory   bytes of the tensors that replicas take, kept against re-materialized, for 24 layers
             in the proportions of the paper's BERT-MoE-Deep

    python benchmarks/copies.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from copies_model import AttentionClock, overlap_model
from rich.console import Console
from tables import show
from two_nodes import limit_rate, link_bytes, run_two_nodes, why_not

from megatron_fssdp.collectives.lanes import make_lane
from megatron_fssdp.experts.gradients import GradientSums
from megatron_fssdp.experts.materialize import Materializer
from megatron_fssdp.experts.placement import Placement
from megatron_fssdp.experts.replicas import ReplicaPool, Transport
from megatron_fssdp.planning.plan import EMPTY, LayerPlan
from megatron_fssdp.planning.schedule import Schedule

LINK_BYTES_PER_S = 50e6
REPEATS = 5

# BERT-MoE-Deep of the paper, a quarter in each width: all shares stay as they are.
LAYERS, WIDTH, FFN = 24, 1024 // 4, 2048 // 4
OWNED, SLOTS = 2, 16  # 64 experts on 32 ranks; 16 replicas: the paper's parameters are 5.73 x EP's
STATE_BYTES = 18  # bf16 parameter, fp32 gradient, fp32 main parameter, two fp32 Adam moments
PAPER_KEPT, PAPER_AGAIN = 0.64, 0.116


def world() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def iterate(
    layers: list[Materializer],
    placement: Placement,
    owned: list[list[Any]],
    num_microbatches: int = 1,
) -> None:
    """Run one iteration of layers that only read their weights."""
    for _ in range(num_microbatches):
        losses = []
        for layer in layers:
            visit = layer.launch(placement, owned, owned[0], is_trained=True)
            weights = visit.arrive()
            visit.wait()
            output = torch.stack([weight.sum() for slot in weights for weight in slot]).sum()
            visit.guard(output, weights)
            losses.append(output)
        torch.stack(losses).sum().backward()
    for layer in layers:
        layer.settle()
        layer.pool.forget()
    for expert in owned:
        for weight in expert:
            weight.grad = None


def run_link(schedule_kind: str) -> dict[str, float]:
    """Send rank 0's expert to every rank and its gradients back. Runs on every rank."""
    group = world()
    rank, size = group.rank(), group.size()
    slots_RS = np.array([[r, EMPTY if r == 0 else 0] for r in range(size)])
    plan = LayerPlan(np.arange(size), slots_RS)
    nodes = [r // (size // 2) for r in range(size)]
    scheduler: Callable[..., Schedule] = Schedule.flat
    if schedule_kind == "tree":
        scheduler = lambda plan, present: Schedule.tree(plan, nodes, present)  # noqa: E731
    placement = Placement(plan, rank, scheduler)
    owned = [[torch.randn(512, 1024).requires_grad_(), torch.randn(1024, 512).requires_grad_()]]
    transport = Transport(group, make_lane(torch.device("cpu"), overlap=False))
    layer = Materializer(transport, ReplicaPool(1))
    iterate([layer], placement, owned)
    layer.gathers.clear()
    layer.reductions.clear()
    dist.barrier()
    before, seconds = link_bytes(), []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        iterate([layer], placement, owned)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    after = link_bytes()
    accounted = sum(
        schedule.num_far(nodes) * size for schedule, size in (*layer.gathers, *layer.reductions)
    )
    return {
        "seconds": statistics.median(seconds),
        "counted": sum(after) - sum(before),
        "accounted": accounted,
    }


def link_rows() -> list[dict[str, Any]]:
    """Compare flat and tree for an expert that 2, and 4, ranks of the other node need."""
    rows = []
    for per_node in (2, 4):
        results = {
            kind: run_two_nodes(
                run_link, kind, ranks_per_node=per_node, bytes_per_s=LINK_BYTES_PER_S
            )[0]
            for kind in ("flat", "tree")
        }
        for kind, result in results.items():
            flat, share = results["flat"], result["counted"] / results["flat"]["counted"]
            rows.append(
                {
                    "replicas there": per_node,
                    "copies": kind,
                    "kernel MB": result["counted"] / 1e6,
                    "accounted MB": result["accounted"] / 1e6,
                    "kernel / accounted": result["counted"] / result["accounted"],
                    "bytes / flat": share,
                    "ms": 1e3 * result["seconds"],
                    "ms / flat": result["seconds"] / flat["seconds"],
                    "ideal": 1.0 if kind == "flat" else 1 / per_node,
                    "holds": abs(result["counted"] / result["accounted"] - 1) <= 0.05
                    and (kind == "flat" or share <= 1.02 / per_node),
                }
            )
    return rows


def run_overlap() -> dict[str, dict[str, float]]:
    """Time copies under attention, with overlap and without. Runs on both ranks."""
    results: dict[str, dict[str, float]] = {}
    rate = 0.0
    for overlap in ("off", "on"):
        limit_rate(rate or LINK_BYTES_PER_S)
        clock = AttentionClock()
        step, runtime = overlap_model(overlap, clock)
        records: list[Any] = []
        runtime.listeners.append(records.append)
        for _ in range(3):
            step()
        for _ in range(4 if not rate else 0):
            # Towards 60 %, by what both took at the last rate, without overlap.
            clock.forget()
            records.clear()
            for _ in range(2):
                step()
            took = [traffic.total_s for record in records for traffic in record.gathers]
            share = statistics.median(took) / clock.forward_s()
            tensor = torch.tensor([(rate or LINK_BYTES_PER_S) * share / 0.6])
            dist.broadcast(tensor, 0)
            rate = tensor.item()
            limit_rate(rate)
        clock.forget()
        limit_rate(rate)
        step()
        records.clear()
        seconds = []
        for _ in range(REPEATS):
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        runtime.close()
        result = {"ms": 1e3 * statistics.median(seconds), "attention ms": 1e3 * clock.forward_s()}
        for name in ("gathers", "reductions"):
            each = [traffic for record in records for traffic in getattr(record, name)]
            # Both ends take part; the one that waited longer counts.
            spent = torch.tensor([sum(t.exposed_s for t in each), sum(t.total_s for t in each)])
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            result[f"{name} ms"] = 1e3 * spent[1].item() / len(each)
            result[f"{name} exposed"] = (spent[0] / spent[1]).item()
        results[overlap] = result
    return results


def overlap_rows() -> list[dict[str, Any]]:
    """Compare overlap on and off."""
    results = run_two_nodes(run_overlap, ranks_per_node=1, timeout_s=300)[0]
    return [
        {
            "overlap": overlap,
            "attention ms": result["attention ms"],
            "spAG / attention": result["gathers ms"] / result["attention ms"],
            "spAG ms": result["gathers ms"],
            "spAG exposed": result["gathers exposed"],
            "spRS ms": result["reductions ms"],
            "spRS exposed": result["reductions exposed"],
            "ideal": 0.0 if overlap == "on" else 1.0,
            "iteration ms": result["ms"],
            "holds": max(result["gathers exposed"], result["reductions exposed"]) <= 0.15
            if overlap == "on"
            else result["gathers exposed"] > 0.99,
        }
        for overlap, result in results.items()
    ]


def run_memory(num_layers: int, again: bool, num_microbatches: int) -> tuple[int, int]:
    """Return the bytes that replicas' weights, and all else, take after an iteration in bf16.

    All else: gradients on their way and their sums, messages.
    """
    group = world()
    rank, size = group.rank(), group.size()
    slots_RS = np.array(
        [
            [OWNED * r + i for i in range(OWNED)]
            + [e for e in range(OWNED * size) if e // OWNED != r][:SLOTS]
            for r in range(size)
        ]
    )
    plan = LayerPlan(np.arange(OWNED * size) // OWNED, slots_RS)
    scheduler = lambda plan, present: Schedule.tree(plan, [0] * size, present)  # noqa: E731
    placement = Placement(plan, rank, scheduler)
    transport = Transport(group, make_lane(torch.device("cpu"), overlap=False))
    shapes = ((FFN, WIDTH), (WIDTH, FFN))
    owned = [
        [torch.ones(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
        for _ in range(OWNED)
    ]
    shared = ReplicaPool(SLOTS) if again else None
    layers = [
        Materializer(
            transport,
            shared or ReplicaPool(SLOTS),
            sums=GradientSums(True, None if again else lambda: num_microbatches),
        )
        for _ in range(num_layers)
    ]
    iterate(layers, placement, owned, num_microbatches)
    pools = {id(layer.pool): layer.pool.num_bytes for layer in layers}
    return sum(pools.values()), transport.num_bytes


def memory_rows() -> list[dict[str, Any]]:
    """Compare kept and re-materialized replicas with what EP holds."""
    # Dense: attention (4 matrices) and an embedding of 30,522 words; BERT is no GLU.
    dense = LAYERS * 4 * WIDTH * WIDTH + 30522 * WIDTH
    ep_bytes = STATE_BYTES * (dense + LAYERS * OWNED * 2 * WIDTH * FFN)
    cases = {"kept, 1 micro-batch": (False, 1), "kept, more": (False, 2), "again": (True, 2)}
    measured = {
        (name, layers): run_two_nodes(run_memory, layers, *case, ranks_per_node=5)[0]
        for name, case in cases.items()
        for layers in (1, LAYERS)
    }
    rows = []
    for name, (again, _) in cases.items():
        weights, rest = measured[name, LAYERS]
        kept = measured["kept, more", LAYERS]
        rows.append(
            {
                "replicas": name,
                "1 layer MB": sum(measured[name, 1]) / 1e6,
                f"{LAYERS} layers MB": (weights + rest) / 1e6,
                "weights MB": weights / 1e6,
                "of kept, more": (weights + rest) / sum(kept),
                "over EP's state": (weights + rest) / ep_bytes,
                "paper": PAPER_AGAIN if again else PAPER_KEPT,
                "holds": not again
                or (
                    measured[name, LAYERS] == measured[name, 1]
                    and weights + rest <= 0.1 * sum(kept)
                    and weights <= 0.1 * kept[0]
                    and weights + rest <= PAPER_AGAIN * ep_bytes
                ),
            }
        )
    return rows


def main() -> int:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    console = Console(width=140)
    reason = why_not()
    if reason:
        console.print(f"skipped: {reason}")
        return 0
    tables = {
        f"Copies between two nodes over a {LINK_BYTES_PER_S / 1e6:.0f} MB/s link: an expert of "
        "4.2 MB there and its gradient back": link_rows(),
        "Copies under attention, spAG at 60 % of its time": overlap_rows(),
        f"Replica memory of a rank: {OWNED} owned experts and {SLOTS} replicas a layer": (
            memory_rows()
        ),
    }
    for title, rows in tables.items():
        show(console, title, rows)
    if args.json:
        args.json.write_text(json.dumps(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())

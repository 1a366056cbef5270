# SPDX-License-Identifier: Apache-2.0

"""How wrong the simulator is: predicted against measured iterations of EP and FSSDP.

2 and 4 gloo ranks of one thread train a small GPT-MoE (2 layers, attention and all) whose routing
is forced to five load shapes. In the same processes, before and after each round through all cases,
`fssdp calibrate` measures the machine with all ranks at work; the simulator gets the mean of these
and the loads, and nothing of the times that it must predict. Where two network namespaces can be
made, the same runs on two nodes of two ranks with a cable of limited rate.

    python benchmarks/fidelity.py [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.multiprocessing as mp
from fidelity_model import EXPERTS, FLAGS, LAYERS, SLOTS, counts_of, measure, shares
from rich.console import Console
from tables import Row, show
from two_nodes import run_two_nodes, why_not

from megatron_fssdp.planning.planner import PlanSettings
from megatron_fssdp.simulation.cluster import cluster_from_mapping
from megatron_fssdp.simulation.costs import Costs
from megatron_fssdp.simulation.model import job_from_flags
from megatron_fssdp.simulation.simulate import simulate
from megatron_fssdp.simulation.systems import Options
from megatron_fssdp.simulation.traces import Trace

CABLE_BYTES_PER_S = 60e6
MEDIAN_ERROR, LARGEST_ERROR = 0.10, 0.25
# Two systems whose measured times differ by less than this, or of which now one and now the other
# was faster in neighbouring iterations, have no order.
TIE = 0.03
# On a machine so noisy that fewer cases than this have an order, the orders are not judged.
LEAST_ORDERS = 1 / 3
# Freed memory is kept for the next tensor, as the allocator of GPUs keeps it: else each new one is
# paid for in page faults, whose time hangs on what else the machine does. Read when a rank starts.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "MALLOC_ARENA_MAX": "1",
}


def be_rank(rank: int, size: int, folder: str, num_rounds: int) -> None:
    """Be one of the ranks of a node."""
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    result = measure(num_rounds)
    if rank == 0:
        values = result | {"seconds": [[*key, times] for key, times in result["seconds"].items()]}
        Path(folder, "result.json").write_text(json.dumps(values))
    dist.barrier()
    dist.destroy_process_group()


def measure_node(size: int, num_rounds: int) -> dict[str, Any]:
    """Measure on one node."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(be_rank, args=(size, folder, num_rounds), nprocs=size)
        values = json.loads(Path(folder, "result.json").read_text())
    values["seconds"] = {(name, system): times for name, system, times in values["seconds"]}
    return values


def mean_mapping(each: Sequence[Any]) -> Any:
    """Return the mean of calibrations, number by number; of counts and words the first."""
    first = each[0]
    if isinstance(first, dict):
        return {key: mean_mapping([values[key] for values in each]) for key in first}
    if isinstance(first, list):
        return [mean_mapping(values) for values in zip(*each, strict=True)]
    return statistics.mean(each) if isinstance(first, float) else first


def has_order(seconds: dict[str, list[float]]) -> bool:
    """Whether one of EP and FSSDP is faster, as measured in neighbouring iterations."""
    ep, fssdp = seconds["ep"], seconds["fssdp"]
    faster = {a < b for a, b in zip(ep, fssdp, strict=True)}
    return len(faster) == 1 and abs(statistics.median(ep) / statistics.median(fssdp) - 1) >= TIE


def predict(calibrated: dict[str, Any], size: int, name: str) -> dict[str, float]:
    """Return the predicted seconds of an iteration under each system."""
    flags = FLAGS | {
        "--expert-model-parallel-size": size,
        "--global-batch-size": FLAGS["--micro-batch-size"] * size,
    }
    job = job_from_flags(flags, "fidelity", size)
    counts_LRE = np.broadcast_to(counts_of(name), (LAYERS, size, EXPERTS))
    trace = Trace.of(np.broadcast_to(counts_LRE, (3, *counts_LRE.shape)), name)
    cluster = cluster_from_mapping(calibrated, "here")
    result = simulate(
        job,
        cluster,
        trace,
        ("ep", "fssdp"),
        options=Options(
            num_replica_slots=SLOTS,
            settings=PlanSettings(),
            predictor="last",
            planning_s=calibrated["planning_s"],
        ),
    )
    # The measured iterations end before Adam.
    adam_s = Costs(job, cluster).optimizer_s(0)
    return {system.name: system.mean_s - adam_s for system in result.systems}


def compare(place: str, size: int, measured: dict[str, Any]) -> list[Row]:
    """Return a row for each load shape and system."""
    rows = []
    calibrated = mean_mapping(measured["calibrated"])
    for name in shares():
        predicted_s = predict(calibrated, size, name)
        seconds = {system: measured["seconds"][name, system] for system in predicted_s}
        real_s = {system: statistics.median(each) for system, each in seconds.items()}
        load_R = (counts_of(name) * size).reshape(size, -1).sum(axis=1)
        same = (real_s["ep"] < real_s["fssdp"]) == (predicted_s["ep"] < predicted_s["fssdp"])
        order = "none" if not has_order(seconds) else "right" if same else "WRONG"
        for system, guess_s in predicted_s.items():
            rows.append(
                {
                    "where": place,
                    "load": name,
                    "skew": float(load_R.max() / load_R.mean()),
                    "system": system,
                    "median ms": 1e3 * real_s[system],
                    "from": 1e3 * min(seconds[system]),
                    "to": 1e3 * max(seconds[system]),
                    "predicted": 1e3 * guess_s,
                    "error %": 100 * (guess_s / real_s[system] - 1),
                    "order": order,
                    "medians": "right" if same else "differ",
                }
            )
    return rows


def judge(rows: list[Row]) -> list[str]:
    """Return one line on each target."""
    errors = [abs(row["error %"]) / 100 for row in rows]
    orders = [row["order"] for row in rows[::2] if row["order"] != "none"]
    wrong, differ = orders.count("WRONG"), sum(row["medians"] == "differ" for row in rows[::2])
    median, largest = statistics.median(errors), max(errors)
    is_judged = len(orders) >= LEAST_ORDERS * len(rows) / 2
    verdict = {True: "met", False: "NOT MET"}
    return [
        f"median error {median:.1%} (target {MEDIAN_ERROR:.0%}): {verdict[median <= MEDIAN_ERROR]}",
        f"largest error {largest:.1%} (target {LARGEST_ERROR:.0%}): "
        f"{verdict[largest <= LARGEST_ERROR]}",
        f"wrong order of EP and FSSDP in {wrong} of {len(orders)} cases that have one (target 0): "
        + (verdict[not wrong] if is_judged else "NOT JUDGED, too few"),
        f"{len(rows) // 2 - len(orders)} cases have none: medians within {TIE:.0%}, or iterations "
        f"disagree; medians alone have another order in {differ}",
    ]


def main() -> int:
    """Measure, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="each times each case twice")
    parser.add_argument("--places", default="2,4,nodes", help="ranks of a node; two nodes")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    os.environ.update(KEEP_MEMORY)
    console = Console(width=110)
    places = args.places.split(",")
    rows, raw = [], {}
    for size in (int(place) for place in places if place.isdigit()):
        place = f"{size} ranks"
        raw[place] = measure_node(size, args.rounds)
        rows += compare(place, size, raw[place])
    reason = why_not() if "nodes" in places else "not asked for"
    if reason is None:
        place = "2 nodes x 2"
        results = run_two_nodes(
            measure, args.rounds, ranks_per_node=2, bytes_per_s=CABLE_BYTES_PER_S, timeout_s=600
        )
        raw[place] = results[0]
        for values in results[0]["calibrated"]:  # both "nodes" are this machine
            values["compute"]["shared_cores"] = len(os.sched_getaffinity(0))
        rows += compare(place, 4, results[0])
    title = f"Simulator against gloo ranks: medians of {2 * args.rounds} iterations"
    shown = [{key: value for key, value in row.items() if key != "medians"} for row in rows]
    show(console, title, shown, sections=("where", "load"), places=1)
    for line in judge(rows):
        console.print(line)
    if reason is not None:
        console.print(f"two nodes were left out: {reason}")
    if args.json:
        for values in raw.values():
            values["seconds"] = [[*key, times] for key, times in values["seconds"].items()]
        args.json.write_text(json.dumps({"rows": rows, "raw": raw}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

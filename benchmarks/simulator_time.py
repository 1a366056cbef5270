# SPDX-License-Identifier: Apache-2.0

"""How long the simulator takes for 1,024 ranks, 60 MoE layers and 100 iterations, a system a line.

DeepSeek-V3's sizes with 60 MoE layers, EP 64, 4 pipeline stages, 1,024 H100. Each system by itself
in one process, and then all of them as `fssdp simulate` runs them, a process a core.

    python benchmarks/simulator_time.py [--iterations 100] [--systems ep,fssdp]
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

from rich.console import Console
from tables import Row, show

from megatron_fssdp.presets.files import find_file
from megatron_fssdp.simulation.apart import num_cores, simulate_apart
from megatron_fssdp.simulation.cluster import load_cluster
from megatron_fssdp.simulation.model import read_job
from megatron_fssdp.simulation.simulate import WARM_UP, simulate
from megatron_fssdp.simulation.spread import ZipfTrace
from megatron_fssdp.simulation.systems import DEFAULT_SYSTEMS

NUM_RANKS, LAYERS, EP = 1024, 60, 64
CHANGES = {
    "--num-layers": LAYERS,
    "--moe-layer-freq": 1,
    "--pipeline-model-parallel-size": 4,
    "--decoder-first-pipeline-num-layers": 15,
    "--decoder-last-pipeline-num-layers": 15,
    "--expert-model-parallel-size": EP,
}


def main() -> int:
    """Time each system on its own, and all together, loads included."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--systems", default=",".join(DEFAULT_SYSTEMS))
    args = parser.parse_args()
    job = read_job("deepseek_v3", NUM_RANKS, CHANGES)
    cluster = load_cluster(find_file("clusters", "h100_dgx"))
    length = args.iterations + WARM_UP
    tokens = job.tokens_per_rank * job.shape.topk
    trace = ZipfTrace(0.4, job.shape.num_experts, LAYERS, EP, length, tokens=tokens)
    rows: list[Row] = []
    for name in args.systems.split(","):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        simulate(job, cluster, trace, (name,), num_iterations=args.iterations)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        rows.append(
            {
                "system": name,
                "wall s": time.perf_counter() - begin,
                "CPU s": time.process_time() - begin_cpu,
                "peak MB": most,
            }
        )
    title = f"Simulating {NUM_RANKS} ranks, {LAYERS} layers, {args.iterations} iterations"
    console = Console()
    show(console, title, rows, places=1)
    systems, begin = args.systems.split(","), time.perf_counter()
    simulate_apart(job, cluster, trace, systems, num_iterations=args.iterations)
    console.print(
        f"all of them, {num_cores()} cores: {time.perf_counter() - begin:.0f} s (target 300)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

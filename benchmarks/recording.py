# SPDX-License-Identifier: Apache-2.0

"""What --fssdp-record-trace costs: CPU time and bytes of an iteration, for the rank that writes.

Loads are Zipf 0.8, drawn for each source rank; the file is on this machine's disk. Held to 1 % of
the iteration that `make train`'s model takes (README), and of 5 s, which is assumed, for one stage
of DeepSeek-V3 in 8 stages.

    python -m benchmarks.recording
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_fssdp.simulation.generate import Shape, generate
from megatron_fssdp.simulation.recording import TraceWriter
from megatron_fssdp.simulation.traces import owned_loads

REPEATS = 30

# Name, the loads' sizes, and the iteration's milliseconds.
CASES = (
    (
        "make train: 4 layers, 4 ranks, 16 experts",
        Shape(num_iterations=3, num_layers=4, num_ranks=4, num_experts=16, tokens=512, topk=2),
        1062,
    ),
    (
        "DeepSeek-V3, one of 8 stages: 8 layers, 64 ranks, 256 experts",
        Shape(num_iterations=3, num_layers=8, num_ranks=64, num_experts=256, tokens=65536),
        5000,
    ),
)


def measure(shape: Shape) -> tuple[float, float]:
    """Return the median milliseconds of CPU and the kilobytes of an iteration."""
    trace = generate("zipf", shape)
    with tempfile.TemporaryDirectory() as folder:
        shapes = [(shape.num_ranks, shape.num_experts)] * shape.num_layers
        writer = TraceWriter(Path(folder), 0, 1, shapes)
        nothing, times_ms = [0] * shape.num_layers, []
        for iteration in range(REPEATS):
            counts_LRE = trace.counts(iteration % trace.num_iterations)
            loads_LR = owned_loads(counts_LRE)
            begin = time.thread_time()
            writer.append(iteration, list(counts_LRE), list(loads_LR), nothing, nothing)
            times_ms.append(1e3 * (time.thread_time() - begin))
        writer.close()
        size = (Path(folder) / "trace-stage0.bin").stat().st_size
    return float(np.median(times_ms)), size / REPEATS / 1000


def main() -> None:
    """Measure all cases, print, and fail where a recording takes more than 1 %."""
    table = Table(title="Recording an iteration's loads")
    for name in ("case", "ms", "of an iteration", "KB", "KB as plain int32"):
        table.add_column(name, justify="left" if name == "case" else "right")
    is_cheap = True
    for name, shape, iteration_ms in CASES:
        took_ms, size_kb = measure(shape)
        plain_kb = 4 * shape.num_layers * shape.num_ranks * (shape.num_experts + 1) / 1000
        share = took_ms / iteration_ms
        is_cheap &= share <= 0.01
        table.add_row(name, f"{took_ms:.2f}", f"{share:.3%}", f"{size_kb:.1f}", f"{plain_kb:.1f}")
    Console().print(table)
    if not is_cheap:
        sys.exit("recording took more than 1 % of an iteration")


if __name__ == "__main__":
    main()

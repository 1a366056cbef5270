# SPDX-License-Identifier: Apache-2.0

"""Re-sharding: what new owners bring (simulated, figure 15 of the paper), what a move costs.

    python benchmarks/resharding.py [--iterations 200] [--part simulated|measured] [--json FILE]

Simulated: this project's planner and cost model, no GPU. GPT-MoE-S of the paper (12 layers, E 64,
top-2, d_model 768, FFN 1536, not gated) on its clusters, 4 nodes x 8 ranks, drifting Zipf loads;
and the loads recorded from our own training (4 layers, E 16, 4 ranks, here as 2 nodes x 2, 90
iterations over and over, tokens x 4). The paper says neither batch nor loads. So it is assumed:

- a rank has 8,192 tokens (4 sequences) in an iteration, one micro-batch;
- what is not MoE is attention: its products at the cluster file's rate. No embedding, output
  layer, optimizer or dense gradients: they would draw all speed-ups nearer to 1;
- replicas: 2 slots a rank, planned from the mean of 5 iterations, and no limit t: the paper's t is
  0 here (a copy between nodes takes longer than attention's forward). What attention's time does
  not hide is paid. Algorithm 2 leaves as many hot experts to replicas as a rank has slots, as our
  `Resharder` does: 0 without replicas;
- a move is paid in full: 18 bytes a parameter, the rounds of `plan_moves` one by one. (We move
  14: gradients stay. See below.) The first look is at the first iteration that counts;
- experts move if the model says that this pays until the next look, as in our `Resharder`. The
  paper moves whenever the plan changed: "both, always moved".

Nothing is tuned per row. Every 17th iteration is priced (17 shares no factor with an interval, so
owners of all ages count), every look and move is. Published: speed-ups over EP by interval, and
both phases against each alone. These do not fit together in any model where experts stay if moving
does not pay: 3.32 times as fast as sharding alone and 1.42 times as fast as EP would make sharding
alone 2.3 times slower than EP.

Measured: k experts of each of 4 gloo ranks move on to the next rank (a ring: every rank sends one
and receives one in a round), in two network namespaces over an unlimited cable, by the real
`Resharder` from a Megatron model with bf16 parameters and fp32 Adam state: 14 bytes a parameter.
Beside it: the plan's bytes, what the kernel counted on the cable, and bare gloo messages of the
same sizes, always from the same two buffers; the two take turns. Extra memory is that of all
tensors made in the move and alive at once, on the worst rank, without what gloo itself may hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from resharding_measured import NUM_RANKS, measured_rows
from resharding_simulated import cases, published_row, simulated_rows
from rich.console import Console
from tables import Row, show
from two_nodes import why_not


def main() -> int:
    """Simulate, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200, help="simulated, that count")
    parser.add_argument("--part", choices=("simulated", "measured"), help="do only this")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 170)
    tables: dict[str, list[Row]] = {}
    if args.part != "measured":
        rows = [published_row()]
        for case in cases(args.iterations):
            rows += simulated_rows(case)
        title = "SIMULATED, our planner and cost model: re-sharding and replicas, modelled time"
        tables[f"{title} (figure 15 of the paper)"] = rows
    reason = None if args.part == "simulated" else why_not()
    if reason:
        console.print(f"measured part skipped: {reason}")
    elif args.part != "simulated":
        title = f"MEASURED, {NUM_RANKS} gloo ranks: k experts of each rank move to the next"
        tables[title] = measured_rows()
    for title, rows in tables.items():
        sections = ("load", "cluster") if "load" in rows[0] else ()
        show(console, title, rows, sections, places=2)
    if args.json:
        args.json.write_text(json.dumps(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())

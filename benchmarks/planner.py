# SPDX-License-Identifier: Apache-2.0

"""The planner against its rivals: one table, one run, the ideal beside each figure.

    python benchmarks/planner.py [--quick] [--json FILE]

Placement comes from predicted loads (sliding mean of 5), quotas from the true counts; every rival
gets the best quotas too, whatever its own rule for them is. Balance is the fullest rank's tokens
over the mean. Bytes are those between nodes of 8 ranks, tokens and replicas together, forward and
backward, in layers of DeepSeek-V3's size; the ratio is against the rival that sends least among
those whose balance is within 0.01 of ours; LAER-MoE's weights are what its FSEP moves. Cells that a
rival wins are counted again with owners swapped once after the first loads ("re-sharded": rivals
that move experts do so every time), and with the placement corrected for the true counts
("calibrated"); a table says why they are lost.
All times are of one core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from planner_cells import LOST_BY
from planner_rows import (
    Row,
    calibration_rows,
    cell_rows,
    prediction_rows,
    recorded_rows,
    scaling_rows,
    sharding_rows,
    stale_rows,
    time_rows,
    training_rows,
    yardstick_rows,
)
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def load_kind(load: str) -> str:
    """Group the layers of a recorded model."""
    return "gpt-oss jumps" if load.startswith("gpt-oss") else load


def summarize_cells(rows: list[Row]) -> list[Row]:
    """Summarize cells by load and slots."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((load_kind(row["load"]), row["slots"]), []).append(row)
    return [_summarize(load, slots, group) for (load, slots), group in groups.items()]


def _summarize(load: str, slots: int, group: list[Row]) -> Row:
    values = np.concatenate([row["values"] for row in group])
    lost = [row for row in group if row["mean"] > row["rival_mean"] + LOST_BY]
    resharded = [row for row in lost if row["resharded_mean"] > row["rival_mean"] + LOST_BY]
    calibrated = [row for row in lost if row["calibrated_mean"] > row["rival_mean"] + LOST_BY]
    ratios = [row["bytes_ratio"] for row in group if row["bytes_ratio"]]
    rivals = np.mean([row["rival_mean"] for row in group])
    text = f"{values.mean():.4f} / {np.quantile(values, 0.95):.4f}, rival {rivals:.4f}"
    text += f"; lost {len(lost)} of {len(group)}"
    if lost:
        text += f" (re-sharded {len(resharded)}, calibrated {len(calibrated)})"
    if ratios:
        text += f"; bytes {np.mean(ratios):.2f}, worst {max(ratios):.2f}"
        text += f" ({sum(ratio > 1 for ratio in ratios)} of {len(ratios)} over 1)"
    copies = np.mean([row["copies"] for row in group])
    fewest = np.mean([row["fewest_copies"] for row in group])
    text += f"; copies {copies:.0f} ({fewest:.0f} of them needed)"
    return {
        "what": f"{load}, {slots} slot{'s' * (slots > 1)}: mean / p95",
        "planner": "gain",
        "value": text,
        "ideal": "1.0000",
    }


def summarize_traffic(rows: list[Row]) -> Row:
    """Count the cells in which the rival that sends least, at equal balance, sends less than we."""
    ratios = np.array([row["bytes_ratio"] for row in rows if row["bytes_ratio"]])
    over = [int((ratios > limit).sum()) for limit in (1.01, 1.05)]
    return {
        "what": "bytes between nodes, ours over the least rival's: cells over 1.01 / 1.05 / worst",
        "planner": "gain",
        "value": f"{over[0]} / {over[1]} of {len(ratios)} / {ratios.max():.2f}, mean"
        f" {ratios.mean():.3f}",
        "ideal": "0 / 0 / 1.00",
        "over": over,
        "mean": float(ratios.mean()),
    }


def summarize_reasons(rows: list[Row]) -> list[Row]:
    """Count the cells that rivals win by the first reason that explains all winners."""
    found: list[Row] = []
    lost = [row for row in rows if row["lost_why"]]
    what = f"a rival is better balanced by {LOST_BY}: {len(lost)} of {len(rows)} cells"
    for why in sorted({row["lost_why"] for row in lost}):
        group = [row for row in lost if row["lost_why"] == why]
        better = {
            name: sum(row[f"{name}_mean"] <= row["rival_mean"] + LOST_BY for row in group)
            for name in ("resharded", "calibrated")
        }
        found.append(
            {
                "what": what,
                "planner": why,
                "value": f"{len(group)} cells (not lost if re-sharded {better['resharded']},"
                f" calibrated {better['calibrated']})",
                "ideal": "0",
                "count": len(group),
            }
        )
    comparable = [row for row in rows if row["bytes_ratio"]]
    more = [row for row in comparable if row["bytes_why"]]
    for why in sorted({row["bytes_why"] for row in more}):
        group = [row for row in more if row["bytes_why"] == why]
        found.append(
            {
                "what": f"a rival sends less by 1 %: {len(more)} of {len(comparable)} cells",
                "planner": why,
                "value": f"{len(group)} cells, worst"
                f" {max(row['bytes_ratio'] for row in group):.2f}",
                "ideal": "0",
                "count": len(group),
            }
        )
    return found


def print_table(console: Console, rows: Iterable[Row]) -> None:
    """Print all rows as one table."""
    table = Table(title="planner", header_style="bold", pad_edge=False)
    for name in ("what", "planner", "value", "ideal"):
        table.add_column(name, overflow="fold")
    last = ""
    for row in rows:
        what = "" if row["what"] == last else row["what"]
        last = row["what"]
        table.add_row(
            *(escape(text) for text in (what, row["planner"], row["value"], row["ideal"]))
        )
    console.print(table)


def print_lost(console: Console, rows: list[Row]) -> None:
    """Name the cells in which a rival is better balanced, and those where it sends less."""
    for row in rows:
        cell = f"{row['load']}, E {row['experts']}, EP {row['ranks']}, {row['slots']} slots"
        if row["mean"] > row["rival_mean"] + LOST_BY:
            console.print(
                f"lost: {cell}: {row['mean']:.4f}, {row['best_rival']} {row['rival_mean']:.4f}"
                f" (re-sharded {row['resharded_mean']:.4f}, calibrated"
                f" {row['calibrated_mean']:.4f}): {row['lost_why']}"
            )
        if row["bytes_ratio"] and row["bytes_ratio"] > 1.01:
            console.print(
                f"more bytes: {cell}: {row['bytes_ratio']:.2f} times {row['bytes_rival']}'s:"
                f" {row['bytes_why']}"
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="every seventh cell, one iteration")
    parser.add_argument("--json", type=Path, help="write all rows, each cell among them, here")
    args = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 160)
    iterations, slots = (1, (2,)) if args.quick else (3, (1, 2, 4))
    rows: list[Row] = []
    # Times first: later steps leave a heap that slows allocation.
    rows += time_rows()
    rows += scaling_rows((256, 512) if args.quick else (256, 512, 1024))
    rows += yardstick_rows()
    cells = cell_rows(iterations, slots, args.quick)
    rows += summarize_cells(cells)
    rows.append(summarize_traffic(cells))
    rows += summarize_reasons(cells)
    rows += training_rows()
    rows += stale_rows(2 if args.quick else 8)
    rows += calibration_rows(5 if args.quick else 40)
    rows += prediction_rows()
    rows += sharding_rows()
    rows += recorded_rows()
    print_table(console, rows)
    print_lost(console, cells)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0

"""What `planner.py` measures: each function returns rows of its table."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from planner_cells import (
    OURS,
    OURS_FEWEST,
    RANKS_PER_NODE,
    WARM_UP,
    cells,
    compare,
    plans,
    run_cell,
)

from megatron_fssdp.planning.calibration import calibrate_layer
from megatron_fssdp.planning.plan import EMPTY, Int64Array, LayerPlan
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.predict import DEFAULT_PREDICTOR, PREDICTORS
from megatron_fssdp.planning.quota_tables import quota_tables
from megatron_fssdp.planning.quotas import balance, messages_of, rank_loads
from megatron_fssdp.planning.sharding import shard_by_load, shard_evenly, shard_for_replicas
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines import BASELINES, Baseline
from megatron_fssdp.simulation.loads import (
    domain_series,
    recorded_rank_tokens,
    training_series,
    yardstick,
    zipf_series,
)

TRAINING_LOADS = Path(__file__).parent / "data" / "training_loads.npz"
# What `cost.DRIFT` stands for: the second slot's spares against the first's alone.
ONE_SPARE_SLOT = PlanSettings(spare_slots=1)
PLAN_58 = "58 layers, E 256, EP 64, 2 slots: plan [ms]"
Row = dict[str, Any]


def yardstick_rows() -> list[Row]:
    """156 instances, exact counts, two slots: instances within 1.01 and copies in all."""
    found: dict[str, list[tuple[float, int]]] = {}
    for num_experts, num_ranks, _, _, counts_RE in yardstick():
        topology = Topology.uniform(num_ranks, RANKS_PER_NODE)
        owner_E = shard_evenly(1, num_experts, num_ranks)[0]
        for name, plan in plans(counts_RE.sum(axis=0), owner_E, topology, 2):
            load_R = rank_loads(balance(counts_RE, plan, topology.node_of_rank), plan)
            expert, column = np.nonzero(plan.instance_rank_EI != EMPTY)
            copies = int((plan.instance_rank_EI[expert, column] != owner_E[expert]).sum())
            found.setdefault(name, []).append((float(load_R.max() / load_R.mean()), copies))
    rows = []
    for name, values in found.items():
        balances = np.array([value for value, _ in values])
        rows.append(
            {
                "what": "156 instances: within 1.01 / copies / worst",
                "planner": name,
                "value": f"{(balances <= 1.01).sum()} / {sum(c for _, c in values)}"
                f" / {balances.max():.3f}",
                "ideal": "156 / 2869 / 1.010",
                "within": int((balances <= 1.01).sum()),
                "copies": sum(c for _, c in values),
                "worst": float(balances.max()),
            }
        )
    return rows


def cell_rows(num_iterations: int, slots: tuple[int, ...], quick: bool) -> list[Row]:
    """Every cell: our balance, the best rival's, and bytes at equal balance."""
    rows = []
    for number, cell in enumerate(cells(slots)):
        if quick and number % 7:
            continue
        rows.append(compare(cell, *run_cell(cell, num_iterations)))
    return rows


def stale_rows(num_iterations: int) -> list[Row]:
    """Placement from the last iteration alone, quotas exact."""
    found: dict[str, list[float]] = {}
    for exponent in (0.5, 0.8, 1.0, 1.2):
        for num_ranks in (16, 32, 64):
            series = zipf_series(128, num_ranks, exponent, num_iterations + 1)
            topology = Topology.uniform(num_ranks, RANKS_PER_NODE)
            owner_E = shard_evenly(1, 128, num_ranks)[0]
            for last_RE, counts_RE in pairwise(series):
                for name, plan in plans(last_RE.sum(axis=0), owner_E, topology, 2):
                    load_R = rank_loads(balance(counts_RE, plan, topology.node_of_rank), plan)
                    found.setdefault(name, []).append(float(load_R.max() / load_R.mean()))
    return [
        {
            "what": "placement of the last iteration: median / p95",
            "planner": name,
            "value": f"{np.median(values):.4f} / {np.quantile(values, 0.95):.4f}",
            "ideal": "1.0000 (peers: 1.044)",
            "median": float(np.median(values)),
        }
        for name, values in found.items()
    ]


def calibration_rows(num_iterations: int) -> list[Row]:
    """gpt-oss-20b, a text domain an iteration: predicted placement, then calibrated."""
    rows = []
    for num_ranks in (8, 16, 32):
        for slots in (1, 2, 4):
            before, after, new = _jumps(num_ranks, slots, num_iterations)
            rows.append(
                {
                    "what": f"domain jumps, EP {num_ranks}, {slots} slots: p95 calibrated (not)",
                    "planner": OURS,
                    "value": f"{np.quantile(after, 0.95):.3f} ({np.quantile(before, 0.95):.3f})",
                    "ideal": "1.000",
                    "p95": float(np.quantile(after, 0.95)),
                    "p95_predicted": float(np.quantile(before, 0.95)),
                    "mean": float(np.mean(after)),
                    "new_copies": float(np.mean(new)),
                }
            )
    return rows


def _jumps(
    num_ranks: int, slots: int, num_iterations: int
) -> tuple[list[float], list[float], list[int]]:
    topology = Topology.uniform(num_ranks, RANKS_PER_NODE)
    owner_LE = shard_evenly(1, 32, num_ranks)
    settings = PlanSettings(num_replica_slots=slots)
    before: list[float] = []
    after: list[float] = []
    new: list[int] = []
    for layer in range(24):
        predictor = PREDICTORS[DEFAULT_PREDICTOR]()
        for counts_RE in domain_series(num_ranks, layer)[: WARM_UP + num_iterations]:
            load_LE = predictor.predict()
            if load_LE is not None:
                plan = plan_layers(load_LE, owner_LE, topology, settings).layer(0)
                better, num_new = calibrate_layer(counts_RE, plan, topology.node_of_rank, settings)
                for values, used in ((before, plan), (after, better)):
                    load_R = rank_loads(balance(counts_RE, used, topology.node_of_rank), used)
                    values.append(float(load_R.max() / load_R.mean()))
                new.append(num_new)
            predictor.update(counts_RE.sum(axis=0)[None])
    return before, after, new


def best_ms(function: Callable[[], object], repeats: int) -> float:
    """Least wall time of several calls, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def time_rows() -> list[Row]:
    """58 layers of DeepSeek-V3's shape, and one layer of each rival."""
    topology, owner_LE = Topology.uniform(64, RANKS_PER_NODE), shard_evenly(58, 256, 64)
    nodes = topology.node_of_rank
    load_LE = _deepseek_loads(0.8)
    counts_RE = zipf_series(256, 64, 0.8, 2, seed=0)[1]
    rows = []
    for exponent in (0.5, 1.0, 1.2):
        args = _deepseek_loads(exponent), owner_LE, topology, PlanSettings()
        plan_ms = best_ms(partial(plan_layers, *args), 60)
        rows.append(_time_row(PLAN_58, f"{OURS}, Zipf {exponent}", plan_ms, "10"))
    plan_ms = best_ms(partial(plan_layers, load_LE, owner_LE, topology, ONE_SPARE_SLOT), 20)
    rows.append(_time_row(PLAN_58, f"{OURS}, spares in one slot", plan_ms, "10"))
    for name, spare_tokens in ((OURS, 1), (OURS_FEWEST, None)):
        settings = PlanSettings(spare_tokens=spare_tokens)
        plan_ms = best_ms(partial(plan_layers, load_LE, owner_LE, topology, settings), 60)
        plan = plan_layers(load_LE, owner_LE, topology, settings).layer(0)
        tables_ms = best_ms(partial(_rebuild, plan, topology), 10)
        quota_EI = balance(counts_RE, plan, topology.node_of_rank)
        balance_ms = best_ms(partial(balance, counts_RE, plan, nodes), 50)
        split_ms = best_ms(partial(_split, counts_RE, quota_EI, plan, nodes), 50)
        messages_ms = best_ms(partial(_all_messages, counts_RE, quota_EI, plan, nodes), 50)
        for what, value, ideal in (
            (PLAN_58, plan_ms, "10"),
            ("one layer: quotas of all ranks [ms]", balance_ms, "0.3"),
            ("one layer: split of one source [ms]", split_ms, "-"),
            ("the same, and what it receives [ms]", messages_ms, "-"),
            ("one layer: tables, once a plan [ms]", tables_ms, "-"),
        ):
            rows.append(_time_row(what, name, value, ideal))
    for name, baseline in BASELINES.items():
        value = best_ms(partial(_plan_some, baseline, load_LE[:4], owner_LE[0], topology), 2)
        rows.append(_time_row(PLAN_58, name, value * 58 / 4, "10", places=1))
    return rows


def _time_row(what: str, planner: str, ms: float, ideal: str, places: int = 3) -> Row:
    return {
        "what": what,
        "planner": planner,
        "value": f"{ms:.{places}f}",
        "ideal": ideal,
        "ms": ms,
    }


def _deepseek_loads(exponent: float) -> Int64Array:
    """(58, 256) tokens of 64 ranks' micro-batches."""
    series = [zipf_series(256, 64, exponent, 1, seed=layer)[0] for layer in range(58)]
    return np.stack([counts_RE.sum(axis=0) for counts_RE in series])


def _plan_some(
    baseline: Baseline, loads: Int64Array, owner_E: Int64Array, topology: Topology
) -> None:
    for load_E in loads:
        baseline(load_E, owner_E, topology, 2)


def _split(
    counts_RE: Int64Array, quota_EI: Int64Array, plan: LayerPlan, nodes: tuple[int, ...]
) -> Int64Array:
    """What the device waits for, besides the quotas."""
    return messages_of(counts_RE, quota_EI, plan, nodes, 0).split_EI


def _all_messages(
    counts_RE: Int64Array, quota_EI: Int64Array, plan: LayerPlan, nodes: tuple[int, ...]
) -> None:
    messages = messages_of(counts_RE, quota_EI, plan, nodes, 0)
    _ = messages.split_EI, messages.sent_R, messages.received_RS


def _rebuild(plan: LayerPlan, topology: Topology) -> None:
    plan.derived.clear()
    quota_tables(plan, topology.node_of_rank)


def scaling_rows(sizes: tuple[int, ...]) -> list[Row]:
    """E = EP, one layer, up to 1,024."""
    rows = []
    for size in sizes:
        topology, owner_LE = Topology.uniform(size, RANKS_PER_NODE), shard_evenly(1, size, size)
        counts_RE = zipf_series(size, size, 0.8, 1)[0]
        load_LE = counts_RE.sum(axis=0)[None]
        plan_ms = best_ms(partial(plan_layers, load_LE, owner_LE, topology, PlanSettings()), 3)
        plan = plan_layers(load_LE, owner_LE, topology, PlanSettings()).layer(0)
        tables_ms = best_ms(partial(_rebuild, plan, topology), 2)
        nodes = topology.node_of_rank
        quota_EI = balance(counts_RE, plan, nodes)
        quotas_ms = best_ms(partial(balance, counts_RE, plan, nodes), 3)
        quotas_ms += best_ms(partial(_split, counts_RE, quota_EI, plan, nodes), 3)
        load_R = rank_loads(quota_EI, plan)
        rows.append(
            {
                "what": f"E = EP = {size}: plan / tables / quotas and split [ms], balance",
                "planner": OURS,
                "value": f"{plan_ms:.1f} / {tables_ms:.1f} / {quotas_ms:.1f},"
                f" {load_R.max() / load_R.mean():.4f}",
                "ideal": "linear in E, 1.0000",
                "plan_ms": plan_ms,
                "tables_ms": tables_ms,
                "quotas_ms": quotas_ms,
            }
        )
    return rows


def prediction_rows() -> list[Row]:
    """Predictors' error: tokens predicted for the wrong expert, of all."""
    series: dict[str, list[Int64Array]] = {
        "zipf 0.8": [zipf_series(64, 16, 0.8, 60).sum(axis=1)],
        "gpt-oss": [domain_series(8, layer)[:100].sum(axis=1) for layer in (0, 8, 16, 23)],
    }
    training = training_series(TRAINING_LOADS)
    if training is not None:
        summed = training.sum(axis=2)
        series["own training"] = [summed[:, layer] for layer in range(summed.shape[1])]
    rows = []
    for load, runs in series.items():
        for name, make in PREDICTORS.items():
            errors = []
            for run in runs:
                predictor = make()
                for load_E in run:
                    predicted = predictor.predict()
                    if predicted is not None and load_E.sum():
                        share = predicted[0] / max(predicted[0].sum(), 1)
                        errors.append(float(np.abs(share - load_E / load_E.sum()).sum() / 2))
                    predictor.update(load_E[None])
            rows.append(
                {
                    "what": f"prediction error, {load}",
                    "planner": name,
                    "value": f"{np.mean(errors):.4f}",
                    "ideal": "0",
                    "error": float(np.mean(errors)),
                }
            )
    return rows


def training_rows() -> list[Row]:
    """Balance on the loads that this project's own training recorded."""
    training = training_series(TRAINING_LOADS)
    if training is None:
        return []
    _, num_layers, num_ranks, num_experts = training.shape
    topology = Topology.uniform(num_ranks, min(RANKS_PER_NODE, num_ranks))
    owner_E = shard_evenly(1, num_experts, num_ranks)[0]
    found: dict[str, list[float]] = {}
    for layer in range(num_layers):
        predictor = PREDICTORS[DEFAULT_PREDICTOR]()
        for iteration, counts_RE in enumerate(training[:, layer]):
            predicted = predictor.predict()
            if predicted is not None and iteration >= WARM_UP:
                one = plan_layers(predicted, owner_E[None], topology, ONE_SPARE_SLOT).layer(0)
                every = plans(predicted[0], owner_E, topology, 2)
                for name, plan in (*every, (f"{OURS}, spares in one slot", one)):
                    load_R = rank_loads(balance(counts_RE, plan, topology.node_of_rank), plan)
                    found.setdefault(name, []).append(
                        float(load_R.max()) / max(-(-int(load_R.sum()) // num_ranks), 1)
                    )
            predictor.update(counts_RE.sum(axis=0)[None])
    return [
        {
            "what": "own training, 2 slots: mean / p95",
            "planner": name,
            "value": f"{np.mean(values):.4f} / {np.quantile(values, 0.95):.4f}",
            "ideal": "1.0000",
            "mean": float(np.mean(values)),
            "p95": float(np.quantile(values, 0.95)),
        }
        for name, values in found.items()
    ]


def sharding_rows() -> list[Row]:
    """Owners placed anew: the fullest rank without replicas, and replicas that remain needed."""
    rows = []
    topology, owner_LE = Topology.uniform(32, RANKS_PER_NODE), shard_evenly(8, 128, 32)
    loads = np.stack([zipf_series(128, 32, 0.8, 6, seed=s).sum(axis=1) for s in range(8)], axis=1)
    history_LE, next_LE = loads[:5].sum(axis=0), loads[5]
    fewest = PlanSettings(spare_tokens=None)
    for name, owners in (
        ("even", owner_LE),
        ("algorithm 2", shard_by_load(history_LE, owner_LE, topology, 8)),
        ("swaps", shard_for_replicas(history_LE, owner_LE, topology.num_ranks)),
    ):
        full = [
            np.bincount(owner_E, weights=load_E, minlength=32).max() * 32 / load_E.sum()
            for owner_E, load_E in zip(owners, next_LE, strict=True)
        ]
        plan = plan_layers(next_LE, owners, topology, fewest)
        rows.append(
            {
                "what": "sharding, E 128, EP 32: owners only / replicas a layer / moved",
                "planner": name,
                "value": f"{np.mean(full):.3f} / {plan.num_replicas_L.mean():.1f}"
                f" / {(owners != owner_LE).sum() / len(owners):.1f}",
                "ideal": "1.000 / 0 / 0",
            }
        )
    return rows


def recorded_rows() -> list[Row]:
    """What LAER-MoE published of its runs and its rivals' (their own planners, on A100s)."""
    return [
        {
            "what": "published runs, 32 A100: mean / p95",
            "planner": name,
            "value": f"{(r := tokens.max(axis=2) / tokens.mean(axis=2)).mean():.2f}"
            f" / {np.quantile(r, 0.95):.2f}",
            "ideal": "1.00",
        }
        for name, tokens in recorded_rank_tokens().items()
    ]

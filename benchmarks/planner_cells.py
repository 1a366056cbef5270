# SPDX-License-Identifier: Apache-2.0

"""One cell of the planner benchmark: every planner on one load series, and why a rival wins it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_fssdp.planning.calibration import calibrate_layer
from megatron_fssdp.planning.cost import (
    TOKEN_TRIPS,
    LayerShape,
    break_even_tokens,
    tokens_between_nodes,
)
from megatron_fssdp.planning.plan import EMPTY, Int64Array, LayerPlan
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.predict import DEFAULT_PREDICTOR, PREDICTORS
from megatron_fssdp.planning.quotas import balance, rank_loads
from megatron_fssdp.planning.sharding import shard_evenly, shard_for_replicas
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines import BASELINES
from megatron_fssdp.simulation.copies import shard_traffic
from megatron_fssdp.simulation.loads import SHAPES, domain_series, shape_series, zipf_series

RANKS_PER_NODE = 8
# Iterations before the first one that counts: the predictor's window.
WARM_UP = 5
OURS = "gain"
OURS_FEWEST = "gain, no spares"
CALIBRATED = "gain, calibrated"
RESHARDED = "gain, re-sharded"
PAPER = "load (alg. 1)"
# Swaps of owners in a layer, once, when the first loads have been seen.
MOST_SWAPS = 32
# Its layouts are free because its experts lie sharded over all ranks (FSEP): each rank restores all
# of its experts from them, in every micro-batch.
FSEP = "LAER-MoE"
# Bytes are for DeepSeek-V3's layers: hidden 7168, expert FFN 2048.
SHAPE = LayerShape(hidden_size=7168, ffn_size=2048)
# A cell is lost if a rival's fullest rank has fewer tokens by more than this part of the mean.
LOST_BY = 0.001
# Two balances, or two amounts of bytes, are equal within this.
EQUAL = 0.01
# Loads jump if more than this part of the tokens is predicted for a wrong expert. Drift is less.
JUMP = 0.05


@dataclass(frozen=True)
class Cell:
    """Where planners are compared: loads, and the room that they get."""

    load: str
    num_experts: int
    num_ranks: int
    num_slots: int

    def series(self, num_iterations: int) -> Int64Array:
        """(T, R, E) int64 tokens."""
        experts, ranks, length = self.num_experts, self.num_ranks, WARM_UP + num_iterations
        if self.load.startswith("zipf"):
            topk = 2 if experts == 8 else 8
            return zipf_series(experts, ranks, float(self.load.split()[1]), length, topk=topk)
        if self.load.startswith("gpt-oss"):
            return domain_series(ranks, int(self.load.split()[-1]))[:length]
        return shape_series(self.load, experts, ranks, length)


@dataclass(frozen=True)
class Result:
    """What a planner did in a cell, per iteration.

    Attributes:
        balance: tokens of the fullest rank over the mean.
        copies: instances away from home.
        far_bytes: bytes between nodes, tokens and replicas.
        most_sent: copies that leave the busiest owner.
        planned: as `balance`, had the predicted loads come true.
        slots: the most experts on a rank, beyond its even share.
        moved: experts with another owner than at home.
    """

    balance: tuple[float, ...]
    copies: tuple[int, ...]
    far_bytes: tuple[int, ...]
    most_sent: tuple[int, ...]
    planned: tuple[float, ...]
    slots: tuple[int, ...]
    moved: tuple[int, ...]


def cells(slots: tuple[int, ...] = (1, 2, 4)) -> Iterator[Cell]:
    """Yield all cells with made loads, then those with recorded ones."""
    loads = [f"zipf {exponent}" for exponent in (0.5, 0.8, 1.0, 1.2)] + list(SHAPES)
    for load in loads:
        for num_experts in (8, 32, 64, 128, 256):
            for num_ranks in (8, 16, 32, 64):
                if num_ranks <= num_experts:
                    for num_slots in slots:
                        yield Cell(load, num_experts, num_ranks, num_slots)
    for layer in range(24):
        for num_ranks in (8, 16, 32):
            for num_slots in slots:
                yield Cell(f"gpt-oss layer {layer}", 32, num_ranks, num_slots)


def run_cell(cell: Cell, num_iterations: int) -> tuple[dict[str, Result], float]:
    """Place replicas from predicted loads, then give every planner the best quotas it can have.

    Returns:
        Each planner's results, and the part of the tokens that was predicted for a wrong expert.
    """
    series = cell.series(num_iterations)
    owner_E = shard_evenly(1, cell.num_experts, cell.num_ranks)[0]
    topology = Topology.uniform(cell.num_ranks, RANKS_PER_NODE)
    predictor = PREDICTORS[DEFAULT_PREDICTOR]()
    new_owner_E = shard_for_replicas(
        series[:WARM_UP].sum(axis=(0, 1))[None], owner_E[None], cell.num_ranks, MOST_SWAPS
    )[0]
    settings = ours(cell.num_slots)[OURS]
    rows: dict[str, list[tuple[float, int, int, int, float, int, int]]] = {}
    errors = []
    for iteration, counts_RE in enumerate(series):
        predicted = predictor.predict()
        if predicted is not None and iteration >= WARM_UP:
            load_E, true_E = predicted[0], counts_RE.sum(axis=0)
            share_E = load_E / max(load_E.sum(), 1) - true_E / max(true_E.sum(), 1)
            errors.append(float(np.abs(share_E).sum() / 2))
            for name, plan in plans(load_E, owner_E, topology, cell.num_slots):
                values = _measure(counts_RE, load_E, plan, owner_E, topology, name == FSEP)
                rows.setdefault(name, []).append(values)
                if name == OURS:
                    better, _ = calibrate_layer(counts_RE, plan, topology.node_of_rank, settings)
                    values = _measure(counts_RE, load_E, better, owner_E, topology)
                    rows.setdefault(CALIBRATED, []).append(values)
            plan = plan_layers(predicted, new_owner_E[None], topology, settings).layer(0)
            values = _measure(counts_RE, load_E, plan, new_owner_E, topology)
            rows.setdefault(RESHARDED, []).append(values)
        predictor.update(counts_RE.sum(axis=0)[None])
    results = {name: Result(*zip(*values, strict=True)) for name, values in rows.items()}
    return results, float(np.mean(errors))


def plans(
    load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int
) -> Iterator[tuple[str, LayerPlan]]:
    """Yield each planner's name and plan."""
    for name, settings in ours(num_slots).items():
        yield name, plan_layers(load_E[None], owner_E[None], topology, settings).layer(0)
    for name, baseline in BASELINES.items():
        yield name, baseline(load_E, owner_E, topology, num_slots)


def ours(num_slots: int) -> dict[str, PlanSettings]:
    """Return the settings under which this project's planners are compared."""
    return {
        OURS: PlanSettings(num_replica_slots=num_slots, spare_tokens=break_even_tokens(SHAPE)),
        OURS_FEWEST: PlanSettings(num_replica_slots=num_slots, spare_tokens=None),
        PAPER: PlanSettings(num_replica_slots=num_slots, algorithm="load"),
    }


def _measure(
    counts_RE: Int64Array,
    load_E: Int64Array,
    plan: LayerPlan,
    home_E: Int64Array,
    topology: Topology,
    is_sharded: bool = False,
) -> tuple[float, int, int, int, float, int, int]:
    """The values of `Result`, in its order, for one iteration; `load_E` was predicted.

    Weights that cross are those of experts on nodes that are not their home's; where experts are
    sharded, what each instance lacks: the shards of other nodes' ranks.
    """
    quota_EI = balance(counts_RE, plan, topology.node_of_rank)
    expert, column = np.nonzero(plan.instance_rank_EI != EMPTY)
    rank = plan.instance_rank_EI[expert, column]
    is_away = rank != home_E[expert]
    is_on_ME = np.zeros((topology.num_nodes, plan.num_experts), dtype=bool)
    is_on_ME[topology.node_R[rank], expert] = True
    is_on_ME[topology.node_R[home_E], np.arange(plan.num_experts)] = False
    token_bytes = TOKEN_TRIPS * SHAPE.row_bytes
    far_tokens = tokens_between_nodes(counts_RE, quota_EI, plan, topology)
    far_bytes = far_tokens * token_bytes
    if is_sharded:
        is_far_RR = topology.node_R[:, None] != topology.node_R
        far_bytes += int(shard_traffic(plan, SHAPE.replica_bytes)[is_far_RR].sum())
    else:
        far_bytes += int(is_on_ME.sum()) * SHAPE.replica_bytes
    sent_R = np.bincount(home_E[expert[is_away]], minlength=plan.num_ranks)
    even_RE = np.tile(load_E // plan.num_ranks, (plan.num_ranks, 1))
    planned_EI = balance(even_RE, plan, topology.node_of_rank)
    return (
        _fullest(quota_EI, plan),
        int(is_away.sum()),
        far_bytes,
        int(sent_R.max()),
        _fullest(planned_EI, plan),
        int(np.bincount(rank).max()) - -(-plan.num_experts // plan.num_ranks),
        int((plan.owner_E != home_E).sum()),
    )


def _fullest(quota_EI: Int64Array, plan: LayerPlan) -> float:
    """The fullest rank's tokens over the ideal: whole tokens, the mean rounded up."""
    load_R = rank_loads(quota_EI, plan)
    return float(load_R.max()) / max(-(-int(load_R.sum()) // plan.num_ranks), 1)


def compare(cell: Cell, results: dict[str, Result], error: float) -> dict[str, Any]:
    """Hold our results in a cell against the best rival's, in balance and in bytes."""
    mean = {name: float(np.mean(result.balance)) for name, result in results.items()}
    far = {name: float(np.mean(result.far_bytes)) for name, result in results.items()}
    best = min(BASELINES, key=lambda name: mean[name])
    equal = [name for name in BASELINES if mean[name] <= mean[OURS] + EQUAL]
    least = min(equal, key=lambda name: far[name]) if equal else None
    ratio = far[OURS] / far[least] if least and far[least] else None
    winners = [name for name in BASELINES if mean[OURS] > mean[name] + LOST_BY]
    cheaper = [name for name in equal if far[OURS] > far[name] * (1 + EQUAL)]
    return {
        "load": cell.load,
        "experts": cell.num_experts,
        "ranks": cell.num_ranks,
        "slots": cell.num_slots,
        "mean": mean[OURS],
        "p95": float(np.quantile(results[OURS].balance, 0.95)),
        "values": results[OURS].balance,
        "fewest_mean": mean[OURS_FEWEST],
        "calibrated_mean": mean[CALIBRATED],
        "resharded_mean": mean[RESHARDED],
        "copies": float(np.mean(results[OURS].copies)),
        "fewest_copies": float(np.mean(results[OURS_FEWEST].copies)),
        "most_sent": max(results[OURS].most_sent),
        "best_rival": best,
        "rival_mean": mean[best],
        "bytes_rival": least,
        "bytes_ratio": ratio,
        "prediction_error": error,
        "lost_why": _why(cell, results, error, winners, is_traffic=False),
        "bytes_why": _why(cell, results, error, cheaper, is_traffic=True) if ratio else None,
        "all": mean,
    }


def _why(
    cell: Cell, results: dict[str, Result], error: float, winners: list[str], is_traffic: bool
) -> str | None:
    """Name the first reason that explains all the rivals that win a cell; None: no rival does."""
    if not winners:
        return None
    ours, rivals = results[OURS], [results[name] for name in winners]
    if all(max(rival.slots) > cell.num_slots for rival in rivals):
        return "they use more slots than there are"
    if error > JUMP and not max(ours.copies):
        return "loads jumped: predicted even, so nothing is copied"
    if error > JUMP:
        return "loads jumped: the prediction was wrong"
    if all(max(rival.moved) > 0 for rival in rivals):
        return "they move experts' owners, unpaid"
    kept = [rival for rival in rivals if not max(rival.moved)]
    if is_traffic and all(np.mean(ours.balance) + LOST_BY < np.mean(r.balance) for r in kept):
        return "bytes buy balance: they are less balanced"
    if not is_traffic and np.mean(ours.planned) <= min(np.mean(r.planned) for r in kept) + LOST_BY:
        return "drift: as well balanced as predicted"
    return "placement"

# SPDX-License-Identifier: Apache-2.0

"""Simulated re-sharding: see `resharding.py`, which prints it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tables import Row

from megatron_fssdp.planning.cost import (
    FORWARD_BACKWARD,
    ComputeRate,
    LayerShape,
    break_even_tokens,
    layer_cost,
)
from megatron_fssdp.planning.moves import Homes, moves_s, plan_moves
from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.predict import SlidingMean
from megatron_fssdp.planning.quotas import balance, rank_loads
from megatron_fssdp.planning.sharding import shard_by_load, shard_for_replicas
from megatron_fssdp.planning.topology import Topology, read_cluster
from megatron_fssdp.planning.worth import saved_by_owners
from megatron_fssdp.simulation.loads import training_series, zipf_series

ROOT = Path(__file__).parent.parent
CLUSTERS = ("v100_32g", "a100_hgx")
LAYERS, EXPERTS, RANKS, TOPK, TOKENS, SEQUENCE = 12, 64, 32, 2, 8192, 2048
SHAPE = LayerShape(hidden_size=768, ffn_size=1536, num_matrices=2)
STATE_BYTES = 18  # bf16 parameter, fp32 gradient, fp32 main parameter, two fp32 Adam moments
WARM_UP = 5  # the predictor's window
INTERVALS = (10, 25, 50, 100)
PRICED_EVERY = 17
PUBLISHED = {10: 1.36, 25: 1.41, 50: 1.34, 100: 1.42}
PUBLISHED_BOTH = {"sharding only": 3.32, "materialization only": 1.27}


@dataclass(frozen=True)
class System:
    """Who owns experts, and how many replicas a rank can hold.

    Attributes:
        name: for the table.
        sharding: "even" for ever, "load" (the paper's algorithm 2) or "swaps" (ours).
        num_slots: replica slots of a rank and layer.
        always: experts move whether or not that pays.
    """

    name: str
    sharding: str
    num_slots: int
    always: bool = False


SYSTEMS = (
    System("neither (EP)", "even", 0),
    System("sharding only", "load", 0),
    System("materialization only", "even", 2),
    System("both", "load", 2),
    System("both, always moved", "load", 2, always=True),
    System("both, our swaps", "swaps", 2),
)


@dataclass(frozen=True, eq=False)
class Case:
    """Loads on a cluster.

    Attributes:
        load: their name.
        cluster: its name.
        counts_TLRE: (T, L, R, E) int64 tokens.
        topology: the ranks, their nodes and links.
        rate: of a rank.
        shape: sizes of a layer.
        non_moe_s: forward time of what is not MoE, of a layer.
    """

    load: str
    cluster: str
    counts_TLRE: Int64Array
    topology: Topology
    rate: ComputeRate
    shape: LayerShape = SHAPE
    non_moe_s: float = 0.0

    def predictions(self) -> list[Int64Array]:
        """Return what a sliding mean expects of each iteration from `WARM_UP` on: (L, E) each."""
        predictor, found = SlidingMean(WARM_UP), []
        for counts_LRE in self.counts_TLRE:
            expected = predictor.predict()
            if expected is not None:
                found.append(expected)
            predictor.update(counts_LRE.sum(axis=1))
        return found[WARM_UP - 1 :]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Means over the iterations of a system.

    Attributes:
        iteration_s: modelled seconds of an iteration, moves included.
        moving_s: the part of it that moves take.
        balance: tokens of a layer's fullest rank over the mean.
        num_looks: how often owners were planned; `num_done` times experts moved.
        num_moves: experts that moved, in all.
    """

    iteration_s: float
    moving_s: float
    balance: float
    num_looks: int
    num_done: int
    num_moves: int


def attention_s(tokens: int, sequence: int, shape: LayerShape, rate: ComputeRate) -> float:
    """Forward seconds of attention: four products with weights, two of the sequence with itself."""
    flops = tokens * (8.0 * shape.hidden_size**2 + 4.0 * sequence * shape.hidden_size)
    return flops / rate.flops_per_s


def cases(num_iterations: int) -> list[Case]:
    """Return all cases."""
    length = WARM_UP + num_iterations
    loads: dict[str, Int64Array] = {}
    for exponent in (0.5, 1.0):
        layers = [
            zipf_series(EXPERTS, RANKS, exponent, length, seed=layer, topk=TOPK, tokens=TOKENS)
            for layer in range(LAYERS)
        ]
        loads[f"zipf {exponent}"] = np.stack(layers, axis=1)
    recorded = training_series(ROOT / "benchmarks" / "data" / "training_loads.npz")
    if recorded is not None:
        scale = TOKENS * TOPK // int(recorded[0, 0, 0].sum())
        loads["recorded"] = np.resize(recorded, (length, *recorded.shape[1:])) * scale
    found = []
    for load, counts_TLRE in loads.items():
        for cluster in CLUSTERS:
            values = read_cluster(ROOT / "configs" / "clusters" / f"{cluster}.yaml")
            num_ranks = counts_TLRE.shape[2]
            topology = Topology.from_mapping(values["topology"], num_ranks)
            if topology.num_nodes == 1:
                topology = replace(
                    topology, node_of_rank=Topology.uniform(num_ranks, 2).node_of_rank
                )
            rate = ComputeRate.from_mapping(values["compute"])
            non_moe_s = attention_s(TOKENS, SEQUENCE, SHAPE, rate)
            found.append(
                Case(load, cluster, counts_TLRE, topology, rate, non_moe_s=non_moe_s),
            )
    return found


def simulate(case: Case, system: System, interval: int) -> Outcome:
    """Price a system on a case; owners are looked at every `interval` iterations."""
    _, num_layers, num_ranks, num_experts = case.counts_TLRE.shape
    settings = PlanSettings(
        num_replica_slots=system.num_slots, spare_tokens=break_even_tokens(case.shape)
    )
    homes = Homes.even(num_layers, num_experts, num_ranks)
    priced, balances = [], []
    moving_s, num_looks, num_done, num_moves = 0.0, 0, 0, 0
    predictions = case.predictions()
    for iteration, load_LE in enumerate(predictions):
        if system.sharding != "even" and iteration % interval == 0:
            num_looks += 1
            new_homes, took_s, moved = _look(case, system, settings, load_LE, homes, interval)
            homes, moving_s, num_moves = new_homes, moving_s + took_s, num_moves + moved
            num_done += moved > 0
        if iteration % PRICED_EVERY == 0:
            counts_LRE = case.counts_TLRE[WARM_UP + iteration]
            seconds, fullest = _price(case, settings, load_LE, counts_LRE, homes.owner_LE)
            priced.append(seconds)
            balances.append(fullest)
    per_iteration_s = moving_s / len(predictions)
    return Outcome(
        iteration_s=statistics.mean(priced) + per_iteration_s,
        moving_s=per_iteration_s,
        balance=statistics.mean(balances),
        num_looks=num_looks,
        num_done=num_done,
        num_moves=num_moves,
    )


def _look(
    case: Case,
    system: System,
    settings: PlanSettings,
    load_LE: Int64Array,
    homes: Homes,
    interval: int,
) -> tuple[Homes, float, int]:
    """Return where experts live next, the seconds of the move, and how many moved."""
    if system.sharding == "swaps":
        owner_LE = shard_for_replicas(load_LE, homes.owner_LE, case.topology.num_ranks)
    else:
        owner_LE = shard_by_load(load_LE, homes.owner_LE, case.topology, system.num_slots)
    new_homes, rounds = plan_moves(homes, owner_LE)
    move_s = moves_s(rounds, case.topology, STATE_BYTES * case.shape.num_params)
    if not system.always:
        gain_s = saved_by_owners(
            load_LE, homes.owner_LE, owner_LE, case.topology, settings, case.shape, case.rate
        )
        if gain_s * interval <= move_s:
            return homes, 0.0, 0
    return new_homes, move_s, sum(map(len, rounds))


def _price(
    case: Case,
    settings: PlanSettings,
    load_LE: Int64Array,
    counts_LRE: Int64Array,
    owner_LE: Int64Array,
) -> tuple[float, float]:
    """Return an iteration's seconds, and the fullest rank's tokens over the mean, of its layers."""
    plan = plan_layers(load_LE, owner_LE, case.topology, settings)
    seconds, fullest = 0.0, []
    for counts_RE, layer in zip(counts_LRE, plan.layers, strict=True):
        quota_EI = balance(counts_RE, layer, case.topology.node_of_rank)
        cost = layer_cost(
            counts_RE, quota_EI, layer, case.topology, case.shape, case.rate, case.non_moe_s
        )
        seconds += cost.total_s + FORWARD_BACKWARD * case.non_moe_s
        load_R = rank_loads(quota_EI, layer)
        fullest.append(float(load_R.max() / load_R.mean()))
    return seconds, statistics.mean(fullest)


def simulated_rows(
    case: Case, intervals: tuple[int, ...] = INTERVALS, systems: tuple[System, ...] = SYSTEMS
) -> list[Row]:
    """Compare the systems on a case. Times, balance and moves are those of the last interval."""
    level = simulate(_levelled(case), SYSTEMS[0], 1)
    outcomes = {"EP, were loads level": dict.fromkeys(intervals, level)}
    for system in systems:
        if system.sharding == "even":  # no interval: the same for all
            outcomes[system.name] = dict.fromkeys(intervals, simulate(case, system, 1))
        else:
            outcomes[system.name] = {each: simulate(case, system, each) for each in intervals}
    last = intervals[-1]
    ep, both = outcomes["neither (EP)"], outcomes["both"]
    rows = []
    for name, by_interval in outcomes.items():
        outcome = by_interval[last]
        row: Row = {
            "load": case.load,
            "cluster": case.cluster,
            "system": name,
            "ms": 1e3 * outcome.iteration_s,
            "moving ms": 1e3 * outcome.moving_s,
            "fullest / mean": outcome.balance,
            "moved / looks": " ".join(
                f"{each.num_done}/{each.num_looks}" if each.num_looks else "-"
                for each in by_interval.values()
            ),
            "num_moves": {each: by_interval[each].num_moves for each in intervals},
        }
        for each in intervals:
            row[f"x EP @{each}"] = ep[each].iteration_s / by_interval[each].iteration_s
        row["both x"] = outcome.iteration_s / both[last].iteration_s
        row["paper"] = PUBLISHED_BOTH.get(name, "-")
        rows.append(row)
    return rows


def _levelled(case: Case) -> Case:
    """Return one iteration of the case in which every expert gets the same."""
    counts_TLRE = case.counts_TLRE[: WARM_UP + 1]
    mean = counts_TLRE.sum(axis=-1, keepdims=True) // counts_TLRE.shape[-1]
    return replace(case, counts_TLRE=np.broadcast_to(mean, counts_TLRE.shape))


def published_row() -> Row:
    """Return the paper's figures in the form of a row."""
    row: Row = {"load": "published", "cluster": "-", "system": "both"}
    row |= dict.fromkeys(("ms", "moving ms", "fullest / mean", "moved / looks"), "-")
    row |= {f"x EP @{each}": PUBLISHED[each] for each in INTERVALS}
    return row | {"both x": 1.0, "paper": "-"}

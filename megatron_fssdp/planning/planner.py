"""The planner: loads, owners, topology and settings in, a plan for all layers out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.materialize import (
    Replicas,
    materialize_by_gain,
    materialize_by_load,
)
from megatron_fssdp.planning.plan import Int64Array, Plan, build_slots
from megatron_fssdp.planning.topology import Topology


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What a planner may spend and when it stops.

    Attributes:
        num_replica_slots: m, replicas that a rank can hold, per layer.
        overlap_degree: t, experts whose parameters can be sent within a layer's non-MoE time;
            None: no limit.
        algorithm: a name in `PLANNERS`.
        balance_tolerance: a layer whose fullest rank has at most (1 + this) times the mean tokens
            gets no further replica ("gain" only).
    """

    num_replica_slots: int = 2
    overlap_degree: int | None = None
    algorithm: str = "gain"
    balance_tolerance: float = 0.01

    def __post_init__(self) -> None:
        if self.num_replica_slots < 0:
            raise ValueError(f"num_replica_slots is {self.num_replica_slots}; the least is 0")
        if self.overlap_degree is not None and self.overlap_degree < 0:
            raise ValueError(f"overlap_degree is {self.overlap_degree}; the least is 0")
        if self.balance_tolerance < 0:
            raise ValueError(f"balance_tolerance is {self.balance_tolerance}; the least is 0")
        if self.algorithm not in PLANNERS:
            raise ValueError(f"algorithm is {self.algorithm!r}; choose from {sorted(PLANNERS)}")


def _by_gain(
    load_LE: Int64Array, owner_LE: Int64Array, topology: Topology, settings: PlanSettings
) -> Replicas:
    return materialize_by_gain(
        load_LE, owner_LE, topology, settings.num_replica_slots, settings.balance_tolerance
    )


def _by_load(
    load_LE: Int64Array, owner_LE: Int64Array, topology: Topology, settings: PlanSettings
) -> Replicas:
    return materialize_by_load(
        load_LE, owner_LE, topology, settings.num_replica_slots, settings.overlap_degree
    )


Materializer = Callable[[Int64Array, Int64Array, Topology, PlanSettings], Replicas]

# gain: ours. load: algorithm 1 of the paper.
PLANNERS: dict[str, Materializer] = {"gain": _by_gain, "load": _by_load}


def plan_layers(
    load_LE: Int64Array | None,
    owner_LE: Int64Array,
    topology: Topology,
    settings: PlanSettings,
) -> Plan:
    """Plan all MoE layers of a model chunk.

    Args:
        load_LE: (L, E) integers, the predicted tokens of each expert; None: no replicas.
        owner_LE: (L, E) int64, the owner of each expert.
        topology: the R ranks and their nodes.
        settings: budgets and algorithm.

    Returns:
        The plan. S = the most experts that a rank owns in a layer + `num_replica_slots`.
    """
    owner_LE = np.array(owner_LE, dtype=np.int64)
    none = np.zeros(0, dtype=np.int64)
    replicas: Replicas = (none, none, none)
    if load_LE is not None:
        if load_LE.shape != owner_LE.shape:
            raise ValueError(f"load_LE is {load_LE.shape}, owner_LE {owner_LE.shape}")
        materialize = PLANNERS[settings.algorithm]
        replicas = materialize(load_LE.astype(np.int64), owner_LE, topology, settings)
    slot_expert_LRS = build_slots(
        owner_LE, *replicas, topology.num_ranks, settings.num_replica_slots
    )
    return Plan(owner_LE=owner_LE, slot_expert_LRS=slot_expert_LRS)

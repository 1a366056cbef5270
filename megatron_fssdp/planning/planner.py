# SPDX-License-Identifier: Apache-2.0

"""The planner: loads, owners, topology and settings in, a plan for all layers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.materialize import materialize_by_gain, materialize_by_load
from megatron_fssdp.planning.plan import Int64Array, LayerPlan, Plan, build_slots
from megatron_fssdp.planning.topology import Topology


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What a planner may spend and when it stops.

    Attributes:
        num_replica_slots: m, replicas that a rank can hold, per layer.
        overlap_degree: t, experts whose parameters a rank can receive within a layer's non-MoE
            time (`cost.overlap_degree`); None: no limit.
        algorithm: a name in `PLANNERS`.
        balance_tolerance: a layer whose fullest rank has at most (1 + this) times the mean tokens
            is balanced and gets no further replica ("gain" only).
        spare_tokens: in layers that need replicas, slots that are left get spare ones, against
            drift and for traffic, if they keep about this many tokens on their node; None: no
            spares ("gain" only).
        spare_slots: slots of a rank that spares may fill; what a layer needs may fill all. None:
            all ("gain" only). `cost.with_paying_spares` sets both.
    """

    num_replica_slots: int = 2
    overlap_degree: int | None = None
    algorithm: str = "gain"
    balance_tolerance: float = 0.01
    spare_tokens: int | None = 1
    spare_slots: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_replica_slots", "overlap_degree", "balance_tolerance", "spare_slots"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; the least is 0")
        if self.algorithm not in PLANNERS:
            raise ValueError(f"algorithm is {self.algorithm!r}; choose from {sorted(PLANNERS)}")


def _by_gain(
    load_LE: Int64Array, owner_LE: Int64Array, topology: Topology, settings: PlanSettings
) -> Int64Array:
    slots = settings.num_replica_slots
    if settings.overlap_degree is not None:
        slots = min(slots, settings.overlap_degree)
    return materialize_by_gain(
        load_LE,
        owner_LE,
        topology,
        slots,
        settings.balance_tolerance,
        settings.spare_tokens,
        settings.spare_slots,
    )


def _by_load(
    load_LE: Int64Array, owner_LE: Int64Array, topology: Topology, settings: PlanSettings
) -> Int64Array:
    return materialize_by_load(
        load_LE, owner_LE, topology, settings.num_replica_slots, settings.overlap_degree
    )


Materializer = Callable[[Int64Array, Int64Array, Topology, PlanSettings], Int64Array]

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
        owner_LE: (L, E) integers, the owner of each expert.
        topology: the R ranks and their nodes.
        settings: budgets and algorithm.

    Returns:
        The plan. S = the most experts that a rank owns in a layer + `num_replica_slots`.

    Raises:
        ValueError: if the shapes differ, or a load is negative.
    """
    owner_LE = np.array(owner_LE, dtype=np.int64)
    replicas_N3 = np.zeros((0, 3), dtype=np.int64)
    if load_LE is not None:
        if load_LE.shape != owner_LE.shape:
            raise ValueError(f"load_LE is {load_LE.shape}, owner_LE {owner_LE.shape}")
        if load_LE.size and load_LE.min() < 0:
            raise ValueError(f"a load is {load_LE.min()} tokens")
        materialize = PLANNERS[settings.algorithm]
        replicas_N3 = materialize(load_LE.astype(np.int64), owner_LE, topology, settings)
    slot_expert_LRS = build_slots(
        owner_LE, replicas_N3, topology.num_ranks, settings.num_replica_slots
    )
    return Plan(owner_LE=owner_LE, slot_expert_LRS=slot_expert_LRS)


def plan_each(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    topology: Topology,
    settings: Sequence[PlanSettings],
) -> list[LayerPlan]:
    """Plan layers with settings of their own, together where they are the same.

    A layer gets what it would get alone, so it can be planned again without the others.
    Arguments as `plan_layers` has them; `settings` are L. Layers may differ in S.
    """
    plans: dict[int, LayerPlan] = {}
    for each in dict.fromkeys(settings):
        layers = [index for index, its in enumerate(settings) if its == each]
        plan = plan_layers(load_LE[layers], owner_LE[layers], topology, each)
        plans.update(zip(layers, plan.layers, strict=True))
    return [plans[index] for index in range(len(settings))]

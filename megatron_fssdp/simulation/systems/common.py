# SPDX-License-Identifier: Apache-2.0

"""What the simulated systems share.

Shape letter beyond those of `planning.plan`: G expert-parallel groups of a pipeline stage, whose
loads may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.cost import ComputeRate, LayerShape
from megatron_fssdp.planning.plan import EMPTY, Int64Array, LayerPlan
from megatron_fssdp.planning.planner import PlanSettings
from megatron_fssdp.planning.predict import DEFAULT_WINDOW
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.costs import GRAD_BYTES, OPTIMIZER_BYTES, Costs
from megatron_fssdp.simulation.flow import Flow, flow_of_owners
from megatron_fssdp.simulation.layers import Traits
from megatron_fssdp.simulation.systems.planning import FUSED_S

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may change about the systems.

    Attributes:
        num_replica_slots: spare slots of a rank and layer, the same for all systems.
        settings: of this project's planner; its slots are `num_replica_slots`.
        predictor: a name in `planning.predict.PREDICTORS`.
        prediction_window: iterations that the sliding mean covers.
        reshard_interval: iterations between two looks at owners (Hecate, FSSDP); 0: never.
        rearrange_interval: iterations between two rearrangements of SmartMoE, FlexMoE and EPLB.
        planning_s: of FSSDP's quotas in a layer and micro-batch; None: see `planning`.
        rival_planning_s: of others that plan after the gate.
        rematerializes: `--fssdp-rematerialize`, for FSSDP.
    """

    num_replica_slots: int = 2
    settings: PlanSettings = field(default_factory=PlanSettings)
    predictor: str = "exponential"
    prediction_window: int = DEFAULT_WINDOW
    reshard_interval: int = 100
    rearrange_interval: int = 25
    planning_s: float | None = None
    rival_planning_s: float = FUSED_S
    rematerializes: bool = False

    @classmethod
    def of_flags(cls, flags: Mapping[str, Any]) -> Options:
        """Return what `--fssdp-*` flags say, such as a preset's; others keep their defaults."""
        default = cls()
        tolerance = flags.get("--fssdp-balance-tolerance", default.settings.balance_tolerance)
        return cls(
            num_replica_slots=flags.get("--fssdp-num-replica-slots", default.num_replica_slots),
            settings=replace(default.settings, balance_tolerance=tolerance),
            predictor=flags.get("--fssdp-predictor", default.predictor),
            prediction_window=flags.get("--fssdp-prediction-window", default.prediction_window),
            reshard_interval=flags.get("--fssdp-reshard-interval", default.reshard_interval),
            rematerializes=bool(flags.get("--fssdp-rematerialize", False)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """Where one layer's experts are in an iteration, and what that costs on the links.

    Attributes:
        flow: of a micro-batch's tokens.
        fetch_R: (R,) seconds until each rank has its replicas' weights.
        return_R: (R,) seconds until gradients are where they belong.
        num_replicas: instances that are fetched, or kept beyond the owners'.
        copied_bytes: of one fetch and one return, all ranks.
        far_bytes: the part of them that crosses between nodes.
    """

    flow: Flow
    fetch_R: Float64Array
    return_R: Float64Array
    num_replicas: int = 0
    copied_bytes: int = 0
    far_bytes: int = 0


class System:
    """Plain EP, and what the others change about it. One object simulates one run.

    Args:
        costs: of the job on its cluster.
        options: what a user may change.
        num_groups: G.

    Attributes:
        owner_LE: (L, E) int64, the owners now.
    """

    name: ClassVar[str] = "ep"
    title: ClassVar[str] = "EP"
    notes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, costs: Costs, options: Options, num_groups: int = 1) -> None:
        self.costs, self.options, self.num_groups = costs, options, num_groups
        layout, shape = costs.job.layout, costs.job.shape
        self.topology: Topology = costs.cluster.topology(costs.group_ranks)
        self.shape: LayerShape = costs.shape
        self.rate: ComputeRate = costs.cluster.rate
        self.num_ranks = layout.ep
        self.owner_LE = shard_evenly(len(shape.moe_layers), shape.num_experts, layout.ep)
        # Experts never leave their pipeline stage: (stages,) slices of the MoE layers.
        ends = np.cumsum([len(costs.moe_layers_of(stage)) for stage in range(layout.pp)]).tolist()
        self.stages = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False) if a < b]
        self.iteration = 0
        self.set_up()

    def set_up(self) -> None:
        """Prepare what a run starts with."""

    @property
    def traits(self) -> Traits:
        """What moves when."""
        return Traits()

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was assumed in this run, besides `notes`."""
        return ()

    @property
    def num_slots(self) -> int:
        """Spare slots of a rank and layer."""
        return self.options.num_replica_slots

    def before_iteration(self) -> tuple[int, float]:
        """Move experts between iterations; return how many, and the seconds it takes."""
        return 0, 0.0

    def place(self, group: int, counts_LRE: Int64Array) -> list[Placed]:
        """Place all layers of an expert-parallel group for the iteration.

        Args:
            group: number of the group.
            counts_LRE: (L, R, E) int64, the true tokens of a micro-batch.
        """
        return [
            self.placed(flow_of_owners(counts_RE, owner_E))
            for counts_RE, owner_E in zip(counts_LRE, self.owner_LE, strict=True)
        ]

    def observe(self, counts_GLRE: Int64Array) -> None:
        """See the iteration's loads, when it is over."""
        self.iteration += 1

    def replica_bytes(self, num_layers: int) -> int:
        """Bytes that a rank of a stage with so many MoE layers holds for replicas."""
        return 0

    def move_bytes(self) -> int:
        """Bytes that a rank needs while experts move."""
        return 0

    # What the subclasses share.

    def placed(self, flow: Flow) -> Placed:
        """Return a placement that copies nothing."""
        zero_R = np.zeros(self.num_ranks)
        return Placed(flow=flow, fetch_R=zero_R, return_R=zero_R)

    def slot_bytes(self, *, has_grads: bool = True, has_optimizer: bool = False) -> int:
        """Bytes of one replica's slot."""
        job = self.costs.job
        each: float = job.param_bytes
        each += GRAD_BYTES if has_grads else 0
        if has_optimizer:
            # In fp32 the parameter itself is the optimizer's copy; cut as owned experts' is.
            state = OPTIMIZER_BYTES - (4 if job.param_bytes == 4 else 0)
            each += state / (job.layout.edp if job.has_distributed_optimizer else 1)
        return round(self.shape.num_params // job.layout.etp * each)

    def two_states(self) -> int:
        """Bytes of two experts' parameters and optimizer state on a rank."""
        return 2 * self.costs.state_bytes // self.costs.job.layout.etp

    def kept_bytes(self, num_layers: int, slots: int) -> int:
        """Bytes of replicas that stay for the iteration.

        Each layer adds its gradients up over the micro-batches; with one they leave at once.
        """
        weights = num_layers * slots * self.slot_bytes(has_grads=False)
        gradients = slots * (self.slot_bytes() - self.slot_bytes(has_grads=False))
        many = self.costs.job.layout.num_microbatches > 1
        return weights + gradients * (num_layers if many else min(num_layers, 1))

    def state_moves_s(
        self, old: Sequence[LayerPlan], new: Sequence[LayerPlan]
    ) -> tuple[int, float]:
        """Return how many instances are new, and the seconds their state takes from their owners.

        Parameters and optimizer state, all at once, on the critical path; stages side by side.
        """
        num, slowest_s = 0, 0.0
        for stage in self.stages:
            bytes_RR = np.zeros((self.num_ranks, self.num_ranks))
            for before, after in zip(old[stage], new[stage], strict=True):
                had, has = _holds(before), _holds(after)
                expert, rank = np.nonzero(has & ~had)
                np.add.at(bytes_RR, (before.owner_E[expert], rank), self.costs.state_bytes)
                num += len(expert)
            slowest_s = max(slowest_s, self.costs.network.exchange_s(bytes_RR))
        return num, slowest_s


def _holds(plan: LayerPlan) -> npt.NDArray[np.bool_]:
    """(E, R) whether a rank has an instance of an expert."""
    rank, slot = np.nonzero(plan.slot_expert_RS != EMPTY)
    holds = np.zeros((plan.num_experts, plan.num_ranks), dtype=bool)
    holds[plan.slot_expert_RS[rank, slot], rank] = True
    return holds

# SPDX-License-Identifier: Apache-2.0

"""The runtime: loads in, plans out, once per iteration, for all MoE layers of this process.

[Note: When a plan changes] Every forward of an iteration, and every replay of activation
recompute in its backward, uses the same plan: plans change in the optimizer step, when no forward
is in flight. The step is seen through torch's own optimizer hook. Ranks of one expert-parallel
group have the same kinds of parameters, so all of them step, or (an overflow) none.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.experts.materialize import Materialization
from megatron_fssdp.experts.quotas import DeviceTables, split_tokens
from megatron_fssdp.planning.plan import EMPTY, Int64Array, LayerPlan, Plan
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.predict import SlidingMean
from megatron_fssdp.planning.quotas import balance, rank_loads, split_source
from megatron_fssdp.planning.schedule import Schedule
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import Topology


@dataclass(frozen=True, eq=False)
class LayerStep:
    """What one layer's forwards need during one iteration: its plan, ready for the device.

    Attributes:
        plan: the layer's plan.
        group: the expert-parallel group.
        topology: which node each of the group's ranks is on.
        device: where the layer computes.
        tolerance: how much fuller than the mean the fullest rank may be where that saves traffic.
    """

    plan: LayerPlan
    group: dist.ProcessGroup
    topology: Topology
    device: torch.device
    tolerance: float

    @property
    def num_physical(self) -> int:
        """Slots of the whole group."""
        return self.plan.num_ranks * self.plan.num_slots

    @cached_property
    def schedule(self) -> Schedule:
        """The copies that make the plan's replicas."""
        return Schedule.from_plan(self.plan)

    @cached_property
    def materialization(self) -> Materialization:
        """This rank's part in them."""
        rank = self.group.rank()
        slots = self.plan.slot_expert_RS[rank]
        owned = [
            slot
            for slot, expert in enumerate(slots.tolist())
            if expert != EMPTY and self.plan.owner_E[expert] == rank
        ]
        return Materialization(self.schedule, self.group, self.plan.num_slots, tuple(owned))

    @cached_property
    def physical_EI(self) -> torch.Tensor:
        """(E, I) int64 on the device: each instance's physical expert, padded with 0."""
        physical_EI = np.maximum(self.plan.instance_physical_EI, 0)
        return torch.from_numpy(physical_EI).to(self.device, non_blocking=True)

    @cached_property
    def _tables(self) -> DeviceTables:
        return DeviceTables.build(self.plan, self.topology.node_of_rank, self.device)

    def split(self, counts_RE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the quotas for true counts.

        Args:
            counts_RE: (R, E) int64 on the device, tokens that each rank routes to each expert.

        Returns:
            (E, I) int64, how many of this rank's tokens go to each instance, and (R,) int64, the
            tokens that each rank computes. On the device; without host synchronisation on CUDA.
        """
        rank = self.group.rank()
        if self.device.type == "cuda":
            return split_tokens(counts_RE, self._tables, rank, self.tolerance)
        counts = counts_RE.numpy()
        nodes = self.topology.node_of_rank
        quota_EI = balance(counts, self.plan, nodes, self.tolerance)
        split_EI = split_source(counts, quota_EI, self.plan, nodes, rank)
        return torch.from_numpy(split_EI), torch.from_numpy(rank_loads(quota_EI, self.plan))


@dataclass(eq=False)
class _LayerState:
    num_experts: int
    group: dist.ProcessGroup
    topology: Topology
    expert_bytes: int
    # Both on the device; read once an iteration.
    counts_RE: torch.Tensor | None = None
    loads_R: torch.Tensor | None = None
    num_forwards: int = 0
    step: LayerStep | None = None


@dataclass(frozen=True, eq=False)
class IterationRecord:
    """What one iteration routed and what became of it. L layers in the order of construction.

    Attributes:
        iteration: iterations that this process had begun before it.
        counts_LRE: int64, tokens by layer, source rank and expert, all micro-batches.
        loads_LR: int64, tokens that each rank computed.
        plans: the layers' plans.
        copied_bytes_L: bytes of parameters that replicas fetched (as many gradient bytes return).
    """

    iteration: int
    counts_LRE: list[Int64Array]
    loads_LR: list[Int64Array]
    plans: list[LayerPlan]
    copied_bytes_L: list[int]

    @property
    def num_replicas(self) -> int:
        """Replicas of all layers."""
        return sum(plan.num_replicas for plan in self.plans)

    def imbalance(self) -> tuple[list[float], list[float]]:
        """Tokens of the fullest rank over the mean, by layer: owners only, and as it ran."""
        before, after = [], []
        for counts_RE, loads_R, plan in zip(
            self.counts_LRE, self.loads_LR, self.plans, strict=True
        ):
            owned_R = np.bincount(
                plan.owner_E, weights=counts_RE.sum(axis=0), minlength=plan.num_ranks
            )
            # A layer that routed nothing is balanced.
            mean = max(owned_R.mean(), 1e-9)
            before.append(float(owned_R.max() / mean) if owned_R.any() else 1.0)
            after.append(float(loads_R.max() / mean) if owned_R.any() else 1.0)
        return before, after


@dataclass(eq=False)
class FSSDPRuntime:
    """Keeps the MoE layers' loads and plans. One per process; layers hold a reference.

    Args:
        config: the `--fssdp-*` settings.
    """

    config: FSSDPConfig
    listeners: list[Callable[[IterationRecord], None]] = field(default_factory=list)
    iteration: int = 0
    _layers: list[_LayerState] = field(default_factory=list)
    _predictors: dict[tuple[int, ...], SlidingMean] = field(default_factory=dict)
    _optimizers: set[int] | None = None
    _topologies: dict[tuple[int, ...], Topology] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._hook = register_optimizer_step_post_hook(self._after_optimizer_step)

    def close(self) -> None:
        """Stop watching the optimizer."""
        self._hook.remove()

    def add_layer(self, num_experts: int, group: dist.ProcessGroup, expert_bytes: int) -> int:
        """Register a MoE layer, whose experts have `expert_bytes` each, and return its index."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._topologies:
            self._topologies[ranks] = self._find_topology(group)
        topology = self._topologies[ranks]
        self._layers.append(_LayerState(num_experts, group, topology, expert_bytes))
        return len(self._layers) - 1

    def layer_shapes(self) -> list[tuple[int, int]]:
        """Return (R, E) of each layer."""
        return [(layer.group.size(), layer.num_experts) for layer in self._layers]

    def _find_topology(self, group: dist.ProcessGroup) -> Topology:
        """Ask every rank of the group for its node. Collective.

        All ranks must agree, or they would make different plans; so a rank's own environment
        (LOCAL_WORLD_SIZE differs between nodes of unequal size) decides nothing.
        """
        per_node = self.config.fssdp_ranks_per_node
        mine = f"node {dist.get_rank() // per_node}" if per_node else socket.gethostname()
        nodes: list[Any] = [None] * group.size()
        dist.all_gather_object(nodes, mine, group=group)
        return Topology.from_hosts(nodes)

    def num_slots(self, index: int) -> int:
        """Return S of a layer: the experts that a rank owns and its replica slots."""
        layer = self._layers[index]
        return layer.num_experts // layer.group.size() + self.config.fssdp_num_replica_slots

    def begin_forward(self, index: int, device: torch.device) -> LayerStep:
        """Return what the layer's forward needs."""
        layer = self._layers[index]
        if layer.step is None:
            # The first iteration: nothing is known of the loads yet, so nobody gets replicas.
            plan = plan_layers(
                None, self._owners(index), layer.topology, self._plan_settings()
            ).layer(0)
            layer.step = self._layer_step(layer, plan, device)
        return layer.step

    def record(self, index: int, counts_RE: torch.Tensor, loads_R: torch.Tensor) -> None:
        """Add a training forward's counts. Replays of activation recompute do not count."""
        if torch._C._current_graph_task_id() != -1:  # inside a backward
            return
        layer = self._layers[index]
        layer.num_forwards += 1
        if layer.counts_RE is None or layer.loads_R is None:
            layer.counts_RE, layer.loads_R = counts_RE.clone(), loads_R.clone()
        else:
            layer.counts_RE += counts_RE
            layer.loads_R += loads_R

    def watch_optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Let only the steps of these end an iteration; until then any optimizer's step does."""
        self._optimizers = {id(optimizer) for optimizer in optimizers}

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        if self._optimizers is not None and id(optimizer) not in self._optimizers:
            return  # another model's, a probe's
        # A step has several torch optimizers (dense, experts): the first closes the books.
        counts = self._close_iteration()
        if counts:
            self._plan(counts)

    def _layer_step(self, layer: _LayerState, plan: LayerPlan, device: torch.device) -> LayerStep:
        return LayerStep(
            plan, layer.group, layer.topology, device, self.config.fssdp_balance_tolerance
        )

    def _owners(self, index: int) -> Int64Array:
        layer = self._layers[index]
        return shard_evenly(1, layer.num_experts, layer.group.size())

    def _plan_settings(self) -> PlanSettings:
        return PlanSettings(
            num_replica_slots=self.config.fssdp_num_replica_slots,
            overlap_degree=self.config.overlap_degree,
            algorithm=self.config.fssdp_planner,
            balance_tolerance=self.config.fssdp_balance_tolerance,
        )

    def _close_iteration(self) -> dict[int, Int64Array]:
        """Report the finished iteration to the listeners.

        Returns:
            The (R, E) int64 counts of each layer that ran, per micro-batch.
        """
        seen = [index for index, layer in enumerate(self._layers) if layer.num_forwards]
        if not seen:
            return {}
        layers = [self._layers[index] for index in seen]
        plans = [layer.step.plan for layer in layers if layer.step is not None]
        counts_LRE, loads_LR = _to_host(layers)
        copied = [
            plan.num_replicas * layer.expert_bytes * layer.num_forwards
            for plan, layer in zip(plans, layers, strict=True)
        ]
        record = IterationRecord(self.iteration, counts_LRE, loads_LR, plans, copied)
        self.iteration += 1
        for listener in self.listeners:
            listener(record)
        mean_counts = {
            index: counts_RE // layer.num_forwards
            for index, layer, counts_RE in zip(seen, layers, counts_LRE, strict=True)
        }
        for layer in layers:
            layer.counts_RE = layer.loads_R = None
            layer.num_forwards = 0
        return mean_counts

    def _plan(self, counts: dict[int, Int64Array]) -> None:
        """Plan all layers of equal shape together, from the loads of one micro-batch."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for index in counts:
            layer = self._layers[index]
            by_shape.setdefault((layer.num_experts, layer.group.size()), []).append(index)
        for indices in by_shape.values():
            predictor = self._predictors.setdefault(
                tuple(indices), SlidingMean(self.config.fssdp_prediction_window)
            )
            predictor.update(np.stack([counts[index].sum(axis=0) for index in indices]))
            first = self._layers[indices[0]]
            plan: Plan = plan_layers(
                predictor.predict(),
                np.concatenate([self._owners(index) for index in indices]),
                first.topology,
                self._plan_settings(),
            )
            for position, index in enumerate(indices):
                layer = self._layers[index]
                assert layer.step is not None
                layer.step = self._layer_step(layer, plan.layer(position), layer.step.device)


def _to_host(layers: list[_LayerState]) -> tuple[list[Int64Array], list[Int64Array]]:
    """Copy all layers' counts and loads: the one device-to-host copy of an iteration."""
    tensors = [layer.counts_RE for layer in layers] + [layer.loads_R for layer in layers]
    present = [tensor for tensor in tensors if tensor is not None]
    flat = torch.cat([tensor.reshape(-1) for tensor in present]).cpu()
    parts = flat.split([tensor.numel() for tensor in present])
    arrays = [part.view(of.shape).numpy() for part, of in zip(parts, present, strict=True)]
    return arrays[: len(layers)], arrays[len(layers) :]

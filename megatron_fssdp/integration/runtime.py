# SPDX-License-Identifier: Apache-2.0

"""The runtime: loads in, plans out, once per iteration, for all MoE layers of this process.

[Note: When a plan changes] Every forward of an iteration, and every replay of activation
recompute in its backward, uses the same plan (or, with --fssdp-calibration, remembers its own):
plans change in the optimizer step, when no forward is in flight. The step is seen through torch's
own optimizer hook. Ranks of one expert-parallel group have the same kinds of parameters, so all of
them step, or (an overflow) none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_fssdp.collectives.lanes import make_lane
from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.experts.materialize import Materializer
from megatron_fssdp.experts.placement import Scheduler
from megatron_fssdp.experts.replicas import ReplicaPool, Transport
from megatron_fssdp.integration import agreement
from megatron_fssdp.integration.records import Calibration, IterationRecord, Traffic
from megatron_fssdp.integration.step import LayerStep, calibrate_step
from megatron_fssdp.planning.cost import ComputeRate, LayerShape, cheapest_schedule
from megatron_fssdp.planning.plan import Int64Array, LayerPlan, Plan
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.predict import SlidingMean
from megatron_fssdp.planning.schedule import Schedule
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import NVLINK, LinkClass, Topology


@dataclass(eq=False)
class _GroupState:
    """What the layers of one expert-parallel group share."""

    topology: Topology
    rate: ComputeRate
    copy_group: dist.ProcessGroup | None
    transport: Transport | None = None
    # With --fssdp-rematerialize only.
    pools: dict[LayerShape, ReplicaPool] = field(default_factory=dict)


@dataclass(eq=False)
class _LayerState:
    name: str
    num_experts: int
    group: dist.ProcessGroup
    shared: _GroupState
    shape: LayerShape | None
    # Both on the device; read once an iteration.
    counts_RE: torch.Tensor | None = None
    loads_R: torch.Tensor | None = None
    num_forwards: int = 0
    step: LayerStep | None = None
    materializer: Materializer | None = None
    calibrations: list[Calibration] = field(default_factory=list)


@dataclass(eq=False)
class FSSDPRuntime:
    """Keeps the MoE layers' loads and plans. One per process; layers hold a reference.

    Args:
        config: the `--fssdp-*` settings.

    Attributes:
        listeners: called with each iteration's record.
        iteration: iterations that this process had begun before the current one.
        num_microbatches: how many micro-batches an iteration has; None: not known.
    """

    config: FSSDPConfig
    listeners: list[Callable[[IterationRecord], None]] = field(default_factory=list)
    iteration: int = 0
    num_microbatches: Callable[[], int] | None = None
    _layers: list[_LayerState] = field(default_factory=list)
    _predictors: dict[tuple[int, ...], SlidingMean] = field(default_factory=dict)
    _optimizers: set[int] | None = None
    _groups: dict[tuple[int, ...], _GroupState] = field(default_factory=dict)
    _plan_s: float = 0.0

    def __post_init__(self) -> None:
        self._hook = register_optimizer_step_post_hook(self._after_optimizer_step)

    def close(self) -> None:
        """Stop watching the optimizer, and end the threads."""
        self._hook.remove()
        for group in self._groups.values():
            if group.transport is not None:
                group.transport.lane.close()

    def add_layer(
        self, num_experts: int, group: dist.ProcessGroup, name: str, shape: LayerShape | None
    ) -> int:
        """Register a MoE layer and return its index. Collective over the group.

        Args:
            num_experts: E.
            group: the expert-parallel group.
            name: in messages.
            shape: its sizes; None: the layer is only watched.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._groups:
            topology, rate = agreement.find_cluster(group, self.config)
            copies = None if shape is None else agreement.make_copy_group(group)
            self._groups[ranks] = _GroupState(topology, rate, copies)
        self._layers.append(_LayerState(name, num_experts, group, self._groups[ranks], shape))
        return len(self._layers) - 1

    def rename_layer(self, index: int, name: str) -> None:
        """Give a layer its name in messages, before its first forward."""
        self._layers[index].name = name

    def layer_shapes(self) -> list[tuple[int, int]]:
        """Return (R, E) of each layer."""
        return [(layer.group.size(), layer.num_experts) for layer in self._layers]

    def outlook(self) -> tuple[int, list[LayerShape], LinkClass]:
        """Return replica slots, the layers' shapes, and the slowest link class among the groups."""
        shapes = [layer.shape for layer in self._layers if layer.shape is not None]
        links = [
            group.topology.inter_node if group.topology.num_nodes > 1 else group.topology.intra_node
            for group in self._groups.values()
        ]
        slowest = min(links, key=lambda link: link.bytes_per_s, default=NVLINK)
        return self.config.fssdp_num_replica_slots, shapes, slowest

    def num_slots(self, index: int) -> int:
        """Return S of a layer: the experts that a rank owns and its replica slots."""
        layer = self._layers[index]
        return layer.num_experts // layer.group.size() + self.config.fssdp_num_replica_slots

    def materializer(self, index: int, device: torch.device) -> Materializer:
        """Return what fills a layer's slots; made when its device is known."""
        layer = self._layers[index]
        if layer.materializer is None:
            layer.materializer = self._make_materializer(layer, device)
        return layer.materializer

    def _make_materializer(self, layer: _LayerState, device: torch.device) -> Materializer:
        config, shared = self.config, layer.shared
        if shared.transport is None:
            assert shared.copy_group is not None, "a layer that is only watched copies nothing"
            lane = make_lane(device, overlap=config.fssdp_overlap == "on")
            shared.transport = Transport(shared.copy_group, lane)
        pool = ReplicaPool(config.fssdp_num_replica_slots)
        if config.fssdp_rematerialize and layer.shape is not None:
            pool = shared.pools.setdefault(layer.shape, pool)
        sends_once = not (config.fssdp_rematerialize or config.fssdp_calibration)
        return Materializer(
            shared.transport,
            pool,
            layer.name,
            sums_in_fp32=config.fssdp_grad_dtype == "fp32",
            num_backwards=self.num_microbatches if sends_once else None,
        )

    def begin_forward(self, index: int, device: torch.device) -> LayerStep:
        """Return what the layer's forward needs."""
        layer = self._layers[index]
        if layer.step is None:
            # The first iteration: nothing is known of the loads yet, so nobody gets replicas.
            plan = plan_layers(
                None, self._owners(index), layer.shared.topology, self._plan_settings()
            ).layer(0)
            layer.step = self._layer_step(layer, plan, device)
        return layer.step

    def calibrate(self, index: int, counts_RE: torch.Tensor) -> LayerStep:
        """Return the layer's step, improved for true counts where that pays.

        The improved plan stays until the iteration ends. Reads the counts on the host.
        """
        layer = self._layers[index]
        step = layer.step
        assert step is not None, "a forward has begun"
        assert layer.shape is not None, "a layer that is only watched is not calibrated"
        if is_in_backward():
            return step
        found = calibrate_step(
            step, counts_RE.cpu().numpy(), self._plan_settings(), layer.shape, layer.shared.rate
        )
        if found is None:
            return step
        layer.step, calibration = found
        layer.calibrations.append(calibration)
        return layer.step

    def record(self, index: int, counts_RE: torch.Tensor, loads_R: torch.Tensor) -> None:
        """Add a training forward's counts. Replays of activation recompute do not count."""
        if is_in_backward():
            return
        layer = self._layers[index]
        layer.num_forwards += 1
        if layer.counts_RE is None or layer.loads_R is None:
            layer.counts_RE, layer.loads_R = counts_RE.clone(), loads_R.clone()
        else:
            layer.counts_RE += counts_RE
            layer.loads_R += loads_R

    def forget_replicas(self) -> None:
        """Parameters have changed: fetch replicas anew before they are used again."""
        for layer in self._layers:
            if layer.materializer is not None:
                layer.materializer.pool.forget()

    def watch_optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Let only the steps of these end an iteration; until then any optimizer's step does."""
        self._optimizers = {id(optimizer) for optimizer in optimizers}

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        if self._optimizers is not None and id(optimizer) not in self._optimizers:
            return  # another model's, a probe's
        for layer in self._layers:
            if layer.materializer is not None:
                layer.materializer.settle()
        self.forget_replicas()
        # A step has several torch optimizers (dense, experts): the first closes the books.
        counts = self._close_iteration()
        if counts:
            begin = time.perf_counter()
            self._plan(counts)
            self._plan_s = time.perf_counter() - begin

    def _layer_step(self, layer: _LayerState, plan: LayerPlan, device: torch.device) -> LayerStep:
        return LayerStep(
            plan,
            layer.group,
            layer.shared.topology,
            device,
            self.config.fssdp_balance_tolerance,
            self._scheduler(layer),
        )

    def _scheduler(self, layer: _LayerState) -> Scheduler:
        topology, shape = layer.shared.topology, layer.shape
        if self.config.fssdp_collectives == "flat" or shape is None:
            return Schedule.flat
        if self.config.fssdp_collectives == "tree":
            return lambda plan, present: Schedule.tree(plan, topology.node_of_rank, present)
        return lambda plan, present: cheapest_schedule(plan, topology, shape.expert_bytes, present)

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
        gathers, reductions = zip(*map(_traffic, layers), strict=True)
        record = IterationRecord(
            self.iteration,
            counts_LRE,
            loads_LR,
            plans,
            list(gathers),
            list(reductions),
            self._replica_bytes(),
            self._plan_s,
            [calibration for layer in layers for calibration in layer.calibrations],
        )
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
            layer.calibrations.clear()
        return mean_counts

    def _replica_bytes(self) -> int:
        """Memory of all pools and buffers."""
        materializers = [layer.materializer for layer in self._layers if layer.materializer]
        pools = {id(each.pool): each.pool for each in materializers}
        pool_bytes = sum(pool.num_bytes for pool in pools.values())
        shared = [group.transport for group in self._groups.values() if group.transport]
        return pool_bytes + sum(transport.num_bytes for transport in shared)

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
            layers = [self._layers[index] for index in indices]
            plan: Plan = plan_layers(
                predictor.predict(),
                np.concatenate([self._owners(index) for index in indices]),
                layers[0].shared.topology,
                self._plan_settings(),
            )
            for position, layer in enumerate(layers):
                assert layer.step is not None
                layer.step = self._layer_step(layer, plan.layer(position), layer.step.device)
            if self.config.fssdp_check_plans:
                device = layers[0].step.device if layers[0].step else torch.device("cpu")
                names = [layer.name for layer in layers]
                agreement.check_plans(plan.layers, names, layers[0].group, device)


def is_in_backward() -> bool:
    """Whether this is a replay of activation recompute."""
    return torch._C._current_graph_task_id() != -1


def _traffic(layer: _LayerState) -> tuple[Traffic, Traffic]:
    """Read a layer's accounts, and start them anew."""
    each = layer.materializer
    if each is None:
        return Traffic(), Traffic()
    of = partial(Traffic.of, node_of_rank=layer.shared.topology.node_of_rank)
    result = of(each.gathers, each.gather_meter), of(each.reductions, each.reduce_meter)
    each.gathers.clear()
    each.reductions.clear()
    return result


def _to_host(layers: list[_LayerState]) -> tuple[list[Int64Array], list[Int64Array]]:
    """Copy all layers' counts and loads: the one device-to-host copy of an iteration."""
    tensors = [layer.counts_RE for layer in layers] + [layer.loads_R for layer in layers]
    present = [tensor for tensor in tensors if tensor is not None]
    flat = torch.cat([tensor.reshape(-1) for tensor in present]).cpu()
    parts = flat.split([tensor.numel() for tensor in present])
    arrays = [part.view(of.shape).numpy() for part, of in zip(parts, present, strict=True)]
    return arrays[: len(layers)], arrays[len(layers) :]

# SPDX-License-Identifier: Apache-2.0

"""The runtime: loads in, plans out, once per iteration, for all MoE layers of this process.

[Note: When a plan changes] Every forward of an iteration, and every replay of activation
recompute in its backward, uses the same plan (with --fssdp-calibration, the layer's latest one):
plans change in the optimizer step, when no forward is in flight. The step is seen through torch's
own optimizer hooks. Ranks of one expert-parallel group have the same kinds of parameters, so all of
them step, or (an overflow) none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.experts.materialize import Materializer
from megatron_fssdp.integration import agreement
from megatron_fssdp.integration.copies import make_materializer, make_scheduler
from megatron_fssdp.integration.owners import (
    Owners,
    is_in_backward,
    plan_settings,
)
from megatron_fssdp.integration.records import IterationRecord
from megatron_fssdp.integration.state import (
    GroupState,
    LayerState,
    read_counts,
    read_traffic,
    replica_bytes,
)
from megatron_fssdp.integration.step import LayerStep, calibrate_step
from megatron_fssdp.planning.cost import LayerShape
from megatron_fssdp.planning.moves import Homes
from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.predict import Predictor, make_predictor
from megatron_fssdp.planning.topology import NVLINK, LinkClass

STATE_VERSION = 2


@dataclass(eq=False)
class FSSDPRuntime:
    """Keeps the MoE layers' loads and plans. One per process; layers hold a reference.

    Args:
        config: the `--fssdp-*` settings.

    Attributes:
        owners: who owns which expert.
        listeners: called with each iteration's record.
        iteration: iterations that this process had begun before the current one.
        num_microbatches: how many micro-batches an iteration has; None: not known.
    """

    config: FSSDPConfig
    listeners: list[Callable[[IterationRecord], None]] = field(default_factory=list)
    iteration: int = 0
    num_microbatches: Callable[[], int] | None = None
    _layers: list[LayerState] = field(default_factory=list)
    _predictors: dict[tuple[int, ...], Predictor] = field(default_factory=dict)
    _optimizers: set[int] | None = None
    _groups: dict[tuple[int, ...], GroupState] = field(default_factory=dict)
    _plan_s: float = 0.0
    _planned_for: int = 1  # micro-batches
    owners: Owners = field(init=False)

    def __post_init__(self) -> None:
        self.owners = Owners(self.config, self._layers, self.microbatches)
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_optimizer_step),
            register_optimizer_step_post_hook(self._after_optimizer_step),
        )

    def microbatches(self) -> int:
        """Return how many micro-batches an iteration has, now; 1: not known."""
        return 1 if self.num_microbatches is None else self.num_microbatches()

    def close(self) -> None:
        """Stop watching the optimizer, and end the threads."""
        for hook in self._hooks:
            hook.remove()
        for group in self._groups.values():
            if group.transport is not None:
                group.transport.lane.close()

    def add_layer(
        self,
        num_experts: int,
        group: dist.ProcessGroup,
        tp_ep_group: dist.ProcessGroup,
        shape: LayerShape | None,
        name: str = "a MoE layer",
    ) -> int:
        """Register a MoE layer and return its index. Collective over `tp_ep_group`.

        Args:
            num_experts: E.
            group: the expert-parallel group.
            tp_ep_group: its ranks with their expert-tensor-parallel peers.
            shape: its sizes; None: the layer is only watched.
            name: in messages.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._groups:
            cluster = agreement.find_cluster(tp_ep_group, self.config, group.size())
            self._groups[ranks] = GroupState(*cluster)
        shared = self._groups[ranks]
        self._layers.append(LayerState(name, num_experts, group, tp_ep_group, shared, shape))
        return len(self._layers) - 1

    def make_copy_groups(self) -> None:
        """Give copies communicators of their own. Collective over the world.

        On the expert-parallel group itself they would queue behind the tokens' all-to-all.
        """
        wanted = [ranks for ranks, group in self._groups.items() if group.copy_group is None]
        made = agreement.make_groups(wanted, "FSSDP_COPIES")
        for ranks in wanted:
            self._groups[ranks].copy_group = made[ranks]

    def number_layer(self, index: int, number: int) -> None:
        """Give a layer its number in the model, which messages name, before its first forward."""
        self._layers[index].number, self._layers[index].name = number, f"MoE layer {number}"

    @property
    def layers(self) -> Sequence[LayerState]:
        """What is kept of each layer, by index."""
        return self._layers

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

    def materializer(self, index: int, device: torch.device) -> Materializer:
        """Return what fills a layer's slots; made when its device is known."""
        layer = self._layers[index]
        if layer.shared.copy_group is None:
            self.make_copy_groups()
        if layer.materializer is None:
            layer.materializer = make_materializer(
                layer, self.config, self.num_microbatches, device
            )
        return layer.materializer

    def begin_forward(self, index: int, device: torch.device) -> LayerStep:
        """Return what the layer's forward needs."""
        layer = self._layers[index]
        if layer.step is None:
            # Where nothing is known of the loads yet nobody gets replicas.
            load_LE = None if layer.predicted_E is None else layer.predicted_E[None]
            (plan,) = self.owners.plan_alike(load_LE, [index], self._planned_for)
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
            step,
            counts_RE.cpu().numpy(),
            plan_settings(self.config),
            layer.shape,
            layer.shared.rate,
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

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        if self._optimizers is None or id(optimizer) in self._optimizers:
            for layer in self._layers:
                if layer.materializer is not None:
                    layer.materializer.settle()

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        if self._optimizers is not None and id(optimizer) not in self._optimizers:
            return  # another model's, a probe's
        self.forget_replicas()
        # A step has several torch optimizers (dense, experts): the first closes the books.
        counts = self._close_iteration()
        if counts:
            begin = time.perf_counter()
            self._plan(counts)
            self._plan_s = time.perf_counter() - begin
            self.owners.end_iteration(self.iteration)

    def _layer_step(self, layer: LayerState, plan: LayerPlan, device: torch.device) -> LayerStep:
        return LayerStep(
            plan,
            layer.group,
            layer.shared.topology,
            device,
            self.config.fssdp_balance_tolerance,
            self.config.fssdp_quotas,
            make_scheduler(layer, self.config),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the loads seen and the owners, in tensors and plain values."""
        return {
            "version": STATE_VERSION,
            # Plans that are made again must be the same, whatever the next iteration has.
            "num_microbatches": self._planned_for,
            "owners": self.owners.state_dict(),
            "loads": [
                {
                    "layers": list(indices),
                    "predictor": self.config.fssdp_predictor,
                    "state": {key: torch.tensor(value) for key, value in each.state_dict().items()},
                }
                for indices, each in self._predictors.items()
            ],
        }

    def _new_predictor(self, kind: str) -> Predictor:
        return make_predictor(kind, self.config.fssdp_prediction_window)

    def check_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state, proved to be one.

        Raises:
            ValueError, KeyError, TypeError: it is not.
        """
        if state["version"] != STATE_VERSION:
            raise ValueError(f"its format is {state['version']}, this reads {STATE_VERSION}")
        if state["num_microbatches"] < 1:
            raise ValueError("its plans are for no micro-batch")
        for each in state["owners"]:
            Homes(each["owner"].numpy(), each["home"].numpy())
        for each in state["loads"]:
            predicted_LE = self._read_predictor(each).predict()
            if predicted_LE is not None and (predicted_LE.ndim != 2 or predicted_LE.min() < 0):
                raise ValueError("its loads are no counts of tokens")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> str:
        """Take over a checked state; what does not fit this model is left out.

        Returns:
            One sentence on what was taken.
        """
        # Where owners may not change, something else may keep state by place.
        owners = "experts start even: their owners are fixed"
        if self.config.reshard_interval:
            owners = self.owners.load_state_dict(state["owners"])
        num_layers, self._planned_for = 0, state["num_microbatches"]
        for each in state["loads"]:
            indices = tuple(each["layers"])
            predictor = self._read_predictor(each)
            predicted_LE = predictor.predict()
            known = each["predictor"] == self.config.fssdp_predictor
            if not known or any(index >= len(self._layers) for index in indices):
                continue
            sizes = {(len(indices), self._layers[index].num_experts) for index in indices}
            if predicted_LE is None or sizes != {predicted_LE.shape}:
                continue
            self._predictors[indices] = predictor
            for index, load_E in zip(indices, predicted_LE, strict=True):
                self._layers[index].predicted_E = load_E
                self._layers[index].step = None
            num_layers += len(indices)
        return f"loads of {num_layers} MoE layers in the checkpoint; {owners}"

    def _read_predictor(self, saved: dict[str, Any]) -> Predictor:
        predictor = self._new_predictor(saved["predictor"])
        predictor.load_state_dict({key: value.tolist() for key, value in saved["state"].items()})
        return predictor

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
        counts_LRE, loads_LR = read_counts(layers)
        gathers, reductions = zip(*map(read_traffic, layers), strict=True)
        record = IterationRecord(
            self.iteration,
            counts_LRE,
            loads_LR,
            plans,
            list(gathers),
            list(reductions),
            replica_bytes(self._layers, self._groups.values()),
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

    def _plan(self, counts: dict[int, Int64Array]) -> None:
        """Plan all layers of equal shape together, from the loads of one micro-batch."""
        self._planned_for = self.microbatches()
        by_shape: dict[tuple[int, int, LayerShape | None], list[int]] = {}
        for index in counts:
            layer = self._layers[index]
            key = layer.num_experts, layer.group.size(), layer.shape
            by_shape.setdefault(key, []).append(index)
        for indices in by_shape.values():
            predictor = self._predictors.get(tuple(indices))
            if predictor is None:
                predictor = self._new_predictor(self.config.fssdp_predictor)
                self._predictors[tuple(indices)] = predictor
            predictor.update(np.stack([counts[index].sum(axis=0) for index in indices]))
            predicted_LE = predictor.predict()
            assert predicted_LE is not None, "there was an update"
            self._make_plans(indices, predicted_LE)

    def _make_plans(self, indices: Sequence[int], predicted_LE: Int64Array) -> None:
        """Plan layers of equal shape for the (L, E) loads that are predicted."""
        layers = [self._layers[index] for index in indices]
        plans = self.owners.plan_alike(predicted_LE, indices, self._planned_for)
        for index, layer, load_E, plan in zip(indices, layers, predicted_LE, plans, strict=True):
            assert layer.step is not None
            layer.predicted_E = load_E
            # Layers are planned with the slots of the one that needs most.
            own = plan.with_slots(self.owners.num_slots(index))
            layer.step = self._layer_step(layer, own, layer.step.device)
            # Made here, with the plan: the first forward would wait for it.
            _ = layer.step.placement.schedule
        if self.config.fssdp_check_plans:
            steps = {layer.name: layer.step for layer in layers if layer.step is not None}
            agreement.check_plans(steps, layers[0].tp_ep_group)

# SPDX-License-Identifier: Apache-2.0

"""FSSDPMoELayer: Megatron's MoE layer with physical expert slots behind its logical experts.

Shape letters: T tokens of this rank, E experts, R expert-parallel ranks, Z shards of an expert (the
ranks of expert tensor parallelism), I instances of an expert.

Router, aux losses, shared experts, token dispatcher and expert module are Megatron's. Between the
router and the dispatcher the routing map is translated from logical experts to slots, and the
experts compute with the slots' weights. What is added to a stock forward, in order:

    (attention)  before it, in a hook of the transformer layer: replicas start to be fetched
    route        stock
    preprocess   count tokens -> quotas -> translate the routing map, then stock
    dispatch     stock, told that the layer has (ranks * slots) experts
    experts      wait for the replicas; stock module on the slots' weights
    combine      stock
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fssdp.experts.materialize import SlotWeights, Visit
from megatron_fssdp.experts.routing import share_of, translate_routing
from megatron_fssdp.integration.fused_dispatch import FusedAlltoAllDispatcher, choose_fused
from megatron_fssdp.integration.ownership import LayerHomes, Ownership
from megatron_fssdp.integration.runtime import FSSDPRuntime
from megatron_fssdp.integration.slot_experts import build_slot_experts
from megatron_fssdp.integration.step import LayerStep
from megatron_fssdp.integration.told_dispatch import ToldAlltoAllDispatcher
from megatron_fssdp.planning.cost import LayerShape


class FSSDPMoELayer(MoELayer):
    """A MoE layer whose hot experts are replicated for the iteration.

    Takes MoELayer's arguments and the runtime that plans for all layers of the process.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        *,
        runtime: FSSDPRuntime,
        **options: Any,
    ) -> None:
        groups = pg_collection if pg_collection is not None else get_default_pg_collection()
        # The options that not every version has, such as 0.18's name.
        super().__init__(config, submodules, layer_number, groups, is_mtp_layer, **options)
        self._runtime = runtime
        self._groups = groups
        self._dispatcher_type = type(self.token_dispatcher)
        # Whether the fused schedule is used; None: asked in the first forward.
        self._is_fused = self._asks_for_fused(runtime.config.fssdp_etp_schedule)
        shape = _shape(config, runtime, groups.expt_tp.size())
        self._index = runtime.add_layer(config.num_moe_experts, groups.ep, groups.tp_ep, shape)
        self._build_slots(runtime.owners.num_slots(self._index))
        runtime.owners.own(
            self._index,
            # Asked late: _build_slots replaces the slots' experts, and those must not live on.
            LayerHomes(self.experts, lambda home: self._slot_experts.home_weights(home)),
            self._build_slots,
        )
        self._visit: Visit | None = None
        self._slot_weights: SlotWeights | None = None
        self._predecessor: FSSDPMoELayer | None = None
        self._is_trained: bool | None = None
        self.register_load_state_dict_post_hook(lambda *unused: runtime.forget_replicas())

    def _build_slots(self, num_slots: int) -> None:
        """Build what depends on the number of slots; they hold no parameters."""
        self._build_dispatcher(num_slots)
        # Kept out of the module tree: state_dict, parameters() and DDP see a stock layer.
        object.__setattr__(
            self,
            "_slot_experts",
            build_slot_experts(self.experts, num_slots, self.submodules.experts, self._groups),
        )

    def _build_dispatcher(self, num_slots: int) -> None:
        kind: type = FusedAlltoAllDispatcher if self._is_fused else self._dispatcher_type
        if kind is MoEAlltoAllTokenDispatcher:
            kind = ToldAlltoAllDispatcher
        self.token_dispatcher: Any = _build_physical_dispatcher(
            kind, self.config, num_slots, self._groups
        )
        if self.shared_expert_overlap:
            # It runs inside the dispatcher, between the tokens' messages.
            self.token_dispatcher.set_shared_experts(self.shared_experts)

    def _asks_for_fused(self, schedule: str) -> bool | None:
        is_possible = self._dispatcher_type is MoEAlltoAllTokenDispatcher
        if self._groups.expt_tp.size() == 1 or not is_possible or schedule == "megatron":
            return False
        if schedule == "fused":
            return True
        # The fused schedule adds shards' results in the activations' type, Megatron in that of the
        # probabilities: auto never trades precision for time.
        probs_bytes = {None: 0, "fp32": 4, "fp64": 8}[self.config.moe_router_dtype]
        return None if probs_bytes <= self.config.params_dtype.itemsize else False

    def set_layer_number(self, layer_number: int) -> None:
        """Take the number that the transformer layer gives; messages name it."""
        super().set_layer_number(layer_number)
        self._runtime.number_layer(self._index, number_in_model(self, layer_number))

    def start_replicas(self) -> None:
        """Start to fetch this forward's replicas: call it before the layer's attention."""
        self._runtime.owners.before_forward(self._index)
        self._visit = self._launch(self._runtime.begin_forward(self._index, self._device))

    def follow(self, predecessor: FSSDPMoELayer) -> None:
        """Tell the layer whose backward follows this one's, to fetch its replicas ahead."""
        # Looked up late: a materializer exists once its layer has run.
        object.__setattr__(self, "_predecessor", predecessor)

    def share_homes(self, layers: Sequence[FSSDPMoELayer]) -> Ownership:
        """Let the experts of these layers, this one among them, live in each other's parameters."""
        return self._runtime.owners.share_homes([layer._index for layer in layers])

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> Any:
        """Translate the routing to slots, then prepare the dispatch."""
        step = self._runtime.begin_forward(self._index, self._device)
        if self._visit is None:
            # Nobody called before the attention: a replay of recompute, a bare layer.
            self._visit = self._launch(step)
        if self._is_fused is None:
            num_rows = len(routing_map) * self.config.moe_router_topk
            layer = self._runtime.layers[self._index]
            self._is_fused = choose_fused(layer, num_rows, self._device)
            self._build_dispatcher(self._runtime.owners.num_slots(self._index))
        counts_RZE = self._count(routing_map, self._visit)
        counts_RE = counts_RZE.sum(dim=1)
        if self._runtime.config.fssdp_quotas == "host":
            counts_RE = counts_RE.cpu()  # waits for the device
        if self._runtime.config.fssdp_calibration and self.training:
            step = self._runtime.calibrate(self._index, counts_RE)
            self._visit.move_to(step.placement)
        split = step.split(counts_RE)
        if self.training:
            self._runtime.record(self._index, counts_RE, split.loads_R)
        split_EI = split.split_EI
        if counts_RZE.shape[1] > 1:
            mine_ZE, shard = counts_RZE[self._groups.ep.rank()], self._groups.expt_tp.rank()
            split_EI = share_of(split_EI, mine_ZE, shard)
        elif split.messages and isinstance(self.token_dispatcher, ToldAlltoAllDispatcher):
            self.token_dispatcher.tell(split.messages)
        routing_map, probs = translate_routing(
            routing_map, probs, split_EI, step.physical_EI, step.num_physical
        )
        self._slot_weights = self._visit.arrive()
        return super().preprocess(hidden_states, probs, routing_map)

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Run the slots' experts on the dispatched tokens."""
        rows, tokens_per_slot, row_probs = self.token_dispatcher.dispatch_postprocess(
            hidden_states, probs
        )
        # Taken, not read: a second forward of this layer (another micro-batch, or the replay of
        # activation recompute) must never see the weights of the first.
        visit, self._visit = self._visit, None
        assert visit is not None, "preprocess starts a visit"
        weights, self._slot_weights = self._slot_weights, None
        assert weights is not None, "preprocess gives the weights"
        self._wait_for_parameters()
        visit.wait()
        output = self._slot_experts(rows, tokens_per_slot, row_probs, weights, visit.version)
        visit.guard(output, weights)
        return self.token_dispatcher.combine_preprocess(output), None

    def _count(self, routing_map: torch.Tensor, visit: Visit) -> torch.Tensor:
        try:
            return gather_counts(routing_map, self._groups.tp_ep, self._groups.ep.size())
        except RuntimeError as error:
            # A rank that died breaks this exchange first; copies under way tell who it was.
            visit.wait()
            raise RuntimeError(
                f"counting the tokens of MoE layer {self.layer_number} in the expert-parallel "
                f"group failed: {error}"
            ) from error

    @property
    def _device(self) -> torch.device:
        return next(self.experts.parameters()).device

    def _launch(self, step: LayerStep) -> Visit:
        if self._runtime.config.fssdp_num_replica_slots:
            # What is sent is read now. On all ranks, also those that send nothing: waiting starts
            # DDP's next gathers, and expert-data-parallel peers must start them in one order.
            self._wait_for_parameters()
        materializer = self._runtime.materializer(self._index, self._device)
        materializer.sums.in_place = self._slot_experts.in_place
        predecessor = self._predecessor
        if predecessor is not None and materializer.predecessor is None:
            materializer.predecessor = self._runtime.materializer(
                predecessor._index, predecessor._device
            )
        materializer.is_accounted = self.training
        ownership, position = self._runtime.owners.home(self._index)
        return materializer.launch(
            step.placement,
            ownership.owned_weights(position),
            ownership.weights(0),
            is_trained=self._is_any_expert_trained(self._device),
        )

    def _is_any_expert_trained(self, device: torch.device) -> bool:
        # Asked once: some ranks' experts may all be frozen, and the ranks must agree. Freezing
        # comes before DDP, so it does not change after the first forward.
        if self._is_trained is None:
            trained = any(p.requires_grad for p in self.experts.parameters())
            flag = torch.tensor([int(trained)], device=device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.ep_group)
            self._is_trained = bool(flag.item())
        return self._is_trained

    def _wait_for_parameters(self) -> None:
        # With --overlap-param-gather DDP waits for a parameter in the forward pre-hook of the
        # module that registers it. Those modules' forward never runs here, so run their hooks.
        ownership, position = self._runtime.owners.home(self._index)
        for experts in ownership.hosts(position):
            for module in experts.modules():
                for hook in module._forward_pre_hooks.values():
                    hook(module, ())


def number_in_model(layer: MoELayer, layer_number: int) -> int:
    """Count MTP's layers, which Megatron numbers from 1 again, on from the decoder's."""
    before: int = layer.config.num_layers if layer.is_mtp_layer else 0
    return before + layer_number


def _shape(config: TransformerConfig, runtime: FSSDPRuntime, num_shards: int) -> LayerShape:
    """Read a layer's sizes off Megatron's settings."""
    width = config.params_dtype.itemsize
    return LayerShape(
        hidden_size=config.hidden_size,
        ffn_size=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        num_matrices=3 if config.gated_linear_unit else 2,
        param_bytes=width,
        grad_bytes=max(width, 4) if runtime.config.fssdp_grad_dtype == "fp32" else width,
        activation_bytes=width,
        num_shards=num_shards,
    )


def _build_physical_dispatcher(
    kind: type, config: TransformerConfig, num_slots: int, groups: ProcessGroupCollection
) -> Any:
    """Build a stock dispatcher for (ranks * slots) experts."""
    physical_config = copy.copy(config)
    physical_config.num_moe_experts = groups.ep.size() * num_slots
    first = groups.ep.rank() * num_slots
    return kind(
        num_slots,
        list(range(first, first + num_slots)),
        config=physical_config,
        pg_collection=groups,
    )


def gather_counts(
    routing_map_TE: torch.Tensor, tp_ep_group: dist.ProcessGroup, num_ranks: int
) -> torch.Tensor:
    """Ask every rank how many tokens it routes to every expert. Collective.

    Args:
        routing_map_TE: (T, E) bool, this rank's.
        tp_ep_group: of expert and expert tensor parallelism together; an expert-parallel rank's
            shards follow each other.
        num_ranks: R, expert-parallel ranks.

    Returns:
        (R, Z, E) int64, of the Z shards of each expert-parallel rank.
    """
    counts_E = routing_map_TE.sum(dim=0, dtype=torch.int64)
    counts = counts_E.new_empty(tp_ep_group.size() * counts_E.numel())
    dist.all_gather_into_tensor(counts, counts_E, group=tp_ep_group)
    return counts.view(num_ranks, -1, counts_E.numel())

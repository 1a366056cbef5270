# SPDX-License-Identifier: Apache-2.0

"""Run Megatron's expert modules on slot weights instead of their own parameters.

The stock experts module (TEGroupedMLP, or SequentialMLP without Transformer Engine) stays the
owner of the parameters: their names, order, initialization, DDP buckets and checkpoint entries are
those of plain expert parallelism. Its forward is not used. A second module with one expert per
slot and no parameters of its own computes with the weights that it is handed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch.func import functional_call

from megatron_fssdp.experts.compute import RowGroups, grouped_linear, has_grouped_gemm
from megatron_fssdp.experts.materialize import SlotWeights


class SlotExperts(Protocol):
    """An expert computation whose weights are supplied with each call.

    Attributes:
        in_place: for each of an expert's W weights, whether the backward adds its gradient to
            `main_grad` of the tensor that is supplied, instead of handing it to autograd.
    """

    in_place: Sequence[bool]

    def home_weights(self, index: int) -> list[torch.nn.Parameter]:
        """Return the W parameters of the stock module's expert `index`, as they are now."""
        ...

    def __call__(
        self,
        rows: torch.Tensor,
        tokens_per_slot: torch.Tensor,
        probs: torch.Tensor,
        weights: SlotWeights,
        version: object,
    ) -> torch.Tensor:
        """Run each slot's expert on its rows.

        Args:
            rows: (M, hidden), grouped by slot.
            tokens_per_slot: (S,) int64 on the host, as Megatron's dispatchers return it.
            probs: (M,) routing probability of each row.
            weights: for each slot its W weights, in the order of `home_weights`.
            version: equal to the last call's where the weights are: what was made of them may
                serve again.

        Returns:
            (M, hidden), weighted by `probs` as Megatron's expert modules do.
        """
        ...


def build_slot_experts(
    experts: torch.nn.Module, num_slots: int, submodules: Any, groups: ProcessGroupCollection
) -> SlotExperts:
    """Return the slot computation that matches a layer's stock experts module.

    Args:
        experts: the layer's experts module, the parameters' owner.
        num_slots: S, slots of this rank.
        submodules: what `MoESubmodules.experts` was built with (a partial of the module's class).
        groups: the layer's process groups.

    Raises:
        ValueError: if the module is of a kind that FSSDP cannot run on slots.
    """
    if isinstance(experts, TEGroupedMLP):
        return TESlotExperts(experts, num_slots, submodules, groups)
    if isinstance(experts, SequentialMLP) and experts.config.fp8:
        raise ValueError(
            "--moe-parallel fssdp runs experts in fp8 with TEGroupedMLP only, and these are "
            "SequentialMLP; add --transformer-impl transformer_engine --moe-grouped-gemm, train in "
            "bf16, or use --moe-parallel ep"
        )
    if isinstance(experts, SequentialMLP):
        return LocalSlotExperts(experts, groups)
    raise ValueError(
        f"--moe-parallel fssdp cannot run {type(experts).__name__}: it supports TEGroupedMLP "
        "(--transformer-impl transformer_engine --moe-grouped-gemm) and SequentialMLP "
        "(--transformer-impl local); change these flags, or use --moe-parallel ep"
    )


class _SlotLinear(torch.nn.Module):
    """Stands in for an MLP's linear layer: all slots' rows at once, weights set before the call.

    `bias_rows` is the row-wise bias (or None), already weighted as the place needs it.
    """

    weights: Sequence[torch.Tensor]
    groups: RowGroups
    bias_rows: torch.Tensor | None

    def bind(
        self, weights: Sequence[torch.Tensor], groups: RowGroups, bias_rows: torch.Tensor | None
    ) -> None:
        self.weights, self.groups, self.bias_rows = weights, groups, bias_rows

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        output = grouped_linear(rows, self.weights, self.groups)
        if self.bias_rows is not None:
            output = output + self.bias_rows
        return output, None

    def release(self) -> None:
        # The graph keeps what the backward needs; the layer must not keep a whole layer's weights.
        del self.weights, self.groups, self.bias_rows


class LocalSlotExperts:
    """SequentialMLP's experts as one MLP whose weights are supplied.

    Megatron's own `MLP.forward` runs, with its activations and fusions; only its two linear
    layers are replaced. Where a grouped GEMM pays, all slots go through it in one call, else one
    after the other, as SequentialMLP does: on CPUs that saves copying the wide activations.
    """

    def __init__(self, experts: SequentialMLP, groups: ProcessGroupCollection) -> None:
        self.names = [name for name, _ in experts.local_experts[0].named_parameters()]
        self.in_place: Sequence[bool] = [False] * len(self.names)
        self._homes = [
            [_find(expert, name) for name in self.names] for expert in experts.local_experts
        ]
        self.mlp = MLP(
            experts.config,
            MLPSubmodules(
                linear_fc1=_build_slot_linear,
                linear_fc2=_build_slot_linear,
                activation_func=experts.local_experts[0].activation_func
                if experts.config.use_te_activation_func
                else None,
            ),
            is_expert=True,
            ffn_hidden_size=experts.config.moe_ffn_hidden_size,
            tp_group=groups.expt_tp,
        )

    def home_weights(self, index: int) -> list[torch.nn.Parameter]:
        """See `SlotExperts.home_weights`."""
        return [getattr(module, name) for module, name in self._homes[index]]

    def __call__(
        self,
        rows: torch.Tensor,
        tokens_per_slot: torch.Tensor,
        probs: torch.Tensor,
        weights: SlotWeights,
        version: object,
    ) -> torch.Tensor:
        """See `SlotExperts.__call__`."""
        config = self.mlp.config
        if config.moe_apply_probs_on_input:
            rows = (probs.unsqueeze(-1) * rows).to(rows.dtype)
            probs = torch.ones_like(probs)
        if has_grouped_gemm(rows, weights[0][0]):
            return self._run(rows, tokens_per_slot, probs, weights)
        counts = tokens_per_slot.tolist()
        parts = zip(rows.split(counts), tokens_per_slot.split(1), probs.split(counts), strict=True)
        return torch.cat(
            [
                self._run(slot_rows, slot_count, slot_probs, [slot_weights])
                for (slot_rows, slot_count, slot_probs), slot_weights in zip(
                    parts, weights, strict=True
                )
            ]
        )

    def _run(
        self,
        rows: torch.Tensor,
        tokens_per_slot: torch.Tensor,
        probs: torch.Tensor,
        weights: SlotWeights,
    ) -> torch.Tensor:
        """Run some slots at once."""
        by_name = dict(zip(self.names, zip(*weights, strict=True), strict=True))
        groups = RowGroups(tokens_per_slot, rows.device)

        def bias_rows(name: str) -> torch.Tensor | None:
            return groups.spread(torch.stack(by_name[name])) if name in by_name else None

        fc2_bias = bias_rows("linear_fc2.bias")
        if fc2_bias is not None:
            fc2_bias = (fc2_bias * probs.unsqueeze(-1)).to(rows.dtype)
        linears = (self.mlp.linear_fc1, self.mlp.linear_fc2)
        linears[0].bind(by_name["linear_fc1.weight"], groups, bias_rows("linear_fc1.bias"))
        linears[1].bind(by_name["linear_fc2.weight"], groups, fc2_bias)
        output: torch.Tensor = self.mlp(rows, per_token_scale=probs)[0]
        for linear in linears:
            linear.release()
        return output


def _build_slot_linear(*args: Any, **kwargs: Any) -> _SlotLinear:
    """Take what Megatron passes to a linear layer's builder; the weights come with each call."""
    return _SlotLinear()


class TESlotExperts:
    """TEGroupedMLP with one GEMM per slot; its parameters are swapped for the slots' weights."""

    def __init__(
        self,
        experts: TEGroupedMLP,
        num_slots: int,
        builder: Any,
        groups: ProcessGroupCollection,
    ) -> None:
        names = [name for name, _ in experts.named_parameters()]
        # "linear_fc1.weight3" is expert 3's fc1: one family of names per weight of an expert.
        families = list(dict.fromkeys(re.sub(r"\d+$", "", name) for name in names))
        self.families = families
        _check_names(experts, families, experts.num_local_experts)
        self._homes = [
            [_find(experts, f"{family}{index}") for family in families]
            for index in range(experts.num_local_experts)
        ]
        config = copy.copy(experts.config)
        # TE adds weights' gradients in place (see gradients.py), those of biases it does not.
        self.in_place: Sequence[bool] = [
            config.gradient_accumulation_fusion and family.endswith("weight") for family in families
        ]
        # No memory and no random numbers for parameters that are never used.
        config.init_model_with_meta_device = True
        config.use_cpu_initialization = False  # it would win over the meta device
        config.perform_initialization = False
        self.module = builder(num_slots, config, pg_collection=groups)
        # functional_call would not notice a weight that it is given in vain, or that it lacks.
        _check_names(self.module, families, num_slots)
        self._linears = (self.module.linear_fc1, self.module.linear_fc2)
        for linear in self._linears:
            # Megatron tells TE an iteration's first micro-batch: make fp8 weights anew, and
            # overwrite main_grad. Here weights have versions, and main_grad is always added to.
            linear.is_first_microbatch = False
        self._version: object = None

    def home_weights(self, index: int) -> list[torch.nn.Parameter]:
        """See `SlotExperts.home_weights`."""
        return [getattr(module, name) for module, name in self._homes[index]]

    def __call__(
        self,
        rows: torch.Tensor,
        tokens_per_slot: torch.Tensor,
        probs: torch.Tensor,
        weights: SlotWeights,
        version: object,
    ) -> torch.Tensor:
        """See `SlotExperts.__call__`."""
        if version != self._version:
            for linear in self._linears:
                # Dropped, not refilled: backwards to come may need those of an earlier version.
                linear._fp8_workspaces.clear()
            self._version = version
        # TE asks slot 0 alone whether weights take gradients. A plan puts owned experts first.
        supplied = {
            f"{family}{slot}": weight
            for slot, slot_weights in enumerate(weights)
            for family, weight in zip(self.families, slot_weights, strict=True)
        }
        output, _ = functional_call(self.module, supplied, (rows, tokens_per_slot, probs))
        return output


# A module and the name of one of its parameters: read at every forward, because a parameter may be
# exchanged after the model is built.
_Place = tuple[torch.nn.Module, str]


def _find(module: torch.nn.Module, name: str) -> _Place:
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def _check_names(module: torch.nn.Module, families: list[str], count: int) -> None:
    """Prove that a module's parameters are `count` of each family."""
    found = {name for name, _ in module.named_parameters()}
    wanted = {f"{family}{index}" for family in families for index in range(count)}
    if found != wanted:
        raise RuntimeError(
            f"the parameters of {type(module).__name__} with {count} experts are not named as "
            f"--moe-parallel fssdp expects: it misses {sorted(wanted - found)} and does not know "
            f"{sorted(found - wanted)}; this version of transformer-engine or megatron-core is "
            "not supported by megatron-fssdp"
        )

# SPDX-License-Identifier: Apache-2.0

"""Megatron's settings that FSSDP would get wrong: one rule each.

Read from megatron-core 0.19.2; a flag that Megatron adds later and that touches the MoE layer
belongs in `RULES`.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A Megatron setting that does not go with `--moe-parallel fssdp`.

    Attributes:
        flag: as the user wrote it.
        name: the field of Megatron's arguments; fields that this version lacks never match.
        is_bad: whether a value of the field is one of the refused.
        reason: why, as the middle of a sentence.
        way_out: what to change, as the end of a sentence.
        needs: another flag and its field, without which the setting means nothing.
        needed: the value that the other must have; None: any that is set.
    """

    flag: str
    name: str
    is_bad: Callable[[Any], bool]
    reason: str
    way_out: str
    needs: tuple[str, str] | None = None
    needed: str | None = None

    def clash(self, args: Namespace) -> str | None:
        """Return the flags that clash, as the user would write them; None: nothing does."""
        value = getattr(args, self.name, None)
        if not self.is_bad(value):
            return None
        shown = _show(self.flag, value)
        if self.needs is None:
            return shown
        flag, name = self.needs
        value = getattr(args, name, None)
        means_something = _is_set(value) if self.needed is None else value == self.needed
        return f"{_show(flag, value)} {shown}" if means_something else None


def _show(flag: str, value: Any) -> str:
    if value is True:
        return flag
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, list | tuple) else value}"


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _is_above_1(value: Any) -> bool:
    return value is not None and value > 1


def _contains(*words: str) -> Callable[[Any], bool]:
    return lambda values: any(word in (values or ()) for word in words)


_OTHER_LAYER = "its MoE layers are built elsewhere, so plain EP would run"
_OTHER_SCHEDULE = "it calls the parts of the MoE layer itself and would skip the replicas"
_STEPPED = "only Adam and SGD update an expert from its own gradient alone"
_DROP = "drop the flag"

RULES: tuple[Rule, ...] = (
    # The layer is built by something else than Megatron's GPT spec.
    Rule(
        flag="--spec",
        name="spec",
        is_bad=_is_set,
        reason=_OTHER_LAYER,
        way_out="drop the flag, or build the MoE layers of your spec with megatron.core's "
        "get_moe_module_spec and call megatron_fssdp.integration.spec.register yourself",
    ),
    Rule(
        flag="--hybrid-layer-pattern",
        name="hybrid_layer_pattern",
        is_bad=_is_set,
        reason=_OTHER_LAYER,
        way_out="train a GPT model",
    ),
    Rule(
        flag="--heterogeneous-layers-config-path",
        name="heterogeneous_layers_config_path",
        is_bad=_is_set,
        reason=_OTHER_LAYER,
        way_out=_DROP,
    ),
    Rule(
        flag="--transformer-impl",
        name="transformer_impl",
        is_bad=lambda value: value == "inference_optimized",
        reason="its MoE layer is for inference",
        way_out="use transformer_engine or local",
    ),
    Rule(
        flag="--moe-use-upcycling",
        name="moe_use_upcycling",
        is_bad=_is_set,
        reason="it builds a second, dense model in this process",
        way_out="upcycle under --moe-parallel ep and load that checkpoint here",
    ),
    Rule(
        flag="--perform-rl-step",
        name="perform_rl_step",
        is_bad=_is_set,
        reason="its inference engine exchanges the token dispatcher",
        way_out=_DROP,
    ),
    # Tokens are dropped, padded or dispatched in ways that depend on the number of experts.
    Rule(
        flag="--moe-pad-expert-input-to-capacity",
        name="moe_pad_expert_input_to_capacity",
        is_bad=_is_set,
        reason="it pads all slots to one size, and their quotas differ",
        way_out="drop the flag: --moe-expert-capacity-factor alone drops the same tokens",
    ),
    Rule(
        flag="--moe-expert-rank-capacity-factor",
        name="moe_expert_rank_capacity_factor",
        is_bad=_is_set,
        reason="its limit is meant for the owners' tokens, which FSSDP moves between ranks",
        way_out=_DROP,
    ),
    Rule(
        flag="--moe-token-dispatcher-type",
        name="moe_token_dispatcher_type",
        is_bad=lambda value: value not in ("alltoall", "allgather", "flex"),
        reason="it was not tried with experts that are on other ranks in every iteration",
        way_out="use alltoall, allgather or flex",
    ),
    Rule(
        flag="--moe-flex-dispatcher-backend",
        name="moe_flex_dispatcher_backend",
        needs=("--moe-token-dispatcher-type", "moe_token_dispatcher_type"),
        needed="flex",
        is_bad=lambda value: value == "ncclep",
        reason="it has one number of experts and one limit of tokens for the whole process, and "
        "the slots of layers differ",
        way_out="use deepep or hybridep",
    ),
    Rule(
        flag="--moe-latent-size",
        name="moe_latent_size",
        is_bad=_is_set,
        reason="tokens are projected between the router and the dispatcher",
        way_out=_DROP,
    ),
    # The parts of the layer run in another order, or twice.
    Rule(
        flag="--overlap-moe-expert-parallel-comm",
        name="overlap_moe_expert_parallel_comm",
        is_bad=_is_set,
        reason=_OTHER_SCHEDULE,
        way_out=_DROP,
    ),
    Rule(
        flag="--delay-wgrad-compute",
        name="delay_wgrad_compute",
        is_bad=_is_set,
        reason="the replicas' gradients would be sent before they are computed",
        way_out=_DROP,
    ),
    Rule(
        flag="--overlap-dispatch-backward-with-experts-wgrad",
        name="overlap_dispatch_backward_with_experts_wgrad",
        is_bad=_is_set,
        reason="the replicas' gradients would be sent before they are computed",
        way_out=_DROP,
    ),
    Rule(
        flag="--cuda-graph-impl",
        name="cuda_graph_impl",
        is_bad=lambda value: value not in (None, "none"),
        reason="a captured layer would repeat the first iteration's plan",
        way_out="use none",
    ),
    Rule(
        flag="--offload-modules",
        name="offload_modules",
        is_bad=_contains("expert_fc1", "moe_act", "fused_group_mlp"),
        reason="it follows the tensors of the stock expert module, which FSSDP does not run",
        way_out="leave expert_fc1, moe_act and fused_group_mlp out",
    ),
    Rule(
        flag="--moe-paged-stash",
        name="moe_paged_stash",
        is_bad=_is_set,
        reason="it follows the tensors of the stock expert module, which FSSDP does not run",
        way_out=_DROP,
    ),
    # The experts' weights are not one plain tensor per expert on each rank.
    Rule(
        flag="--expert-tensor-parallel-num-weight-shards",
        name="expert_gtp_weight_remat_size",
        is_bad=_is_above_1,
        reason="an expert's weights are gathered anew for each use, and freed",
        way_out=_DROP,
    ),
    Rule(
        flag="--moe-single-grouped-weight",
        name="moe_single_grouped_weight",
        is_bad=_is_set,
        reason="all experts of a rank are one parameter, and FSSDP moves experts one by one",
        way_out=_DROP,
    ),
    Rule(
        flag="--moe-single-grouped-bias",
        name="moe_single_grouped_bias",
        is_bad=_is_set,
        reason="all experts of a rank are one parameter, and FSSDP moves experts one by one",
        way_out=_DROP,
    ),
    Rule(
        flag="--use-transformer-engine-op-fuser",
        name="use_transformer_engine_op_fuser",
        is_bad=_is_set,
        reason="the fused experts keep their own weights, so replicas would go unused",
        way_out=_DROP,
    ),
    Rule(
        flag="--moe-mlp-glu-interleave-size",
        name="moe_mlp_glu_interleave_size",
        is_bad=_is_set,
        reason="its weight layout is known to the fused experts only",
        way_out=_DROP,
    ),
    Rule(
        flag="--fp8-recipe",
        name="fp8_recipe",
        needs=("--fp8-format", "fp8"),
        is_bad=lambda value: value not in ("tensorwise", "blockwise", "mxfp8"),
        reason="its scales have a history of their own for each place, and a slot holds another "
        "expert every few iterations",
        way_out="use tensorwise, blockwise or mxfp8",
    ),
    Rule(
        flag="--fp8-param-gather",
        name="fp8_param_gather",
        is_bad=_is_set,
        reason="Megatron's optimizer for fp8 parameters has not been run with it",
        way_out="drop the flag: parameters stay in bf16, and Transformer Engine quantizes each "
        "slot's weights once an iteration",
    ),
    Rule(
        flag="--fp4-format",
        name="fp4",
        is_bad=_is_set,
        reason="a replica would need the quantizer's state as well as the weights",
        way_out="train in bf16",
    ),
    Rule(
        flag="--optimizer-cuda-graph",
        name="optimizer_cuda_graph",
        is_bad=_is_set,
        reason="a captured optimizer step would never end an iteration, and plans would not change",
        way_out=_DROP,
    ),
    Rule(
        flag="--te-precision-config-file",
        name="te_precision_config_file",
        is_bad=_is_set,
        reason="its recipes go by module names, which the replicas' experts lack",
        way_out=_DROP,
    ),
    Rule(
        flag="--use-megatron-fsdp",
        name="use_megatron_fsdp",
        is_bad=_is_set,
        reason="it shards each expert too, and frees the weights that replicas are copied from",
        way_out="use --use-distributed-optimizer",
    ),
    Rule(
        flag="--use-torch-fsdp2",
        name="use_torch_fsdp2",
        is_bad=_is_set,
        reason="it shards each expert too, and frees the weights that replicas are copied from",
        way_out="use --use-distributed-optimizer",
    ),
    Rule(
        flag="--hybrid-context-parallel",
        name="hybrid_context_parallel",
        is_bad=_is_set,
        reason="its schedule runs other numbers of micro-batches than Megatron counts",
        way_out=_DROP,
    ),
    Rule(
        flag="--optimizer",
        name="optimizer",
        is_bad=lambda value: value not in ("adam", "sgd"),
        reason=_STEPPED,
        way_out="use adam or sgd",
    ),
)

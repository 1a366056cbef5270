# SPDX-License-Identifier: Apache-2.0

"""The job that is simulated: a model, its parallel layout and batch, read from Megatron's flags.

`read_job` takes a preset (`configs/models`); parameters and the split over pipeline stages are
those of `presets`. Times follow from matrix products: 2 operations per parameter and token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from megatron_fssdp.planning.cost import LayerShape
from megatron_fssdp.presets.files import Preset, choose_layout, merge, read_preset, to_words
from megatron_fssdp.presets.layout import Layout, kept_of_token, least_gpus, read_layout
from megatron_fssdp.presets.sizes import Sizes, count_parameters, is_gated

Recompute = Literal["none", "moe", "full"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a GPT model with MoE layers.

    Attributes:
        name: for titles.
        sizes: its parameters by part.
        hidden_size, moe_ffn_size: widths of a token and inside an expert.
        kept_dense, kept_moe: numbers that a dense or MoE layer keeps of a token for its backward,
            besides routed rows.
        num_matrices: of an expert: 3 with a gated activation, else 2.
        core_width: numbers that a token's query meets a key with, and gets from a value, over all
            heads: heads * (query width + value width).
        num_heads: of the attention.
        vocab_size: of the output.
        sequence: tokens of a sequence.
    """

    name: str
    sizes: Sizes
    hidden_size: int
    moe_ffn_size: int
    kept_dense: float
    kept_moe: float
    num_matrices: int
    core_width: int
    num_heads: int
    vocab_size: int
    sequence: int

    @property
    def num_experts(self) -> int:
        """E."""
        return self.sizes.num_experts

    @property
    def topk(self) -> int:
        """Experts of a token."""
        return self.sizes.topk

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the MoE layers, from 1."""
        return tuple(number for number, is_moe in enumerate(self.sizes.is_moe_L, 1) if is_moe)

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts; layers count from 1."""
        return self.sizes.is_moe_L[layer - 1]

    def dense_params(self, layer: int) -> int:
        """Parameters of a layer besides its routed experts; layers count from 1."""
        return self.sizes.dense_of(self.is_moe(layer))

    def dense_flops(self, layer: int, *, is_causal: bool = True) -> float:
        """Operations of one token forward, in a layer besides its routed experts.

        Args:
            layer: number of the layer, from 1.
            is_causal: scores of later tokens are left out: half of them.
        """
        seen = self.sequence / (2 if is_causal else 1)
        return 2.0 * self.dense_params(layer) + 2.0 * self.core_width * seen

    def layer_shape(self, grad_bytes: int, param_bytes: int) -> LayerShape:
        """Return the sizes that the planner's cost model takes."""
        return LayerShape(
            hidden_size=self.hidden_size,
            ffn_size=self.moe_ffn_size,
            num_matrices=self.num_matrices,
            param_bytes=param_bytes,
            grad_bytes=grad_bytes,
            activation_bytes=param_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, its layout, and the training flags that decide times and memory.

    Attributes:
        shape: of the model.
        layout: parallel sizes and batch.
        param_bytes: of a parameter and an activation: 2 in bf16, 4 in fp32.
        has_distributed_optimizer: optimizer state is cut over data-parallel ranks.
        overlaps_grad_reduce, overlaps_param_gather: data-parallel traffic under computation.
        recompute: "moe": MoE layers are computed again in the backward; "full": all layers.
        fssdp_args: the preset's `--fssdp-*` flags, the defaults of what is simulated.
        notes: what of the flags is not modelled.
    """

    shape: ModelShape
    layout: Layout
    param_bytes: int = 2
    has_distributed_optimizer: bool = True
    overlaps_grad_reduce: bool = True
    overlaps_param_gather: bool = False
    recompute: Recompute = "none"
    fssdp_args: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def most_slots(self) -> int:
        """Replica slots of a rank that can be filled: as many as others own experts."""
        return self.shape.num_experts - self.shape.num_experts // self.layout.ep

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a micro-batch that a rank of the expert-parallel group brings.

        With tensor parallelism Megatron's MoE wants sequence parallelism, so ranks split tokens;
        the ranks of an expert-tensor-parallel group bring theirs together.
        """
        layout = self.layout
        tokens = layout.micro_batch * self.shape.sequence * layout.etp
        return max(tokens // (layout.tp * layout.cp), 1)


def read_job(
    name: str, num_ranks: int | None = None, changes: Mapping[str, Any] | None = None
) -> Job:
    """Read a preset with its layout for a number of ranks.

    Args:
        name: of a preset, or the path of a file like one.
        num_ranks: W; None: what the preset's smallest layout is for, or what its sizes need.
        changes: flags that replace the preset's.

    Raises:
        ValueError: if there is no such preset, or its sizes do not divide.
    """
    preset = read_preset(name)
    if num_ranks is None:
        # A run's own model file has no layouts: what its parallel sizes need at least.
        num_ranks = min(preset.layouts) if preset.layouts else least_gpus(preset.args)
    args = merge([preset.args, choose_layout(preset, num_ranks), changes or {}])
    return with_fssdp_args(job_from_flags(args, preset.name, num_ranks), preset)


def with_fssdp_args(job: Job, preset: Preset) -> Job:
    """Return the job with the preset's FSSDP flags, and a note of them if there are any."""
    args = merge([preset.fssdp_args_for(job.layout.num_ranks)])
    if not args:
        return job
    note = f"FSSDP runs with the preset's {' '.join(to_words(args))}, where nothing else is asked"
    return replace(job, fssdp_args=args, notes=(*job.notes, f"{note} for"))


def job_from_flags(args: Mapping[str, Any], name: str, num_ranks: int) -> Job:
    """Build a job from Megatron's flags.

    Raises:
        ValueError: if the model has no experts, a flag is missing or sizes do not divide.
    """
    if not args.get("--num-experts"):
        raise ValueError(f"{name} has no --num-experts: there is nothing to simulate")
    try:
        layout = read_layout(dict(args), num_ranks)
        shape = _shape(args, name)
    except KeyError as error:
        raise ValueError(f"{name} lacks the flag {error}") from error
    # From a YAML file a list, from a command line words or one word of them.
    given = args.get("--recompute-modules", "core_attn")
    modules = [
        word
        for each in (given if isinstance(given, list) else [given])
        for word in str(each).split()
    ]
    recompute: Recompute = "none"
    if args.get("--recompute-granularity") == "full":
        recompute = "full"
    elif args.get("--recompute-granularity") == "selective" and "moe" in modules:
        recompute = "moe"
    return Job(
        shape=shape,
        layout=layout,
        param_bytes=2 if args.get("--bf16") or args.get("--fp16") else 4,
        has_distributed_optimizer=bool(args.get("--use-distributed-optimizer")),
        overlaps_grad_reduce=bool(args.get("--overlap-grad-reduce")),
        overlaps_param_gather=bool(args.get("--overlap-param-gather")),
        recompute=recompute,
        notes=_not_modelled(args),
    )


def _not_modelled(args: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    if args.get("--num-virtual-stages-per-pipeline-rank", 1) != 1:
        notes.append("interleaved pipeline stages are simulated as plain 1F1B")
    if args.get("--mtp-num-layers"):
        notes.append("multi-token prediction is left out")
    if args.get("--moe-token-dispatcher-type", "alltoall") != "alltoall":
        notes.append("tokens are exchanged as the alltoall dispatcher does it")
    tp = args.get("--tensor-model-parallel-size", 1)
    pads = args.get("--moe-router-padding-for-quantization")
    if args.get("--expert-tensor-parallel-size", tp) != 1 or pads:
        notes.append("FSSDP's second wait for counts is left out")
    return tuple(notes)


def _shape(args: Mapping[str, Any], name: str) -> ModelShape:
    hidden, heads = args["--hidden-size"], args["--num-attention-heads"]
    ffn = args.get("--ffn-hidden-size", 4 * hidden)
    core_width = 2 * heads * args.get("--kv-channels", hidden // heads)
    if args.get("--multi-latent-attention"):
        query = args["--qk-head-dim"] + args["--qk-pos-emb-head-dim"]
        core_width = heads * (query + args["--v-head-dim"])
    return ModelShape(
        name=name,
        sizes=count_parameters(args),
        hidden_size=hidden,
        moe_ffn_size=args.get("--moe-ffn-hidden-size", ffn),
        kept_dense=kept_of_token(args, is_moe=False),
        kept_moe=kept_of_token(args, is_moe=True),
        num_matrices=3 if is_gated(args) else 2,
        core_width=core_width,
        num_heads=heads,
        vocab_size=args["--padded-vocab-size"],
        sequence=args["--seq-length"],
    )

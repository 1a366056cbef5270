# SPDX-License-Identifier: Apache-2.0

"""Parallel layouts: whether the sizes divide, and how much memory a GPU needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fssdp.presets.sizes import (
    ADAM_BYTES,
    GRAD_BYTES,
    MASTER_BYTES,
    RESERVED_BYTES,
    Args,
    Sizes,
    count_parameters,
    is_gated,
)

# Flags that sizes are computed from.
COUNTS = (
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads"),
    *("--num-query-groups", "--kv-channels", "--seq-length", "--max-position-embeddings"),
    *("--padded-vocab-size", "--micro-batch-size", "--global-batch-size", "--num-experts"),
    *("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--moe-router-topk"),
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    *("--expert-model-parallel-size", "--expert-tensor-parallel-size"),
    *("--num-virtual-stages-per-pipeline-rank",),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a job is spread over ranks: Megatron's parallel sizes, and its batch.

    Dense parts: tp * cp * dp * pp ranks; experts: etp * ep * edp * pp. Ranks are numbered as
    Megatron does it: within a pipeline stage, first tp (etp), then cp and ep, then data.

    Attributes:
        num_ranks: W.
        tp, pp, cp, ep, etp: parallel sizes.
        micro_batch: sequences of a micro-batch.
        num_microbatches: of a pipeline in an iteration.
        layers_P: transformer layers of each stage.
    """

    num_ranks: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    micro_batch: int = 1
    num_microbatches: int = 1
    layers_P: tuple[int, ...]

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense parts."""
        return self.num_ranks // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.num_ranks // (self.etp * self.pp * self.ep)

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of a pipeline stage."""
        return self.num_ranks // self.pp

    @property
    def global_batch(self) -> int:
        """Sequences of an iteration."""
        return self.micro_batch * self.num_microbatches * self.dp

    def layers_of(self, stage: int) -> range:
        """Return the numbers of a stage's layers, from 1."""
        first = sum(self.layers_P[:stage]) + 1
        return range(first, first + self.layers_P[stage])


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest GPU.

    Attributes:
        state: weights, gradients and optimizer state; exact.
        replicas: FSSDP's replica slots, all in use.
        activations: rough.
    """

    state: float
    replicas: float
    activations: float

    @property
    def total(self) -> float:
        """All of it, with what CUDA and NCCL take."""
        return self.state + self.replicas + self.activations + RESERVED_BYTES


def _parallel_sizes(args: Args) -> tuple[int, int, int, int, int]:
    """TP, PP, CP, EP and ETP; ValueError where a count is none."""
    for flag in COUNTS:
        if flag in args and not (type(args[flag]) is int and args[flag] > 0):
            given = "" if args[flag] is True else f" {args[flag]}"
            raise ValueError(f"{flag}{given}: give it a whole number of at least 1")
    tp, pp, cp, ep = (
        args.get(f"--{name}-parallel-size", 1)
        for name in ("tensor-model", "pipeline-model", "context", "expert-model")
    )
    return tp, pp, cp, ep, args.get("--expert-tensor-parallel-size", tp)


def least_gpus(args: Args) -> int:
    """Return the fewest GPUs that the parallel sizes among these flags can have."""
    tp, pp, cp, ep, etp = _parallel_sizes(args)
    return math.lcm(tp * pp * cp, ep * etp * pp)


def read_layout(args: Args, num_gpus: int) -> Layout:
    """Read the sizes from Megatron's flags, and check that they divide.

    Raises:
        ValueError: they do not; the message has the flags and the numbers.
    """
    tp, pp, cp, ep, etp = _parallel_sizes(args)
    for what, size, flags in (
        ("TP x PP x CP", tp * pp * cp, "--tensor-model-, --pipeline-model-, --context-"),
        ("EP x ETP x PP", ep * etp * pp, "--expert-model-, --expert-tensor-, --pipeline-model-"),
    ):
        if num_gpus % size:
            raise ValueError(
                f"{num_gpus} GPUs are not a multiple of {what} = {size} ({flags}parallel-size)"
            )
    dp = num_gpus // (tp * pp * cp)
    experts, topk = args.get("--num-experts", 0), args.get("--moe-router-topk", 2)
    if experts and topk > experts:
        raise ValueError(
            f"--moe-router-topk is {topk}, and --num-experts {experts}; a token can choose each "
            f"expert once: use 1 to {experts}"
        )
    _check_divides(args, "--num-attention-heads", tp, "--tensor-model-parallel-size")
    _check_divides(args, "--num-experts", ep, "--expert-model-parallel-size")
    _check_divides(args, "--padded-vocab-size", tp, "--tensor-model-parallel-size")
    if tp > 1 and "--num-experts" in args and "--sequence-parallel" not in args:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} trains MoE layers only with --sequence-parallel"
        )
    micro_batch = args["--micro-batch-size"]
    if args["--global-batch-size"] % (micro_batch * dp):
        raise ValueError(
            f"--global-batch-size {args['--global-batch-size']} is not a multiple of "
            f"--micro-batch-size {micro_batch} x {dp} data-parallel replicas"
        )
    num_microbatches = args["--global-batch-size"] // (micro_batch * dp)
    virtual = args.get("--num-virtual-stages-per-pipeline-rank", 1)
    if virtual > 1 and num_microbatches % pp:
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank needs a multiple of "
            f"--pipeline-model-parallel-size {pp} as micro-batches, not {num_microbatches}"
        )
    return Layout(
        num_ranks=num_gpus,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        micro_batch=micro_batch,
        num_microbatches=num_microbatches,
        layers_P=_split_layers(args, pp, virtual),
    )


def _check_divides(args: Args, flag: str, size: int, by: str) -> None:
    if flag in args and args[flag] % size:
        raise ValueError(f"{flag} {args[flag]} is not a multiple of {by} {size}")


def _split_layers(args: Args, pp: int, virtual: int) -> tuple[int, ...]:
    """Split the layers over the pipeline's stages as Megatron does."""
    num_layers = args["--num-layers"]
    first = args.get("--decoder-first-pipeline-num-layers")
    last = args.get("--decoder-last-pipeline-num-layers")
    has_embedding = "--account-for-embedding-in-pipeline-split" in args
    has_loss = "--account-for-loss-in-pipeline-split" in args
    fixed = [count for count in (first, last) if count is not None]
    parts, stages = num_layers + has_embedding + has_loss - sum(fixed), pp - len(fixed)
    if stages < 0 or (parts if stages == 0 else parts % (stages * virtual)):
        raise ValueError(
            f"--num-layers {num_layers} do not split over --pipeline-model-parallel-size {pp}"
            + (f" x {virtual} virtual stages" if virtual > 1 else "")
            + (f" with {fixed} layers fixed" if fixed else "")
        )
    layers = [parts // stages] * stages if stages else []
    layers = ([first] if first is not None else []) + layers + ([last] if last is not None else [])
    layers[0] -= has_embedding
    layers[-1] -= has_loss
    return tuple(layers)


def estimate_memory(args: Args, num_gpus: int) -> Memory:
    """Estimate what the fullest GPU needs: the pipeline stage with the most.

    Raises:
        ValueError: see `read_layout`.
    """
    layout, sizes = read_layout(args, num_gpus), count_parameters(args)
    stages, start = [], 0
    for stage, num_layers in enumerate(layout.layers_P):
        is_moe = sizes.is_moe_L[start : start + num_layers]
        start += num_layers
        stages.append(_estimate_stage(args, layout, sizes, stage, is_moe))
    return max(stages, key=lambda memory: memory.total)


def _estimate_stage(
    args: Args, layout: Layout, sizes: Sizes, stage: int, is_moe: tuple[bool, ...]
) -> Memory:
    is_first, is_last = stage == 0, stage == layout.pp - 1
    dense = sum(map(sizes.dense_of, is_moe))
    dense += sizes.embedding * is_first + sizes.output * is_last
    dense += (sizes.mtp - sizes.mtp_expert) * is_last
    experts = sum(is_moe) * sizes.num_experts * sizes.expert + sizes.mtp_expert * is_last
    is_16_bit = "--bf16" in args or "--fp16" in args
    weight = 2 if is_16_bit else 4
    optimizer = ADAM_BYTES + MASTER_BYTES * is_16_bit
    shards = (layout.dp * layout.cp, layout.edp)
    if "--use-distributed-optimizer" not in args:
        shards = (1, 1)
    state = dense / layout.tp * (weight + GRAD_BYTES + optimizer / shards[0])
    state += experts / (layout.ep * layout.etp) * (weight + GRAD_BYTES + optimizer / shards[1])
    slots = args.get("--fssdp-num-replica-slots", 2) * (args.get("--moe-parallel") == "fssdp")
    # Gradients of replicas are summed over micro-batches, if there are several.
    kept = weight + GRAD_BYTES * (layout.num_microbatches > 1)
    layers = 1 if "--fssdp-rematerialize" in args else sum(is_moe) + is_last * bool(sizes.mtp)
    return Memory(
        state=state,
        replicas=slots * layers * sizes.expert / layout.etp * kept,
        activations=_estimate_activations(args, layout, stage, is_moe),
    )


def _estimate_activations(
    args: Args, layout: Layout, stage: int, is_moe: tuple[bool, ...]
) -> float:
    """Count what the layers keep for the backward, and the logits in fp32 and 16 bit."""
    hidden = args["--hidden-size"]
    tokens = args["--seq-length"] * args["--micro-batch-size"] / (layout.cp * layout.tp)
    layer_bytes = [2 * tokens * _activations_of(args, has_experts) for has_experts in is_moe]
    virtual = args.get("--num-virtual-stages-per-pipeline-rank", 1)
    # Micro-batches that the schedule has started before the first backward (1F1B, interleaved).
    alive: float = min(layout.pp - stage, layout.num_microbatches)
    if virtual > 1:
        alive = (2 * (layout.pp - stage - 1) + (virtual - 1) * layout.pp + 1) / virtual
    if args.get("--recompute-granularity") == "full":
        kept = alive * len(is_moe) * 2 * tokens * hidden + max(layer_bytes, default=0)
    else:
        kept = alive * sum(layer_bytes)
    logits = (2 + 4) * tokens * args["--padded-vocab-size"]
    return kept + logits * (stage == layout.pp - 1)


def _activations_of(args: Args, is_moe: bool) -> float:
    """Count the numbers that one layer keeps for a token, its routed rows included."""
    kept = kept_of_token(args, is_moe)
    if is_moe:
        hidden = args["--hidden-size"]
        ffn = args.get("--moe-ffn-hidden-size", args.get("--ffn-hidden-size", 4 * hidden))
        kept += args.get("--moe-router-topk", 2) * kept_of_row(hidden, ffn, _num_inner(args))
    return kept


def kept_of_token(args: Mapping[str, Any], is_moe: bool) -> float:
    """Count the numbers that a layer keeps of a token for its backward, besides routed rows.

    With a fused attention: inputs of both norms and of the attention's products, query, key, value
    and the attention's output (Korthikanti et al., arXiv 2205.05198, section 4.1, without scores,
    masks and dropout), and the inner vectors of the MLP, or of the shared expert.
    """
    hidden, heads = args["--hidden-size"], args["--num-attention-heads"]
    width = args.get("--kv-channels", hidden // heads)
    groups = args["--num-query-groups"] if "--group-query-attention" in args else heads
    if "--multi-latent-attention" in args:
        width, groups = args["--qk-head-dim"] + args["--qk-pos-emb-head-dim"], heads
    ffn = args.get("--ffn-hidden-size", 4 * hidden)
    if is_moe:
        ffn = args.get("--moe-shared-expert-intermediate-size", 0)
    return float(4 * hidden + (2 * heads + 2 * groups) * width + _num_inner(args) * ffn)


def kept_of_row(hidden: int, ffn: float, num_inner: int) -> float:
    """Count the numbers that an expert keeps of a routed row: input, output and inner vectors.

    Args:
        hidden: width of a token.
        ffn: width inside the expert, or its shard.
        num_inner: inner vectors: as many as the expert has matrices.
    """
    return 2 * hidden + num_inner * ffn


def _num_inner(args: Mapping[str, Any]) -> int:
    return 3 if is_gated(args) else 2

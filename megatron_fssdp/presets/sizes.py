# SPDX-License-Identifier: Apache-2.0

"""What a model and a layout need: parameters from Megatron's flags, and memory of one GPU.

The parameters are exact (the tests compare them with models that Megatron builds); with them
weights, gradients and optimizer state are. Activations are a rough count, for balanced experts.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Args = Mapping[str, Any]

# CUDA context, NCCL's buffers and what the allocator cannot use: an assumption.
RESERVED_BYTES = 4e9
GRAD_BYTES, MASTER_BYTES, ADAM_BYTES = 4, 4, 8
# The largest number that --moe-layer-freq may name.
MOST_LAYERS = 10_000


def usable_bytes(memory_bytes: float) -> float:
    """Return what a job may take of a GPU's memory: all of it, without `RESERVED_BYTES`."""
    return memory_bytes - RESERVED_BYTES


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters by part.

    Attributes:
        attention: of one layer, with its norms.
        dense_mlp: of a layer without experts.
        moe_shared: of a MoE layer, apart from its experts: router and shared experts.
        expert: of one expert.
        embedding: of words and positions.
        output: of the output layer; 0 where it shares the embedding's.
        mtp: of multi-token prediction, its expert part in `mtp_expert`.
        mtp_expert: of its experts, all together.
        is_moe_L: for each layer, whether it has experts.
        num_experts: of a MoE layer.
        topk: experts of a token.
    """

    attention: int
    dense_mlp: int
    moe_shared: int
    expert: int
    embedding: int
    output: int
    mtp: int
    mtp_expert: int
    is_moe_L: tuple[bool, ...]
    num_experts: int
    topk: int

    @property
    def experts(self) -> int:
        """Of all experts of all layers, without multi-token prediction."""
        return sum(self.is_moe_L) * self.num_experts * self.expert

    @property
    def dense(self) -> int:
        """Of all layers, apart from experts."""
        return sum(self.dense_of(is_moe) for is_moe in self.is_moe_L)

    @property
    def total(self) -> int:
        """Of the model, without multi-token prediction."""
        return self.embedding + self.output + self.dense + self.experts

    @property
    def active(self) -> int:
        """Of the model, as one token sees it."""
        return self.total - sum(self.is_moe_L) * (self.num_experts - self.topk) * self.expert

    def dense_of(self, is_moe: bool) -> int:
        """Of one layer, apart from its experts."""
        return self.attention + (self.moe_shared if is_moe else self.dense_mlp)


def count_parameters(args: Args) -> Sizes:
    """Count the parameters of the model that Megatron builds from these flags."""
    hidden, num_layers = args["--hidden-size"], args["--num-layers"]
    has_bias = "--disable-bias-linear" not in args
    norm = hidden if args.get("--normalization") == "RMSNorm" else 2 * hidden
    num_experts = args.get("--num-experts", 0)
    ffn = args.get("--ffn-hidden-size", 4 * hidden)
    expert_ffn = args.get("--moe-ffn-hidden-size", ffn)
    shared_ffn = args.get("--moe-shared-expert-intermediate-size", 0)
    attention = _count_attention(args, has_bias) + 2 * norm
    moe_shared = hidden * num_experts + num_experts * has_bias
    moe_shared += _count_mlp(args, shared_ffn, has_bias) if shared_ffn else 0
    expert = _count_mlp(args, expert_ffn, has_bias)
    positions = args["--max-position-embeddings"] * hidden
    has_positions = args.get("--position-embedding-type", "learned_absolute") == "learned_absolute"
    embedding = args["--padded-vocab-size"] * hidden
    # The final norm counts as the output's.
    mtp_layers = args.get("--mtp-num-layers", 0)
    mtp_expert = mtp_layers * num_experts * expert
    mtp_dense = mtp_layers * (attention + moe_shared + 2 * hidden * hidden + 3 * norm)
    untied = "--untie-embeddings-and-output-weights" in args
    return Sizes(
        attention=attention,
        dense_mlp=_count_mlp(args, ffn, has_bias),
        moe_shared=moe_shared,
        expert=expert,
        embedding=embedding + positions * has_positions,
        output=embedding * untied + norm,
        mtp=mtp_dense + mtp_expert,
        mtp_expert=mtp_expert,
        is_moe_L=_read_layer_freq(args, num_layers),
        num_experts=num_experts,
        topk=args.get("--moe-router-topk", 2),
    )


def _count_attention(args: Args, has_bias: bool) -> int:
    hidden, heads = args["--hidden-size"], args["--num-attention-heads"]
    if "--multi-latent-attention" in args:
        return _count_latent_attention(args)
    width = args.get("--kv-channels", hidden // heads)
    groups = args["--num-query-groups"] if "--group-query-attention" in args else heads
    qkv = (heads + 2 * groups) * width
    count = hidden * qkv + heads * width * hidden
    count += (qkv + hidden) * has_bias
    count += 2 * width if "--qk-layernorm" in args else 0
    return count + (heads if args.get("--softmax-type") == "learnable" else 0)


def _count_latent_attention(args: Args) -> int:
    hidden, heads = args["--hidden-size"], args["--num-attention-heads"]
    rank, rope = args["--kv-lora-rank"], args["--qk-pos-emb-head-dim"]
    key, value = args["--qk-head-dim"], args["--v-head-dim"]
    query_rank = args.get("--q-lora-rank")
    queries = heads * (key + rope)
    count = hidden * queries if query_rank is None else query_rank * (hidden + queries)
    count += hidden * (rank + rope) + rank * heads * (key + value) + heads * value * hidden
    # One norm before each second projection (without a first one, before the queries').
    has_norm = "--qk-layernorm" in args
    return count + ((hidden if query_rank is None else query_rank) + rank) * has_norm


def _count_mlp(args: Args, ffn: int, has_bias: bool) -> int:
    hidden = args["--hidden-size"]
    inner = ffn * (2 if is_gated(args) else 1)
    return hidden * inner + ffn * hidden + (inner + hidden) * has_bias


def is_gated(args: Args) -> bool:
    """Whether MLPs multiply their activation by a gate: a third matrix."""
    return "--swiglu" in args or "--quick-geglu" in args


def _read_layer_freq(args: Args, num_layers: int) -> tuple[bool, ...]:
    """Read `--moe-layer-freq`: every n-th layer has experts, or a list such as ([0]*3+[1]*58)."""
    if "--num-experts" not in args:
        return (False,) * num_layers
    given = args.get("--moe-layer-freq", 1)
    try:
        pattern = _evaluate(ast.parse(str(given), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        pattern = None
    if isinstance(pattern, int) and pattern > 0:
        return tuple(layer % pattern == 0 for layer in range(num_layers))
    is_list = isinstance(pattern, list) and len(pattern) == num_layers
    if not is_list or 1 not in pattern or not all(each in (0, 1) for each in pattern):
        raise ValueError(
            f"--moe-layer-freq is {given}; use a whole number of at least 1, or a list of "
            f"{num_layers} zeros and ones, not all zero, such as [1]*{num_layers}"
        )
    return tuple(map(bool, pattern))


def _evaluate(node: ast.expr) -> Any:
    """Evaluate lists and whole numbers, of at most `MOST_LAYERS`, joined by * and +."""
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= MOST_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
        left, right = _evaluate(node.left), _evaluate(node.right)
        return left * right if isinstance(node.op, ast.Mult) else left + right
    raise ValueError(f"{ast.unparse(node)} is not understood")

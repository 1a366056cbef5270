# SPDX-License-Identifier: Apache-2.0

"""The model and its parallel layout, read from a preset of Megatron's flags.

A preset (`configs/models/*.yaml`) has a mapping `MODEL_ARGS` of literal flags, `--num-layers: 61`;
true stands for a switch. Only what decides sizes and times is read here; other flags are ignored.
Formulas count multiplications and additions of matrix products, 2 per parameter and token.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from megatron_fssdp.planning.cost import LayerShape

Recompute = Literal["none", "moe", "full"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a job is spread over ranks: Megatron's parallel sizes, and its batch.

    Dense parts: tp * cp * dp * pp ranks; experts: etp * ep * edp * pp. Ranks are numbered as
    Megatron does it: within a pipeline stage, first tp (etp), then cp and ep, then data.

    Attributes:
        num_ranks: W.
        tp, pp, cp, ep, etp: parallel sizes.
        micro_batch: sequences of a micro-batch.
        global_batch: sequences of an iteration.

    Raises:
        ValueError: if the sizes do not divide the ranks, or the ranks the batch.
    """

    num_ranks: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    micro_batch: int = 1
    global_batch: int | None = None

    def __post_init__(self) -> None:
        dense, experts = self.tp * self.pp * self.cp, self.etp * self.pp * self.ep
        if self.num_ranks % dense or self.num_ranks % experts:
            raise ValueError(
                f"{self.num_ranks} ranks cannot be split: tp {self.tp} x pp {self.pp} x cp "
                f"{self.cp} = {dense} and etp {self.etp} x pp {self.pp} x ep {self.ep} = {experts} "
                "must both divide them; choose another number of nodes or smaller sizes"
            )
        if self.global_batch is not None and self.global_batch % (self.micro_batch * self.dp):
            raise ValueError(
                f"a global batch of {self.global_batch} sequences is no multiple of micro-batch "
                f"{self.micro_batch} x data-parallel size {self.dp}"
            )

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense parts."""
        return self.num_ranks // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.num_ranks // (self.etp * self.pp * self.ep)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of an iteration; 1 if no global batch is given."""
        if self.global_batch is None:
            return 1
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of a pipeline stage."""
        return self.num_ranks // self.pp


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a GPT model with MoE layers.

    Attributes:
        name: for titles.
        num_layers: transformer layers.
        moe_layers: numbers of the MoE layers, from 1; the others have a dense MLP.
        hidden_size, ffn_size, moe_ffn_size: widths; `ffn_size` is that of dense MLPs.
        num_experts, topk: E, and experts of a token.
        shared_ffn_size: width of the shared expert, 0 if there is none.
        attention_params: of a layer's attention, all its products with weights.
        core_width: numbers that a token's query meets a key with, and gets from a value, over all
            heads: heads * (query width + value width).
        num_matrices: 3 with a gated activation, else 2.
        vocab_size: of the embedding and the output.
        is_tied: embedding and output share their weights.
        sequence: tokens of a sequence.
        is_causal: a token sees those before it only: half of the scores.
    """

    name: str
    num_layers: int
    moe_layers: tuple[int, ...]
    hidden_size: int
    ffn_size: int
    moe_ffn_size: int
    num_experts: int
    topk: int
    shared_ffn_size: int = 0
    attention_params: int
    core_width: int
    num_matrices: int = 3
    vocab_size: int
    is_tied: bool = True
    sequence: int
    is_causal: bool = True

    @property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        return self.num_matrices * self.hidden_size * self.moe_ffn_size

    @property
    def shared_params(self) -> int:
        """Parameters of a MoE layer's shared expert and router."""
        shared = self.num_matrices * self.hidden_size * self.shared_ffn_size
        return shared + self.hidden_size * self.num_experts

    def dense_params(self, layer: int) -> int:
        """Parameters of a layer besides its routed experts; `layer` counts from 1."""
        if layer in self._moe:
            return self.attention_params + self.shared_params
        return self.attention_params + self.num_matrices * self.hidden_size * self.ffn_size

    @cached_property
    def _moe(self) -> frozenset[int]:
        return frozenset(self.moe_layers)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)
        dense = sum(self.dense_params(layer) for layer in range(1, self.num_layers + 1))
        return embeddings + dense + len(self.moe_layers) * self.num_experts * self.expert_params

    def dense_flops(self, layer: int) -> float:
        """Operations of one token forward, in a layer besides its routed experts."""
        seen = self.sequence / (2 if self.is_causal else 1)
        return 2.0 * self.dense_params(layer) + 2.0 * self.core_width * seen

    def layers_of(self, stage: int, pp: int) -> range:
        """Return the numbers of a pipeline stage's layers; the first stages have the rest."""
        each, extra = divmod(self.num_layers, pp)
        first = stage * each + min(stage, extra) + 1
        return range(first, first + each + (stage < extra))

    def layer_shape(self, grad_bytes: int = 4, param_bytes: int = 2) -> LayerShape:
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
    """

    shape: ModelShape
    layout: Layout
    param_bytes: int = 2
    has_distributed_optimizer: bool = True
    overlaps_grad_reduce: bool = True
    overlaps_param_gather: bool = False
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        if self.shape.num_experts % self.layout.ep:
            raise ValueError(
                f"{self.shape.num_experts} experts cannot be owned evenly by expert-parallel size "
                f"{self.layout.ep}: choose a divisor"
            )
        if self.layout.pp > self.shape.num_layers:
            raise ValueError(f"{self.shape.num_layers} layers cannot fill {self.layout.pp} stages")

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a micro-batch that a rank of the expert-parallel group brings.

        With tensor parallelism Megatron's MoE wants sequence parallelism, so ranks split tokens;
        the ranks of an expert-tensor-parallel group bring theirs together.
        """
        layout = self.layout
        tokens = layout.micro_batch * self.shape.sequence * layout.etp
        return max(tokens // (layout.tp * layout.cp), 1)

    def on(self, num_ranks: int, global_batch: int | None = None) -> Job:
        """Return the job on another number of ranks."""
        batch = self.layout.global_batch if global_batch is None else global_batch
        return replace(self, layout=replace(self.layout, num_ranks=num_ranks, global_batch=batch))


def read_job(path: str | Path, num_ranks: int | None = None, **overrides: int) -> Job:
    """Read a preset.

    Args:
        path: of the YAML file.
        num_ranks: W; None: as many as the preset's `GPUS`, or the least that its sizes need.
        overrides: attributes of `Layout` that replace the preset's.

    Raises:
        ValueError: if the file is no preset, or lacks a flag that sizes depend on.
    """
    import yaml

    values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(values, dict) or not isinstance(values.get("MODEL_ARGS"), dict):
        raise ValueError(f"{path} is no preset: it has no mapping MODEL_ARGS of Megatron's flags")
    try:
        return job_from_flags(values["MODEL_ARGS"], Path(path).stem, num_ranks, **overrides)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def job_from_flags(
    flags: Mapping[str, Any], name: str, num_ranks: int | None = None, **overrides: int
) -> Job:
    """Build a job from Megatron's flags; see `read_job`."""
    get = _Flags(flags)
    pp, ep = (
        get.size("--pipeline-model-parallel-size", 1),
        get.size("--expert-model-parallel-size", 1),
    )
    sizes: dict[str, Any] = {
        "tp": get.size("--tensor-model-parallel-size", 1),
        "pp": pp,
        "cp": get.size("--context-parallel-size", 1),
        "ep": ep,
        "micro_batch": get.size("--micro-batch-size", 1),
        "global_batch": get.size("--global-batch-size", 0) or None,
    }
    sizes["etp"] = get.size("--expert-tensor-parallel-size", sizes["tp"])
    sizes |= {key: value for key, value in overrides.items() if value is not None}
    if num_ranks is None:
        dense, experts = sizes["tp"] * sizes["cp"], sizes["etp"] * sizes["ep"]
        num_ranks = sizes["pp"] * max(dense, experts)
    granularity = flags.get("--recompute-granularity")
    modules = str(flags.get("--recompute-modules", "core_attn")).split()
    recompute: Recompute = "none"
    if granularity == "full":
        recompute = "full"
    elif granularity == "selective" and "moe" in modules:
        recompute = "moe"
    return Job(
        shape=_shape(get, name),
        layout=Layout(num_ranks=num_ranks, **sizes),
        param_bytes=2 if flags.get("--bf16") or flags.get("--fp16") else 4,
        has_distributed_optimizer=bool(flags.get("--use-distributed-optimizer")),
        overlaps_grad_reduce=bool(flags.get("--overlap-grad-reduce")),
        overlaps_param_gather=bool(flags.get("--overlap-param-gather")),
        recompute=recompute,
    )


class _Flags:
    """A mapping of flags that says what is missing."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        self.flags = flags

    def size(self, name: str, default: int | None = None) -> int:
        value = self.flags.get(name, default)
        if value is None:
            raise ValueError(f"the preset lacks {name}")
        try:
            return int(value)
        except (TypeError, ValueError):
            raise ValueError(f"{name} is {value!r}; it must be a whole number") from None


def _shape(get: _Flags, name: str) -> ModelShape:
    flags, hidden = get.flags, get.size("--hidden-size")
    heads, num_layers = get.size("--num-attention-heads"), get.size("--num-layers")
    params, core = _attention(get, hidden, heads)
    ffn = get.size("--ffn-hidden-size", 4 * hidden)
    vocab = get.size("--padded-vocab-size", 0) or get.size("--vocab-size", 0) or 128256
    return ModelShape(
        name=name,
        num_layers=num_layers,
        moe_layers=_moe_layers(flags.get("--moe-layer-freq", 1), num_layers),
        hidden_size=hidden,
        ffn_size=ffn,
        moe_ffn_size=get.size("--moe-ffn-hidden-size", ffn),
        num_experts=get.size("--num-experts"),
        topk=get.size("--moe-router-topk", 2),
        shared_ffn_size=get.size("--moe-shared-expert-intermediate-size", 0),
        attention_params=params,
        core_width=core,
        num_matrices=3 if flags.get("--swiglu") else 2,
        vocab_size=vocab,
        is_tied=not flags.get("--untie-embeddings-and-output-weights"),
        sequence=get.size("--seq-length"),
    )


def _attention(get: _Flags, hidden: int, heads: int) -> tuple[int, int]:
    """Return the parameters of a layer's attention, and `core_width`."""
    flags = get.flags
    if flags.get("--multi-latent-attention"):
        nope, rope = get.size("--qk-head-dim", 128), get.size("--qk-pos-emb-head-dim", 64)
        value, kv_rank = get.size("--v-head-dim", 128), get.size("--kv-lora-rank", 512)
        q_rank = get.size("--q-lora-rank", 0)
        query = heads * (nope + rope)
        params = hidden * q_rank + q_rank * query if q_rank else hidden * query
        params += hidden * (kv_rank + rope) + kv_rank * heads * (nope + value)
        return params + heads * value * hidden, heads * (nope + rope + value)
    width = get.size("--kv-channels", hidden // heads)
    groups = get.size("--num-query-groups", 1) if flags.get("--group-query-attention") else heads
    return 2 * hidden * width * (heads + groups), 2 * heads * width


def _moe_layers(frequency: Any, num_layers: int) -> tuple[int, ...]:
    """Read --moe-layer-freq: every so many layers, or a pattern, "([0]*3+[1]*58)"."""
    if isinstance(frequency, int) or str(frequency).isdigit():
        step = int(frequency)
        return tuple(layer + 1 for layer in range(num_layers) if layer % step == 0)
    pattern = frequency if isinstance(frequency, list) else _pattern(str(frequency))
    if len(pattern) != num_layers:
        raise ValueError(f"--moe-layer-freq names {len(pattern)} layers of {num_layers}")
    return tuple(number for number, is_moe in enumerate(pattern, 1) if is_moe)


def _pattern(text: str) -> list[int]:
    """Evaluate sums and multiples of lists of 0 and 1, and nothing else."""
    if not re.fullmatch(r"[\[\]()01234567 89,*+]+", text):
        raise ValueError(f"--moe-layer-freq is {text!r}; allowed are terms like ([0]*3+[1]*58)")

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List):
            return [value(each) for each in node.elts]
        if isinstance(node, ast.BinOp):
            left, right = value(node.left), value(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        raise ValueError(f"--moe-layer-freq is {text!r}; allowed are terms like ([0]*3+[1]*58)")

    found = value(ast.parse(text, mode="eval").body)
    if not isinstance(found, list):
        raise ValueError(f"--moe-layer-freq is {text!r}; it must be a list of 0 and 1")
    return found

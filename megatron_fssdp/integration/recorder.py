# SPDX-License-Identifier: Apache-2.0

"""What --fssdp-record-trace writes besides the loads: what iterations took, and what ran."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from megatron.core import parallel_state

from megatron_fssdp.config import FSSDPConfig, flag_of
from megatron_fssdp.integration.records import IterationRecord
from megatron_fssdp.integration.runtime import FSSDPRuntime
from megatron_fssdp.integration.scalars import MovesSeen, scalars
from megatron_fssdp.presets.files import GPUS_PER_NODE
from megatron_fssdp.simulation.recording import TraceWriter

# Megatron's arguments that sizes and times depend on (presets/sizes.py, presets/layout.py,
# simulation/model.py).
PRESET_ARGUMENTS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "group_query_attention", "num_query_groups", "multi_latent_attention", "q_lora_rank",
    "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "qk_layernorm",
    "softmax_type", "swiglu", "quick_geglu", "normalization", "position_embedding_type",
    "max_position_embeddings", "untie_embeddings_and_output_weights", "padded_vocab_size",
    "seq_length", "num_experts", "moe_router_topk", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_token_dispatcher_type",
    "mtp_num_layers", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "sequence_parallel", "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "micro_batch_size", "global_batch_size", "bf16", "fp16", "use_distributed_optimizer",
    "overlap_grad_reduce", "overlap_param_gather", "recompute_granularity", "recompute_modules",
)  # fmt: skip


class TraceRecorder:
    """Writes the trace of this rank's pipeline stage (expert-data-parallel replica 0).

    Raises:
        OSError, ValueError: see `TraceWriter`.
    """

    def __init__(self, folder: Path, runtime: FSSDPRuntime, moves: MovesSeen, writes: bool) -> None:
        self._writer: TraceWriter | None = None
        self._lines: TextIO | None = None
        self._moves, self._began_s = moves, time.perf_counter()
        layers = runtime.layers()
        if not layers or not writes:
            return
        stage = parallel_state.get_pipeline_model_parallel_rank()
        num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        numbers = [layer.number for layer in layers]
        self._writer = TraceWriter(folder, stage, num_stages, runtime.layer_shapes(), numbers)
        path = folder / f"iterations-stage{stage}.jsonl"
        is_torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._lines = path.open("a", encoding="utf-8")
        if is_torn:
            self._lines.write("\n")  # a job that was killed left half a line
        self._write({"start": _describe_start(runtime)})

    def __call__(self, record: IterationRecord) -> None:
        """Append an iteration. A full disk ends the trace, not the training."""
        now_s = time.perf_counter()
        took_s, self._began_s = now_s - self._began_s, now_s
        if self._writer is None:
            return
        try:
            self._writer.append(
                record.iteration,
                record.counts_LRE,
                record.loads_LR,
                [plan.num_replicas for plan in record.plans],
                [gather.num_bytes // 1000 for gather in record.gathers],
            )
            figures = {
                name.removeprefix("fssdp/"): round(value, 4)
                for name, value in scalars(record, self._moves).items()
            }
            took_ms = round(1e3 * took_s, 3)
            self._write({"iteration": record.iteration, "time-ms": took_ms, **figures})
        except OSError as error:
            print(f"WARNING: --fssdp-record-trace ends here: {error}", flush=True)
            self._writer = None

    def _write(self, values: dict[str, Any]) -> None:
        assert self._lines is not None, "this rank writes"
        self._lines.write(json.dumps(values) + "\n")
        self._lines.flush()


def _describe_start(runtime: FSSDPRuntime) -> dict[str, Any]:
    config, layers = runtime.config, runtime.layers()
    changed = {
        flag_of(each.name): getattr(config, each.name)
        for each in fields(FSSDPConfig)
        if getattr(config, each.name) != each.default and each.name != "fssdp_record_trace"
    }
    topology = layers[0].shared.topology
    return {
        "moe-parallel": config.moe_parallel,
        "flags": changed,
        "nodes": topology.num_nodes,
        "expert-bytes": layers[0].shape.expert_bytes if layers[0].shape else None,
    }


def write_preset(folder: Path, args: Namespace) -> None:
    """Write the run's sizes as a preset that `fssdp simulate` and `fssdp tune` read.

    Args:
        folder: of the trace; `model.yaml` in it is written anew. A full disk stops no training.
        args: Megatron's.
    """
    import yaml

    flags: dict[str, Any] = {}
    for name in PRESET_ARGUMENTS:
        value: Any = getattr(args, name, None)
        if value is None or value is False:
            continue
        if name == "moe_layer_freq":
            value = value if isinstance(value, int) else str(value)
        if name == "recompute_modules":
            value = " ".join(value)
        flags[flag_of(name)] = value
    if not args.add_bias_linear:
        flags["--disable-bias-linear"] = True
    preset: dict[str, Any] = {"title": "the recorded run", "MODEL_ARGS": flags}
    if args.world_size % GPUS_PER_NODE == 0:
        preset["LAYOUTS"] = {args.world_size // GPUS_PER_NODE: {}}
    text = "# The run's own sizes, written by --fssdp-record-trace.\n"
    try:
        # This rank's stage may have no MoE layer, and then no trace of its own.
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.yaml").write_text(text + yaml.safe_dump(preset, sort_keys=False))
    except OSError as error:
        print(f"WARNING: the run's sizes were not recorded: {error}", flush=True)

# SPDX-License-Identifier: Apache-2.0

"""What a run shows of its balance: a console line, scalars, and the trace.

Everything here listens to the runtime's iteration records, once per iteration, off the hot path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.integration import outlook
from megatron_fssdp.integration.agreement import gather_objects
from megatron_fssdp.integration.layer import gather_counts, number_in_model
from megatron_fssdp.integration.recorder import TraceRecorder
from megatron_fssdp.integration.records import IterationRecord
from megatron_fssdp.integration.resharding import Reshard
from megatron_fssdp.integration.runtime import FSSDPRuntime
from megatron_fssdp.integration.scalars import MovesSeen


def attach(runtime: FSSDPRuntime, config: FSSDPConfig) -> MovesSeen:
    """Let a runtime report as the flags ask. Collective, after the model is built.

    Returns:
        what counts the experts that move.

    Raises:
        ValueError: on every rank, if one of them cannot write the trace.
    """
    if config.moe_parallel == "fssdp" and runtime.layer_shapes() and _speaks_for_stage():
        print(outlook.describe(runtime), flush=True)
        if outlook.may_not_overlap(config):
            print(f"WARNING: {outlook.ONE_CONNECTION}", flush=True)
    if config.reshard_interval:
        runtime.owners.listeners.append(partial(_tell_of_reshard, config.reshard_interval))
    moves = MovesSeen()
    runtime.owners.listeners.append(moves)
    if config.fssdp_log_plan:
        runtime.listeners.append(PlanPrinter(config.fssdp_log_plan))
    if config.fssdp_record_trace is None:
        return moves
    problem: str | None = None
    try:
        folder = Path(config.fssdp_record_trace)
        recorder = TraceRecorder(folder, runtime, moves, writes=_speaks_for_stage())
    except (OSError, ValueError) as error:
        problem = str(error)
    problems = gather_objects(problem)
    if any(problems):
        first = next(each for each in problems if each)
        raise ValueError(
            f"--fssdp-record-trace {config.fssdp_record_trace} cannot be written: {first}"
        )
    runtime.listeners.append(recorder)
    return moves


def _tell_of_reshard(interval: int, iteration: int, result: Reshard) -> None:
    if _speaks_for_stage():
        print(result.describe(iteration + 1, interval), flush=True)


class PlanPrinter:
    """Prints a line every N iterations, on the first rank of each pipeline stage."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def __call__(self, record: IterationRecord) -> None:
        """Print this iteration's line if it is its turn."""
        if (record.iteration + 1) % self._interval or not _speaks_for_stage():
            return
        before, after = record.imbalance()
        copied = sum(gather.num_bytes for gather in record.gathers)
        far = sum(gather.far_bytes for gather in record.gathers)
        calibrated = ""
        if record.calibrations:
            new, saved_s, extra_s = (
                sum(getattr(each, name) for each in record.calibrations)
                for name in ("num_new", "saved_s", "extra_s")
            )
            calibrated = f" calibrated: {new} replicas, {1e3 * saved_s:.1f} ms saved for "
            calibrated += f"{1e3 * extra_s:.1f} ms |"
        print(
            f" fssdp iteration {record.iteration + 1:8d} | fullest rank / mean tokens: "
            f"{_mean(before):.3f} -> {_mean(after):.3f} (worst layer {max(before):.3f} -> "
            f"{max(after):.3f}) | replicas: {record.num_replicas} | "
            f"parameters copied: {copied / 1e6:.1f} MB ({far / 1e6:.1f} between nodes) | copies "
            f"took {1e3 * record.traffic.total_s:.1f} ms, {1e3 * record.traffic.exposed_s:.1f} ms "
            f"of it exposed |{calibrated}",
            flush=True,
        )


def watching_runtime(config: FSSDPConfig) -> FSSDPRuntime:
    """Return a runtime that records and plans nothing, for `watch_routers`."""
    return FSSDPRuntime(replace(config, fssdp_num_replica_slots=0))


def watch_routers(model: Iterable[torch.nn.Module], runtime: FSSDPRuntime) -> None:
    """Record the loads of stock MoE layers (`--moe-parallel ep`) through hooks on their routers.

    The layers stay Megatron's; the hooks count what the routers decided.
    """
    for chunk in model:
        for layer in chunk.modules():
            if isinstance(layer, MoELayer):
                groups = layer.ep_group, layer.token_dispatcher.tp_ep_group
                index = runtime.add_layer(layer.config.num_moe_experts, *groups, None)
                if layer.layer_number is not None:
                    runtime.number_layer(index, number_in_model(layer, layer.layer_number))
                layer.router.register_forward_hook(_counting(runtime, index, *groups))


def _counting(
    runtime: FSSDPRuntime, index: int, group: dist.ProcessGroup, tp_ep_group: dist.ProcessGroup
) -> Any:
    def hook(
        router: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        if not router.training:
            return
        _, routing_map = output
        runtime.begin_forward(index, routing_map.device)
        counts_RE = gather_counts(routing_map, tp_ep_group, group.size()).sum(dim=1)
        # Megatron's experts are spread evenly, in order: no quotas to ask for.
        loads_R = counts_RE.sum(dim=0).view(group.size(), -1).sum(dim=1)
        runtime.record(index, counts_RE, loads_R)

    return hook


def _speaks_for_stage() -> bool:
    return (
        parallel_state.get_expert_model_parallel_rank() == 0
        and parallel_state.get_expert_data_parallel_rank() == 0
        and parallel_state.get_expert_tensor_parallel_rank() == 0
    )


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)

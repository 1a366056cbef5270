# SPDX-License-Identifier: Apache-2.0

"""What a run shows of its balance: a console line, and the load log.

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
from megatron_fssdp.integration.layer import gather_counts
from megatron_fssdp.integration.records import IterationRecord
from megatron_fssdp.integration.resharding import Reshard
from megatron_fssdp.integration.runtime import FSSDPRuntime
from megatron_fssdp.simulation.load_log import LoadLogWriter


def attach(runtime: FSSDPRuntime, config: FSSDPConfig) -> None:
    """Let a runtime report as the flags ask. Collective, after the model is built.

    Raises:
        ValueError: on every rank, if one of them cannot write the load log.
    """
    if config.moe_parallel == "fssdp" and runtime.layer_shapes() and _speaks_for_stage():
        print(outlook.describe(runtime), flush=True)
        if outlook.may_not_overlap(config):
            print(f"WARNING: {outlook.ONE_CONNECTION}", flush=True)
    if config.reshard_interval:
        runtime.owners.listeners.append(partial(_tell_of_reshard, config.reshard_interval))
    if config.fssdp_log_plan:
        runtime.listeners.append(PlanPrinter(config.fssdp_log_plan))
    if config.fssdp_load_log is None:
        return
    problem: str | None = None
    try:
        recorder = LoadRecorder(Path(config.fssdp_load_log), runtime.layer_shapes())
    except (OSError, ValueError) as error:
        problem = str(error)
    problems = gather_objects(problem)
    if any(problems):
        first = next(each for each in problems if each)
        raise ValueError(f"--fssdp-load-log {config.fssdp_load_log} cannot be written: {first}")
    runtime.listeners.append(recorder)


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
            f"parameters copied: {copied / 1e6:.1f} MB | copies took "
            f"{1e3 * record.traffic.total_s:.1f} ms, {1e3 * record.traffic.exposed_s:.1f} ms "
            f"of it exposed |{calibrated}",
            flush=True,
        )


def scalars(record: IterationRecord) -> dict[str, float]:
    """Return what a dashboard shows of an iteration, by name; the names are always the same.

    Layers are those of this rank's pipeline stage; bytes are those of its whole expert-parallel
    group; times are this rank's.
    """
    before, after = record.imbalance()
    return {
        "fssdp/imbalance-owners-only": _mean(before),
        "fssdp/imbalance": _mean(after),
        "fssdp/imbalance-worst-layer": max(after, default=1.0),
        "fssdp/replicas": record.num_replicas,
        "fssdp/calibrated-replicas": sum(each.num_new for each in record.calibrations),
        "fssdp/calibration-saved-ms": 1e3 * sum(each.saved_s for each in record.calibrations),
        "fssdp/calibration-cost-ms": 1e3 * sum(each.extra_s for each in record.calibrations),
        "fssdp/copied-inside-nodes-mb": record.traffic.near_bytes / 1e6,
        "fssdp/copied-between-nodes-mb": record.traffic.far_bytes / 1e6,
        "fssdp/copies-ms": 1e3 * record.traffic.total_s,
        "fssdp/copies-exposed-ms": 1e3 * record.traffic.exposed_s,
        "fssdp/replica-memory-mb": record.replica_bytes / 1e6,
        "fssdp/plan-ms": 1e3 * record.plan_s,
    }


class ScalarWriter:
    """Writes scalars to the writers that Megatron opened on this rank (its last one)."""

    def __init__(self, interval: int, tensorboard: Any, wandb: Any) -> None:
        self._interval = interval
        self._tensorboard, self._wandb = tensorboard, wandb

    def __call__(self, record: IterationRecord) -> None:
        """Write this iteration's scalars if it is its turn."""
        step = record.iteration + 1
        if step % self._interval:
            return
        values = scalars(record)
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step)


class LoadRecorder:
    """Writes the load log of this rank's pipeline stage (expert-data-parallel replica 0)."""

    def __init__(self, folder: Path, shapes: list[tuple[int, int]]) -> None:
        self._writer: LoadLogWriter | None = None
        if shapes and _speaks_for_stage():
            stage = parallel_state.get_pipeline_model_parallel_rank()
            num_stages = parallel_state.get_pipeline_model_parallel_world_size()
            self._writer = LoadLogWriter(folder, stage, num_stages, shapes)

    def __call__(self, record: IterationRecord) -> None:
        """Append an iteration. A full disk ends the log, not the training."""
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
        except OSError as error:
            print(f"WARNING: --fssdp-load-log ends here: {error}", flush=True)
            self._writer = None


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
                name = f"MoE layer {layer.layer_number}"
                groups = layer.ep_group, layer.token_dispatcher.tp_ep_group
                index = runtime.add_layer(layer.config.num_moe_experts, *groups, None, name)
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
        step = runtime.begin_forward(index, routing_map.device)
        counts_RE = gather_counts(routing_map, tp_ep_group, group.size()).sum(dim=1)
        runtime.record(index, counts_RE, step.split(counts_RE)[1])

    return hook


def _speaks_for_stage() -> bool:
    return (
        parallel_state.get_expert_model_parallel_rank() == 0
        and parallel_state.get_expert_data_parallel_rank() == 0
        and parallel_state.get_expert_tensor_parallel_rank() == 0
    )


def _mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)

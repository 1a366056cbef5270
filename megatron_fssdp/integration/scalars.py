# SPDX-License-Identifier: Apache-2.0

"""The figures of an iteration, by name: for dashboards and for the run's own record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_fssdp.integration.records import IterationRecord
from megatron_fssdp.integration.resharding import Reshard


@dataclass
class MovesSeen:
    """Counts, since the start, what re-sharding did: a listener of the runtime's owners.

    Attributes:
        events: how often experts moved.
        num_experts: that moved.
        num_bytes: of parameters and optimizer state.
    """

    events: int = 0
    num_experts: int = 0
    num_bytes: int = 0

    def __call__(self, iteration: int, result: Reshard) -> None:
        """Take note of one look at the owners."""
        if result.is_done:
            self.events += 1
            self.num_experts += result.num_moves
            self.num_bytes += result.num_bytes


def scalars(record: IterationRecord, moves: MovesSeen) -> dict[str, float]:
    """Return what a dashboard shows of an iteration, by name; the names are always the same.

    Layers are those of this rank's pipeline stage; bytes are those of its whole expert-parallel
    group; times are this rank's. Imbalance is the fullest rank's tokens over the mean, before: with
    owners alone, after: as it ran.
    """
    before, after = record.imbalance()
    values: dict[str, float] = {}
    for name, imbalance_L in (("before", before or [1.0]), ("after", after or [1.0])):
        p50, p95 = np.percentile(imbalance_L, [50, 95])
        values[f"fssdp/imbalance-{name}-p50"] = float(p50)
        values[f"fssdp/imbalance-{name}-p95"] = float(p95)
        values[f"fssdp/imbalance-{name}-max"] = max(imbalance_L)
    traffic, calibrations = record.traffic, record.calibrations
    return values | {
        "fssdp/replicas": record.num_replicas,
        "fssdp/calibrated-replicas": sum(each.num_new for each in calibrations),
        "fssdp/calibration-saved-ms": 1e3 * sum(each.saved_s for each in calibrations),
        "fssdp/calibration-cost-ms": 1e3 * sum(each.extra_s for each in calibrations),
        "fssdp/copied-inside-nodes-mb": traffic.near_bytes / 1e6,
        "fssdp/copied-between-nodes-mb": traffic.far_bytes / 1e6,
        "fssdp/copies-ms": 1e3 * traffic.total_s,
        "fssdp/copies-exposed-ms": 1e3 * traffic.exposed_s,
        "fssdp/replica-memory-mb": record.replica_bytes / 1e6,
        "fssdp/plan-ms": 1e3 * record.plan_s,
        "fssdp/reshard-events": moves.events,
        "fssdp/moved-experts": moves.num_experts,
        "fssdp/moved-mb": moves.num_bytes / 1e6,
    }


def layer_scalars(record: IterationRecord, numbers: Sequence[int]) -> dict[str, float]:
    """Return each layer's imbalance, named as Megatron's --moe-per-layer-logging names its own.

    Args:
        record: of the iteration.
        numbers: the layers' numbers in the model, from 1.
    """
    before, after = record.imbalance()
    if len(numbers) != len(before):
        return {}  # a layer did not run: which one is not told
    values = {}
    for name, imbalance_L in (("before", before), ("after", after)):
        for number, imbalance in zip(numbers, imbalance_L, strict=True):
            values[f"moe/fssdp_imbalance_{name}_layer_{number}"] = imbalance
    return values


class ScalarWriter:
    """Writes scalars to the writers that Megatron opened on this rank (its last one).

    Args:
        interval: iterations between two entries.
        tensorboard, wandb: Megatron's writers, or None.
        moves: what re-sharding did.
        numbers: of the layers, for an entry per layer; empty: none.
    """

    def __init__(
        self,
        interval: int,
        tensorboard: Any,
        wandb: Any,
        moves: MovesSeen | None = None,
        numbers: Sequence[int] = (),
    ) -> None:
        self._interval, self._numbers = interval, numbers
        self._tensorboard, self._wandb = tensorboard, wandb
        self._moves = moves or MovesSeen()

    def __call__(self, record: IterationRecord) -> None:
        """Write this iteration's scalars if it is its turn."""
        step = record.iteration + 1
        if step % self._interval:
            return
        values = scalars(record, self._moves)
        if self._numbers:
            values |= layer_scalars(record, self._numbers)
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step)

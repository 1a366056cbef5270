# SPDX-License-Identifier: Apache-2.0

"""A pipeline stage's passes: forwards and backwards through all of its layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_fssdp.simulation.costs import Costs
from megatron_fssdp.simulation.layers import BACKWARD, Clock, LayerWork, backward, forward
from megatron_fssdp.simulation.result import PARTS

Float64Array = npt.NDArray[np.float64]

# A pass is a forward or a backward; an iteration's first forwards may fetch replicas, and its last
# backwards return gradients.
FIRST, MIDDLE, BACK, LAST = KINDS = range(4)


@dataclass(eq=False)
class Passes:
    """A stage's passes: for each kind, its layers' clocks; None is a layer without experts.

    Attributes:
        dense_s: forward seconds of each layer without experts, of those with them 0.
        clocks: for each kind, the clock of each layer, in the order of the forward.
        head_s: forward seconds of the output layer, on the last stage.
        tokens_s: seconds of a token exchange of each layer, 0 without experts.
        layers: numbers of the layers, from 1.
    """

    dense_s: list[float]
    clocks: dict[int, list[Clock | None]]
    head_s: float
    tokens_s: list[float]
    layers: list[int]

    def layer_s(self, kind: int) -> list[float]:
        """Seconds of each layer."""
        factor = 1.0 if kind in (FIRST, MIDDLE) else BACKWARD
        return [
            dense_s * factor if clock is None else clock.end_s
            for dense_s, clock in zip(self.dense_s, self.clocks[kind], strict=True)
        ]

    def took_s(self, kind: int) -> float:
        """Seconds of a pass."""
        head_s = self.head_s * (1.0 if kind in (FIRST, MIDDLE) else BACKWARD)
        return sum(self.layer_s(kind)) + head_s

    def parts(self, kind: int) -> Float64Array:
        """(P,) seconds of each of `PARTS`, mean over ranks."""
        found = np.zeros(len(PARTS))
        for clock in self.clocks[kind]:
            if clock is not None:
                found += list(clock.parts.values())
        found[PARTS.index("attention")] += self.took_s(kind) - found.sum()
        return found

    def exposed_reduction_s(self, costs: Costs, stage: int) -> float:
        """Seconds that the reduction of gradients needs after the last backward.

        A layer's gradients are ready when its last backward is over. Under `overlap_grad_reduce`
        they travel while the layers before compute, but not while tokens do: those go first.
        """
        shape, job = costs.job.shape, costs.job
        seconds = []
        for number in self.layers[::-1]:
            dense = shape.dense_params(number) / job.layout.tp
            reduce_s = costs.reduce_s(dense, is_expert=False)[0]
            if shape.is_moe(number):
                params = shape.num_experts / job.layout.ep * shape.sizes.expert / job.layout.etp
                reduce_s += costs.reduce_s(params, is_expert=True)[0]
            seconds.append(reduce_s)
        outer = costs.outer_params(stage) / job.layout.tp
        outer_s = costs.reduce_s(outer, is_expert=False)[0] if outer else 0.0
        if not job.overlaps_grad_reduce:
            return sum(seconds) + outer_s
        busy_s = [2 * each for each in self.tokens_s[::-1]]
        free = through = 0.0
        for took_s, tokens_s, reduce_s in zip(
            self.layer_s(LAST)[::-1], busy_s, seconds, strict=True
        ):
            free += took_s - tokens_s
            through = max(through, free) + reduce_s
        return max(through + outer_s - free, 0.0)


def walk_stages(costs: Costs, work: list[LayerWork], *, records: bool = False) -> list[Passes]:
    """Walk through all passes of an expert-parallel group, stage by stage.

    Args:
        costs: of the job.
        work: of each MoE layer.
        records: keep what happens in them.
    """
    layout, shape = costs.job.layout, costs.job.shape
    by_layer = dict(zip(shape.moe_layers, work, strict=True))
    found = []
    for stage in range(layout.pp):
        layers = list(layout.layers_of(stage))
        mine = [by_layer.get(layer) for layer in layers]
        dense_s = [
            0.0 if each is not None else costs.dense_s(layer)
            for layer, each in zip(layers, mine, strict=True)
        ]
        kinds = KINDS if layout.num_microbatches > 1 else (FIRST, LAST)
        clocks = {kind: _walk_pass(mine, dense_s, kind, records) for kind in kinds}
        # With one micro-batch no other passes happen; their times count zero times.
        clocks.setdefault(MIDDLE, clocks[FIRST])
        clocks.setdefault(BACK, clocks[LAST])
        found.append(
            Passes(
                dense_s=dense_s,
                clocks=clocks,
                head_s=costs.head_s() if stage == layout.pp - 1 else 0.0,
                tokens_s=[0.0 if each is None else each.tokens_s for each in mine],
                layers=layers,
            )
        )
    return found


def _walk_pass(
    mine: list[LayerWork | None], dense_s: list[float], kind: int, records: bool
) -> list[Clock | None]:
    """Walk through a stage's layers; a layer's copies may travel while the one before computes."""
    is_forward = kind in (FIRST, MIDDLE)
    order = list(range(len(mine)))
    clocks: list[Clock | None] = [None] * len(mine)
    ahead_s = 0.0
    for position in order if is_forward else order[::-1]:
        work = mine[position]
        if work is None:
            ahead_s += dense_s[position] * (1.0 if is_forward else BACKWARD)
            continue
        if is_forward:
            clock = forward(work, kind == FIRST, ahead_s, records)
        else:
            clock = backward(work, kind == LAST, ahead_s, records)
        clocks[position] = clock
        ahead_s = clock.end_s - 2 * work.tokens_s
    return clocks

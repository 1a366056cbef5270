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
        busy_s: seconds of the last backward of each layer in which tokens and copies are on the
            links, 0 without experts.
        layers: numbers of the layers, from 1.
    """

    dense_s: list[float]
    clocks: dict[int, list[Clock | None]]
    head_s: float
    busy_s: list[float]
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
        they travel while the layers before compute, but not while tokens or copies do: those go
        first.
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
        free = through = 0.0
        for took_s, busy_s, reduce_s in zip(
            self.layer_s(LAST)[::-1], self.busy_s[::-1], seconds, strict=True
        ):
            free += max(took_s - busy_s, 0.0)
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
        gather_s = _gathers(costs, stage)
        clocks = {kind: _walk_pass(mine, dense_s, kind, records, gather_s) for kind in kinds}
        # With one micro-batch no other passes happen; their times count zero times.
        clocks.setdefault(MIDDLE, clocks[FIRST])
        clocks.setdefault(BACK, clocks[LAST])
        found.append(
            Passes(
                dense_s=dense_s,
                clocks=clocks,
                head_s=costs.head_s() if stage == layout.pp - 1 else 0.0,
                busy_s=[0.0 if each is None else _busy_s(each) for each in mine],
                layers=layers,
            )
        )
    return found


def _busy_s(work: LayerWork) -> float:
    """Seconds in which a last backward has tokens and copies on the links."""
    traits = work.traits
    seconds = (4 if work.recompute != "none" else 2) * work.tokens_s
    if traits.fetches_again:
        seconds += float(work.fetch_R.max())
    if traits.returns != "none":
        seconds += float(work.return_R.max())
    if work.hides_return:
        seconds += work.return_work_s  # on the cores, which copy nothing else meanwhile
    return seconds


def _gathers(costs: Costs, stage: int) -> list[float]:
    """Seconds until each layer's parameters are gathered, since an iteration's first forward.

    Under `overlap_param_gather` layers are gathered one after the other. Replicas are copied from
    owners, which have the experts' parameters only then; with one expert-data-parallel rank they
    have them always, and zeros are returned.
    """
    job, shape = costs.job, costs.job.shape
    layers = job.layout.layers_of(stage)
    if not job.overlaps_param_gather or job.layout.edp == 1:
        return [0.0] * len(layers)
    now_s, found = 0.0, []
    for number in layers:
        dense = shape.dense_params(number) / job.layout.tp
        now_s += costs.reduce_s(dense, is_expert=False)[1]
        if shape.is_moe(number):
            params = shape.num_experts / job.layout.ep * shape.sizes.expert / job.layout.etp
            now_s += costs.reduce_s(params, is_expert=True)[1]
        found.append(now_s)
    return found


def _walk_pass(
    mine: list[LayerWork | None],
    dense_s: list[float],
    kind: int,
    records: bool,
    gather_s: list[float],
) -> list[Clock | None]:
    """Walk through a stage's layers; a layer's copies may travel while the one before computes."""
    is_forward = kind in (FIRST, MIDDLE)
    order = list(range(len(mine)))
    clocks: list[Clock | None] = [None] * len(mine)
    ahead_s: Float64Array | float = 0.0
    now_s = 0.0
    for position in order if is_forward else order[::-1]:
        work = mine[position]
        if work is None:
            ahead_s = ahead_s + dense_s[position] * (1.0 if is_forward else BACKWARD)
            now_s += dense_s[position]
            continue
        if is_forward:
            late_s = max(gather_s[position] - now_s, 0.0) if kind == FIRST else 0.0
            clock = forward(work, kind == FIRST, ahead_s, records, late_s)
        else:
            clock = backward(work, kind == LAST, ahead_s, records)
        clocks[position] = clock
        now_s += clock.end_s
        ahead_s = clock.window_R
    return clocks

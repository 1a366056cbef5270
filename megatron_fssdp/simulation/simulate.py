# SPDX-License-Identifier: Apache-2.0

"""Simulate training iterations of a job under several systems.

For every iteration, expert-parallel group and MoE layer the system places experts (with the code
that trains, where it is this project's), and `layers` walks through the layer's forward and
backward. Their times fill pipeline stages (`pipeline`), the data-parallel reduction runs under the
last backward, and then comes the optimizer.

Shape letters: I iterations, G expert-parallel groups of a stage, S pipeline stages, L MoE layers,
P `result.PARTS`, K kinds of passes (see `passes.KINDS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.cost import TOKEN_TRIPS
from megatron_fssdp.simulation.cluster import Cluster
from megatron_fssdp.simulation.copies import far_bytes
from megatron_fssdp.simulation.costs import Costs
from megatron_fssdp.simulation.flow import flow_of_owners
from megatron_fssdp.simulation.layers import LayerWork
from megatron_fssdp.simulation.memory import memory
from megatron_fssdp.simulation.model import Job
from megatron_fssdp.simulation.passes import BACK, FIRST, KINDS, LAST, MIDDLE, walk_stages
from megatron_fssdp.simulation.pipeline import Scheduled, schedule_1f1b
from megatron_fssdp.simulation.result import PARTS, Result, SystemResult
from megatron_fssdp.simulation.spread import Spread, Trace
from megatron_fssdp.simulation.systems import DEFAULT_SYSTEMS, SYSTEMS, Options, Placed, System
from megatron_fssdp.simulation.timeline import build_timeline

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

# Iterations that systems only watch before the first one that counts: the paper's window.
WARM_UP = 5

Progress = Callable[[str, int, int], None]


def simulate(
    job: Job,
    cluster: Cluster,
    trace: Trace,
    systems: Sequence[str] = DEFAULT_SYSTEMS,
    *,
    options: Options | None = None,
    num_iterations: int | None = None,
    warm_up: int = WARM_UP,
    timelines: Sequence[int] = (),
    trace_name: str = "",
    progress: Progress | None = None,
) -> Result:
    """Simulate a job.

    Args:
        job: model, layout and training flags.
        cluster: nodes, links and rates.
        trace: loads.
        systems: names in `SYSTEMS`.
        options: what systems may spend; None: what the preset's FSSDP_ARGS say, or the defaults.
        num_iterations: iterations that count; None: all of the trace.
        warm_up: iterations before them that systems only watch; fewer if the trace is short.
        timelines: numbers of iterations in the trace to keep the events of.
        trace_name: for titles.
        progress: called with a system's name, the iterations done and their number.

    Raises:
        ValueError: if a name is unknown, the trace does not fit the model, or is too short.
    """
    unknown = [name for name in systems if name not in SYSTEMS]
    if unknown:
        raise ValueError(f"unknown systems {unknown}; choose from {sorted(SYSTEMS)}")
    if trace.num_iterations < 1:
        raise ValueError("the trace has no iteration")
    options = options or Options.of_flags(job.fssdp_args)
    warm_up = min(warm_up, trace.num_iterations - 1)
    longest = trace.num_iterations - warm_up
    number = longest if num_iterations is None else num_iterations
    if not 0 < number <= longest:
        raise ValueError(
            f"{number} iterations after {warm_up} of warm-up are asked for, but the trace has "
            f"{trace.num_iterations}"
        )
    spread, costs = Spread(trace, job), Costs(job, cluster)
    runs = [
        _Run(SYSTEMS[name](costs, options, spread.num_groups), costs, number, set(timelines))
        for name in systems
    ]
    owners, numbers = _Owners(costs, number), trace.iterations
    missing = set(timelines) - set(numbers[warm_up : warm_up + number])
    if missing:
        raise ValueError(
            f"no events can be kept of iterations {sorted(missing)}: those that count are "
            f"{numbers[warm_up]} to {numbers[warm_up + number - 1]}"
        )
    for index in range(warm_up + number):
        counts_GLRE = spread.counts(index)
        owners.see(index - warm_up, counts_GLRE)
        for run in runs:
            run.step(index - warm_up, numbers[index], counts_GLRE)
            if progress is not None:
                progress(run.system.name, index + 1, warm_up + number)
    layout = job.layout
    return Result(
        source="simulated",
        model=job.shape.name,
        cluster=cluster.name,
        trace=trace_name,
        num_ranks=layout.num_ranks,
        num_nodes=-(-layout.num_ranks // cluster.ranks_per_node),
        iterations=np.array(numbers[warm_up : warm_up + number]),
        layers=np.array(job.shape.moe_layers),
        owner_straggler_IL=owners.straggler_IL,
        owner_loads_LR=owners.loads_LR / number,
        systems=tuple(run.result() for run in runs),
        layout=_layout(job),
        notes=(*job.notes, *spread.notes, *_assumptions(runs)),
    )


def _assumptions(runs: Sequence[_Run]) -> tuple[str, ...]:
    """Each system's, once."""
    return tuple(dict.fromkeys(text for run in runs for text in run.system.assumptions))


def _layout(job: Job) -> dict[str, int]:
    layout = job.layout
    names = ("tp", "pp", "cp", "ep", "etp", "dp", "edp", "micro_batch", "num_microbatches")
    return {name: getattr(layout, name) for name in names}


class _Owners:
    """What owners would compute under even ownership."""

    def __init__(self, costs: Costs, number: int) -> None:
        layout, shape = costs.job.layout, costs.job.shape
        self.owner_E = np.arange(shape.num_experts) // (shape.num_experts // layout.ep)
        num_layers = len(shape.moe_layers)
        self.straggler_IL = np.zeros((number, num_layers))
        self.loads_LR = np.zeros((num_layers, layout.ep))

    def see(self, index: int, counts_GLRE: Int64Array) -> None:
        if index < 0:
            return
        for layer, counts_GRE in enumerate(np.moveaxis(counts_GLRE, 1, 0)):
            loads_GR = np.stack([flow_of_owners(c, self.owner_E).load_R for c in counts_GRE])
            self.loads_LR[layer] += loads_GR.mean(axis=0)
            self.straggler_IL[index, layer] = (loads_GR.max(axis=1) / loads_GR.mean(axis=1)).mean()


@dataclass(eq=False)
class _Run:
    """One system on its way through the trace."""

    system: System
    costs: Costs
    number: int
    timelines: set[int]
    kept: dict[int, tuple[int, list[LayerWork], float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout = self.costs.job.layout
        self.num_layers = len(self.costs.job.shape.moe_layers)
        size_IGS = (self.number, self.system.num_groups, layout.pp)
        self.took_KIGS = np.zeros((len(KINDS), *size_IGS))
        self.parts_KIGSP = np.zeros((len(KINDS), *size_IGS, len(PARTS)))
        self.exposed_IGS = np.zeros(size_IGS)
        self.move_I = np.zeros(self.number)
        self.moved_I = np.zeros(self.number, dtype=np.int64)
        self.replicas_I, self.copied_I, self.far_I = (self.moved_I.copy() for _ in range(3))
        self.straggler_IL = np.zeros((self.number, self.num_layers))
        self.loads_LR = np.zeros((self.num_layers, layout.ep))
        self.peak_LR = self.loads_LR.copy()

    def step(self, index: int, iteration: int, counts_GLRE: Int64Array) -> None:
        """Run an iteration; before the first that counts, only its planning."""
        moved, move_s = self.system.before_iteration()
        if index >= 0:
            self.moved_I[index], self.move_I[index] = moved, move_s
            for group, counts_LRE in enumerate(counts_GLRE):
                placed = self.system.place(group, counts_LRE)
                work = [
                    self._work(layer, each)
                    for layer, each in zip(self.costs.job.shape.moe_layers, placed, strict=True)
                ]
                self._walk(index, group, work)
                self._account(index, placed)
                if group == 0 and iteration in self.timelines:
                    self.kept[iteration] = (index, work, move_s)
        self.system.observe(counts_GLRE)

    def _work(self, layer: int, placed: Placed) -> LayerWork:
        cores, costs, traits = self.costs.cluster.shared_cores, self.costs, self.system.traits
        fetch_work_s, return_work_s = costs.copying_s(placed.copied_bytes, traits)
        return LayerWork(
            dense_s=costs.dense_s(layer),
            tokens_s=costs.tokens_s(placed.flow),
            experts_R=costs.experts_R(placed.flow),
            fetch_R=placed.fetch_R,
            return_R=placed.return_R,
            traits=traits,
            fetch_work_s=fetch_work_s,
            return_work_s=return_work_s,
            grads_s=costs.grads_s(layer),
            recompute=costs.job.recompute,
            cores=cores,
        )

    def _walk(self, index: int, group: int, work: list[LayerWork]) -> None:
        for stage, passes in enumerate(walk_stages(self.costs, work)):
            for kind in KINDS:
                self.took_KIGS[kind, index, group, stage] = passes.took_s(kind)
                self.parts_KIGSP[kind, index, group, stage] = passes.parts(kind)
            self.exposed_IGS[index, group, stage] = passes.exposed_reduction_s(self.costs, stage)

    def _account(self, index: int, placed: list[Placed]) -> None:
        job, network = self.costs.job, self.costs.network
        micro, groups = job.layout.num_microbatches, self.system.num_groups
        trips = micro * (TOKEN_TRIPS + (2 if job.recompute != "none" else 0))
        traits = self.system.traits
        for layer, each in enumerate(placed):
            load_R = each.flow.load_R
            self.straggler_IL[index, layer] += load_R.max() / load_R.mean() / groups
            self.loads_LR[layer] += load_R / groups / self.number
            self.peak_LR[layer] = np.maximum(self.peak_LR[layer], load_R)
            tokens = far_bytes(each.flow.tokens_RR * self.costs.shape.row_bytes, network)
            often = micro if traits.fetches_each else 1
            self.replicas_I[index] += each.num_replicas // groups
            self.copied_I[index] += each.copied_bytes * often // groups
            self.far_I[index] += (tokens * trips + each.far_bytes * often) // groups

    def result(self) -> SystemResult:
        """Put the iterations together."""
        costs, system, layout = self.costs, self.system, self.costs.job.layout
        scheduled = self._schedule()
        shape_SIG = (layout.pp, self.number, system.num_groups)
        end_IGS = np.moveaxis(scheduled.end_SK.reshape(shape_SIG), 0, -1)
        own_S = np.array([costs.step_s(stage) for stage in range(layout.pp)])
        gather_S = np.array([self._gather_s(stage) for stage in range(layout.pp)])
        through_IGS = end_IGS + self.exposed_IGS + gather_S + own_S
        iteration_I = through_IGS.max(axis=(1, 2)) + self.move_I
        parts = self._parts(iteration_I, own_S, gather_S)
        exposed = ("tokens", "copies", "reduction", "moves")
        return SystemResult(
            name=system.name,
            title=system.title,
            iteration_s=iteration_I,
            straggler_IL=self.straggler_IL,
            loads_LR=self.loads_LR,
            exposed_s=np.asarray(sum(parts[name] for name in exposed)),
            parts_s=parts,
            replicas_I=self.replicas_I,
            copied_bytes_I=self.copied_I,
            far_bytes_I=self.far_I,
            moved_I=self.moved_I,
            memory_bytes=memory(costs, system, self.peak_LR),
            timelines={
                iteration: build_timeline(
                    costs,
                    walk_stages(costs, work, records=True),
                    self._one(scheduled, index),
                    move_s,
                )
                for iteration, (index, work, move_s) in sorted(self.kept.items())
            },
            notes=(*system.notes, *system.assumptions),
        )

    def _schedule(self) -> Scheduled:
        layout = self.costs.job.layout
        cases = self.number * self.system.num_groups
        took = np.moveaxis(self.took_KIGS.reshape(len(KINDS), cases, layout.pp), -1, 1)
        passes_SMK = np.repeat(took[[MIDDLE, BACK]][:, :, None], layout.num_microbatches, axis=2)
        passes_SMK[0][:, 0] = took[FIRST]
        passes_SMK[1][:, -1] = took[LAST]
        return schedule_1f1b(passes_SMK[0], passes_SMK[1], self.costs.send_s())

    def _one(self, scheduled: Scheduled, index: int) -> Scheduled:
        """The schedule of one iteration's first group."""
        at = index * self.system.num_groups
        return Scheduled(*(array[..., at : at + 1] for array in scheduled))

    def _gather_s(self, stage: int) -> float:
        job, costs = self.costs.job, self.costs
        if job.overlaps_param_gather:
            return 0.0  # under the next iteration's first forwards
        dense_s = costs.reduce_s(costs.dense_params(stage), is_expert=False)[1]
        return dense_s + costs.reduce_s(costs.expert_params(stage), is_expert=True)[1]

    def _parts(
        self, iteration_I: Float64Array, own_S: Float64Array, gather_S: Float64Array
    ) -> dict[str, Float64Array]:
        micro = self.costs.job.layout.num_microbatches
        times_K = np.array([1, micro - 1, micro - 1, 1])
        parts_IP = np.tensordot(times_K, self.parts_KIGSP, axes=1).mean(axis=(1, 2))
        parts = dict(zip(PARTS, parts_IP.T, strict=True))
        parts["reduction"] = self.exposed_IGS.mean(axis=(1, 2)) + gather_S.mean()
        parts["optimizer"] = np.full(self.number, own_S.mean())
        parts["moves"] = self.move_I
        parts["bubble"] = np.zeros(self.number)
        parts["bubble"] = iteration_I - np.asarray(sum(parts.values()))
        return parts

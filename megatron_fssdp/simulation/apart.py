# SPDX-License-Identifier: Apache-2.0

"""Simulate systems apart from each other, in as many processes as there are cores."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_fssdp.simulation.cluster import Cluster
from megatron_fssdp.simulation.model import Job
from megatron_fssdp.simulation.result import Result
from megatron_fssdp.simulation.simulate import Progress, simulate
from megatron_fssdp.simulation.spread import Trace

# Seconds between two looks at what the processes have done.
LOOK_S = 0.1
# Layers times iterations from which on processes are worth their start, about a second.
LEAST_LAYERS = 1000

# In a process: `run`, which simulates systems, and `told`, the queue of its progress.
_shared: dict[str, Any] = {}


def simulate_apart(
    job: Job,
    cluster: Cluster,
    trace: Trace,
    systems: Sequence[str],
    *,
    num_processes: int | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Result:
    """Simulate each system in a process of its own; the result is that of `simulate`.

    Args:
        job: see `simulate`.
        cluster: see `simulate`.
        trace: see `simulate`.
        systems: see `simulate`.
        num_processes: at a time; None: as many as this process has cores, 1 if there is little
            to do.
        progress: see `simulate`.
        settings: the other arguments of `simulate`.

    Raises:
        ValueError: as `simulate` does.
    """
    if num_processes is None:
        is_large = len(job.shape.moe_layers) * trace.num_iterations >= LEAST_LAYERS
        num_processes = len(os.sched_getaffinity(0)) if is_large else 1
    run: Callable[..., Result] = partial(simulate, job, cluster, trace, **settings)
    num_processes = min(num_processes, len(systems))
    if num_processes < 2:
        return run(systems, progress=progress)
    # Not forked: who calls may have threads, as a progress bar has.
    context = mp.get_context("spawn")
    told = context.SimpleQueue()
    with ProcessPoolExecutor(
        num_processes, mp_context=context, initializer=_start, initargs=(run, told)
    ) as pool:
        futures = [pool.submit(_simulate_one, name) for name in systems]
        left = set(futures)
        while left:
            done, left = wait(left, timeout=LOOK_S, return_when=FIRST_EXCEPTION)
            while not told.empty():
                each = told.get()
                if progress is not None:
                    progress(*each)
            if any(future.exception() is not None for future in done):
                pool.shutdown(cancel_futures=True)
                break
        results = [future.result() for future in futures if not future.cancelled()]
    return replace(
        results[0],
        systems=tuple(system for result in results for system in result.systems),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
    )


def _start(run: Callable[..., Result], told: Any) -> None:
    _shared.update(run=run, told=told)


def _simulate_one(name: str) -> Result:
    def tell(*each: Any) -> None:
        _shared["told"].put(each)

    result: Result = _shared["run"]((name,), progress=tell)
    return result

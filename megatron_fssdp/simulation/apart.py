# SPDX-License-Identifier: Apache-2.0

"""Simulate systems apart from each other, in as many processes as there are cores."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from megatron_fssdp.simulation.cluster import Cluster
from megatron_fssdp.simulation.model import Job
from megatron_fssdp.simulation.result import Result
from megatron_fssdp.simulation.simulate import simulate
from megatron_fssdp.simulation.spread import Trace

# Seconds between two looks at what the processes have done.
LOOK_S = 0.1
# Layers times iterations from which on processes are worth their start, about a second.
LEAST_LAYER_ITERATIONS = 1000

# Called with the iterations that are done, of all systems, and their number.
Progress = Callable[[int, int], None]

# In a process: `run`, which simulates systems, and `steps`: iterations done, and of a system.
_shared: dict[str, Any] = {}


def num_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def simulate_apart(
    job: Job,
    cluster: Cluster,
    trace: Trace,
    systems: Sequence[str],
    *,
    num_iterations: int | None = None,
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
        num_iterations: see `simulate`.
        num_processes: at a time; None: as many as this process has cores, 1 if there is little
            to do.
        progress: see `Progress`.
        settings: the other arguments of `simulate`.

    Raises:
        ValueError: as `simulate` does, or a process was ended from outside.
    """
    if num_processes is None:
        size = len(job.shape.moe_layers) * (num_iterations or trace.num_iterations)
        num_processes = num_cores() if size >= LEAST_LAYER_ITERATIONS else 1
    run = partial(simulate, job, cluster, trace, num_iterations=num_iterations, **settings)
    tell = progress or _tell_nobody
    if min(num_processes, len(systems)) < 2:
        return _here(run, systems, tell)
    # Not forked: who calls may have threads, as a progress bar has.
    context = mp.get_context("spawn")
    steps = context.Array("q", 2)
    others = set(mp.active_children())
    pool = ProcessPoolExecutor(
        min(num_processes, len(systems)), context, initializer=_start, initargs=(run, steps)
    )
    try:
        with _one_thread_each():
            futures = [pool.submit(_simulate_one, name) for name in systems]
        left = set(futures)
        while left:
            done, left = wait(left, timeout=LOOK_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()  # raises what it raised
            tell(steps[0], steps[1] * len(systems))
        results = [future.result() for future in futures]
    except BrokenProcessPool:
        raise ValueError(
            f"a process that simulates one of {', '.join(systems)} was ended from outside, perhaps "
            "for want of memory: give fewer --systems or --iterations"
        ) from None
    finally:
        # After an error, an interrupt too, nothing that still runs is of use.
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(mp.active_children()) - others:
            process.terminate()
    return replace(
        results[0],
        systems=tuple(system for result in results for system in result.systems),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
    )


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Have processes that start in here compute with one thread, for each has a core.

    BLAS's other threads would spin between its small products, on the cores of the others.
    """
    names = [f"{each}_NUM_THREADS" for each in ("OMP", "OPENBLAS", "MKL")]
    names.append("VECLIB_MAXIMUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _tell_nobody(done: int, total: int) -> None:
    """Be the progress of who asks for none."""


def _here(run: Callable[..., Result], systems: Sequence[str], tell: Progress) -> Result:
    number = count(1)
    return run(
        systems, progress=lambda _name, _done, total: tell(next(number), total * len(systems))
    )


def _start(run: Callable[..., Result], steps: Any) -> None:
    _shared.update(run=run, steps=steps)
    # A terminal interrupts all; the one that waits for the others ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _simulate_one(name: str) -> Result:
    steps = _shared["steps"]

    def step(_name: str, _done: int, total: int) -> None:
        with steps.get_lock():
            steps[0] += 1
            steps[1] = total

    result: Result = _shared["run"]((name,), progress=step)
    return result

"""Run a function on several gloo ranks: `run_ranks(4, fn, *args)`.

Each call starts fresh processes from a forkserver that has torch and Megatron imported already
(about 10 s once per pytest run, then about a second a call). A failing rank's traceback is
reported, a killed rank's exit code, and a hang ends after `timeout_s` with the ranks that had not
finished.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

# FSSDP_ALL=1 runs every combination; by default the longest tests run a covering few.
ALL = os.environ.get("FSSDP_ALL", "0") not in ("", "0")


def a_few(cases: Sequence[Any], few: Sequence[int]) -> list[Any]:
    """Return all cases with FSSDP_ALL=1, else those at the positions `few`."""
    return list(cases) if ALL else [cases[position] for position in few]


PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo.trace_rules",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "tests.ranks",
]


def _context() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _run_rank(
    rank: int, world_size: int, store: str, fn: Callable, args: tuple, results: Any
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1"
    )
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # Megatron warns of every optional package that is absent
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
        # Pickled here: the queue would hand tensors over as files of a process that has ended.
        results.put((rank, None, pickle.dumps(fn(*args))))
        # A rank that leaves early closes its sockets under the others' last collective.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))


def run_ranks(
    world_size: int, fn: Callable, *args: Any, timeout_s: float = 120, check: bool = True
) -> list[Any]:
    """Call `fn(*args)` on `world_size` gloo ranks and return what each returned, by rank.

    `fn` must be importable (a module-level function) and its results picklable.

    Raises:
        AssertionError: if a rank raised (its traceback is the message) or did not finish in time.
    """
    context = _context()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=_run_rank, args=(rank, world_size, store, fn, args, results))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        try:
            while len({*answers, *errors}) < world_size and not (errors and check):
                if results.empty():
                    if time.monotonic() > deadline:
                        missing = sorted(set(range(world_size)) - set(answers) - set(errors))
                        raise AssertionError(f"ranks {missing} did not finish in {timeout_s} s")
                    # Nonzero: it will not answer any more.
                    for rank, process in enumerate(processes):
                        if rank not in answers and rank not in errors and process.exitcode:
                            errors[rank] = f"died with exit code {process.exitcode}"
                    time.sleep(0.01)
                    continue
                rank, error, answer = results.get()
                if error is None:
                    answers[rank] = pickle.loads(answer)
                else:
                    errors[rank] = error
        finally:
            for process in processes:
                process.join(timeout=5 if not errors else 0.2)
                if process.is_alive():
                    process.kill()
                    process.join()
    if check:
        assert not errors, "\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items())
        return [answers[rank] for rank in range(world_size)]
    return [answers.get(rank, errors.get(rank)) for rank in range(world_size)]

"""A rank dies anywhere, in moves and saves too.

The last whole checkpoint resumes, with the losses of a run that nobody killed.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.integration.tiny import Job, TinyRun
from tests.ranks import a_few, run_ranks

STEPS, SAVE_EVERY = 8, 3
JOB = replace(
    Job(ep=2, steps=STEPS, num_layers=2, distributed_optimizer=True).as_fssdp(), reshard_every=2
)


def _die_at(place: str, rng: np.random.Generator) -> None:
    """Arm this process to die in its n-th move or message, or some milliseconds into a save."""
    from megatron_fssdp.collectives import sparse
    from megatron_fssdp.integration.mover import Mover

    left = [int(rng.integers(0, 12))]

    def counting(stock: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            if left[0] == 0:
                os._exit(9)
            left[0] -= 1
            return stock(*args, **options)

        return run

    if place == "move":
        Mover._exchange = counting(Mover._exchange)  # type: ignore[method-assign]
    elif place == "copy":
        sparse._exchange = counting(sparse._exchange)
    else:
        which, delay_s = int(rng.integers(0, 2)), float(rng.uniform(0, 0.05))
        stock_save, saves = TinyRun.save, []

        def save(self: TinyRun, folder: str) -> None:
            saves.append(folder)
            if len(saves) == which + 1:
                threading.Timer(delay_s, os._exit, (9,)).start()
            stock_save(self, folder)

        TinyRun.save = save  # type: ignore[method-assign]


def _train(folder: str, seed: int | None, place: str) -> list[float]:
    """Train from the last whole checkpoint, saving on the way; die if there is a seed."""
    latest = Path(folder) / "latest"
    if seed is not None and dist.get_rank() == seed % dist.get_world_size():
        _die_at(place, np.random.default_rng(seed))
    run, first = TinyRun(JOB), 0
    if latest.exists():
        first = int(latest.read_text())
        run.load(str(Path(folder) / f"iter_{first}"))
    for step in range(first, STEPS):
        run.step(step)
        if (step + 1) % SAVE_EVERY == 0:
            here = Path(folder) / f"iter_{step + 1}"
            here.mkdir(exist_ok=True)
            run.save(str(here))
            dist.barrier()
            # As Megatron: what is named here is whole, whatever lies beside it.
            if dist.get_rank() == 0:
                (latest.parent / "latest.new").write_text(str(step + 1))
                (latest.parent / "latest.new").replace(latest)
    run.runtime.close()
    return run.result.losses


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    losses: list[float] = run_ranks(2, _train, str(folder), None, "")[0]
    return losses


@pytest.mark.parametrize("seed", a_few(range(20), (0,)))
def test_killed_anywhere_resumes_with_the_right_losses(
    seed: int, tmp_path: Path, undisturbed: list[float]
) -> None:
    place = ("move", "copy", "save")[seed % 3]
    answers = run_ranks(2, _train, str(tmp_path), seed, place, check=False)
    # Late messages may never come: then the run ends by itself.
    killed = "died with exit code 9" in answers
    latest = tmp_path / "latest"
    first = int(latest.read_text()) if latest.exists() else 0
    if killed:
        assert all(isinstance(answer, str) for answer in answers), "a survivor did not notice"
    for name in tmp_path.glob("iter_*"):
        if int(name.name.removeprefix("iter_")) > first and name.is_dir():
            # A half-written one is in nobody's way when the run comes by again.
            for file in name.iterdir():
                file.unlink()
    resumed = run_ranks(2, _train, str(tmp_path), None, "")[0]
    assert resumed == undisturbed[first:]

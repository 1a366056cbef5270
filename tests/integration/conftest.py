"""Ranks that see Transformer Engine, for all tests of this folder."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.te_stub import jobs

ROOT = Path(__file__).parents[2]
TE = Path(sys.prefix) / "te"


def _see_te_in_ranks() -> None:
    """Prepare the process that starts the ranks: they import TE before Megatron."""
    os.environ["PYTHONPATH"] = str(ROOT)
    ranks.PRELOAD.insert(0, "tests.te_stub.preload")


@pytest.fixture(scope="session")
def run_with_te() -> Iterator[Callable[..., list[Any]]]:
    """`tests.ranks.run_ranks`, on ranks that see TE."""
    if not TE.is_dir():
        reason = f"Transformer Engine's Python part is not in {TE}; run scripts/setup_venv.sh"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)

    # The process that starts the ranks is kept: it has a forkserver, as this one has.
    with ProcessPoolExecutor(1, mp.get_context("spawn"), _see_te_in_ranks) as pool:

        def run(world_size: int, fn: Callable, *args: Any) -> list[Any]:
            future = pool.submit(ranks.run_ranks, world_size, jobs.pickled, fn, *args)
            return [pickle.loads(result) for result in future.result()]

        yield run

# SPDX-License-Identifier: Apache-2.0

"""Systems that are simulated in processes of their own have the result of one process."""

from collections import Counter
from pathlib import Path

import pytest

from megatron_fssdp.simulation.apart import simulate_apart
from megatron_fssdp.simulation.result import write_result
from megatron_fssdp.simulation.simulate import simulate
from megatron_fssdp.simulation.spread import ZipfTrace
from tests.simulation.cases import make_cluster, make_job

SYSTEMS = ("ep", "laer", "fssdp")
TRACE = ZipfTrace(1.0, 8, 2, 4, 10, tokens=512, seed=3)


def test_result_is_that_of_one_process(tmp_path: Path) -> None:
    """All figures, notes and events, in the order of the systems."""
    case = (make_job(), make_cluster(), TRACE, SYSTEMS)
    seen: Counter[str] = Counter()
    apart = simulate_apart(
        *case,
        num_processes=2,
        timelines=(5,),
        progress=lambda name, done, total: seen.update([name, f"of {total}"]),
    )
    write_result(tmp_path / "apart.json", apart)
    write_result(tmp_path / "one.json", simulate(*case, timelines=(5,)))
    assert (tmp_path / "apart.json").read_text() == (tmp_path / "one.json").read_text()
    assert seen == {"ep": 10, "laer": 10, "fssdp": 10, "of 10": 30}


def test_errors_come_through() -> None:
    """What one process finds wrong is raised here."""
    with pytest.raises(ValueError, match="iterations after"):
        simulate_apart(
            make_job(), make_cluster(), TRACE, SYSTEMS, num_processes=2, num_iterations=99
        )

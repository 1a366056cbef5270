# SPDX-License-Identifier: Apache-2.0

"""Results: figures that follow from them, and JSON there and back."""

import json

import numpy as np
import pytest

from megatron_fssdp.simulation.result import Result, SystemResult, TimelineEvent, read_result


def make_result() -> Result:
    """Two iterations of one layer on two ranks."""
    event = TimelineEvent(
        name="spAG", rank=1, stream="copies", start_s=0.5, duration_s=0.25, layer=0
    )
    step = TimelineEvent(
        name="optimizer", rank=0, stream="compute", start_s=1.5, duration_s=0.5, phase="step"
    )
    common = {
        "straggler_IL": np.array([[1.5], [1.25]]),
        "loads_LR": np.array([[3.0, 1.0]]),
        "exposed_s": np.array([0.25, 0.5]),
    }
    ep = SystemResult(name="ep", title="EP", iteration_s=np.array([2.0, 4.0]), **common)
    fssdp = SystemResult(
        name="fssdp",
        title="FSSDP",
        iteration_s=np.array([1.0, 2.0]),
        parts_s={"attention": np.array([0.5, 1.0]), "experts": np.array([0.5, 1.0])},
        replicas_I=np.array([1, 2]),
        memory_bytes={"replicas": np.array([8, 16]), "activations": np.array([4])},
        timelines={0: (event, step)},
        notes=("a note",),
        **common,
    )
    return Result(
        source="simulated",
        model="m",
        cluster="c",
        trace="t",
        num_ranks=2,
        num_nodes=1,
        iterations=np.array([7, 8]),
        layers=np.array([1]),
        owner_straggler_IL=np.array([[1.5], [1.5]]),
        owner_loads_LR=np.array([[3.0, 1.0]]),
        systems=(ep, fssdp),
        layout={"ep": 2},
    )


def test_figures_that_follow() -> None:
    result = make_result()
    assert result.speed_up("fssdp") == 2.0
    assert result.system("ep").mean_s == 3.0
    assert result.system("ep").percentiles_s()[50] == 3.0
    assert result.system("ep").peak_bytes is None
    assert result.system("fssdp").peak_bytes == 20
    assert result.system("fssdp").peak_parts == {"replicas": 16, "activations": 4}
    with pytest.raises(KeyError, match="there are"):
        result.system("moonep")


def test_json_there_and_back(tmp_path) -> None:
    result = make_result()
    text = result.to_json()
    again = Result.from_json(text)
    assert again.to_json() == text
    assert again.system("fssdp").timelines == result.system("fssdp").timelines
    assert again.system("fssdp").memory_bytes["replicas"].dtype == np.int64
    assert again.owner_loads_LR.shape == (1, 2)
    assert json.loads(text)["systems"][1]["summary"]["peak_bytes"] == 20
    (tmp_path / "r.json").write_text(text)
    assert read_result(tmp_path / "r.json").num_ranks == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ('{"format": "x"}', "no result file"),
        ('{"format": "fssdp-result", "version": 9}', "version 9, this program reads 1"),
        ('{"format": "fssdp-result", "version": 1}', "bad.json"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_result(path)

# SPDX-License-Identifier: Apache-2.0

"""`fssdp simulate`, as a user types it."""

import json

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from megatron_fssdp.cli import app
from megatron_fssdp.presets.files import find_file
from megatron_fssdp.simulation.model import read_job
from megatron_fssdp.simulation.result import read_result

COMMAND = "simulate --model gpt_moe_s --cluster a100_hgx --nodes 1 --global-batch 8"


def run(words: str, code: int = 0) -> str:
    answer = CliRunner().invoke(app, words.split(), env={"COLUMNS": "120"})
    assert answer.exit_code == code, answer.output
    return answer.output


def test_table_and_files(tmp_path) -> None:
    files = f"--json {tmp_path}/r.json --chrome-trace {tmp_path}/c.json --html {tmp_path}/r.html"
    output = run(f"{COMMAND} --trace zipf:0.8 --systems ep,fssdp --iterations 2 {files}")
    assert "Simulated: gpt_moe_s on 1 x a100_hgx, 2 iterations of zipf:0.8" in output
    assert "FSSDP (this project)" in output
    assert "Simulated, not run." in output
    result = read_result(tmp_path / "r.json")
    assert f"{result.speed_up('fssdp'):.2f}" in output
    assert result.iterations.tolist() == [5, 6]
    assert list(result.system("ep").timelines) == [5]
    assert "<html" in (tmp_path / "r.html").read_text()
    assert json.loads((tmp_path / "c.json").read_text())["otherData"]["source"] == "simulated"


def test_what_quotas_take_is_said_and_can_be_given(tmp_path) -> None:
    words = f"{COMMAND} --trace zipf:0.8 --systems ep,fssdp --iterations 1"
    assumed = " ".join(run(words).split())
    assert "FSSDP waits 482 us for its quotas in each MoE layer" in assumed
    assert "the host's part as measured on a core, for 8 ranks" in assumed
    given = " ".join(run(f"{words} --planning-us 250").split())
    assert "FSSDP waits 250 us" in given
    assert "as given" in given
    values = yaml.safe_load(find_file("clusters", "a100_hgx").read_text())
    values["compute"]["planning_s"] = 1e-3
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    mine = " ".join(run(words.replace("a100_hgx", f"{tmp_path}/mine.yaml")).split())
    assert "FSSDP waits 1,000 us" in mine


def test_a_recorded_trace_is_read(tmp_path) -> None:
    counts_ILRE = np.random.default_rng(0).integers(1, 100, (3, 2, 4, 64))
    np.savez(tmp_path / "t.npz", counts=counts_ILRE)
    output = run(f"{COMMAND} --trace {tmp_path}/t.npz --systems ep,hecate")
    assert "1 iterations" in output
    assert "4 source ranks are spread over 8" in " ".join(output.split())
    assert "12 MoE layers take the trace's 2 in turn" in " ".join(output.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trace zipf:x", "write zipf:EXPONENT"),
        ("--trace no/such/file", "does not exist"),
        (
            "--trace zipf:1 --slots 64",
            "--slots 64 is more than the 56 experts that a rank does not",
        ),
        ("--trace zipf:1 --json no/x.json", "there is no folder no to write x.json to"),
        ("--trace zipf:1 --systems ep,mooncake", "mooncake unknown; choose from ep,"),
        ("--trace zipf:1 --model gpt5", "there is no model named 'gpt5'"),
        ("--trace zipf:1 --cluster abacus", "there is no cluster named 'abacus'"),
        ("--trace zipf:1 --nodes 3", "GPUs are not a multiple of"),
        ("--trace zipf:nan", "write zipf:EXPONENT with 0 (even) to 10"),
        ("--trace zipf:inf", "write zipf:EXPONENT with 0 (even) to 10"),
        ("--trace zipf:1 --global-batch 0", "Invalid value for '--global-batch'"),
        ("--trace zipf:1 --global-batch=-16", "Invalid value for '--global-batch'"),
        ("--trace zipf:1 --nodes 0", "Invalid value for '--nodes'"),
        ("--trace zipf:1 --iterations=-3", "Invalid value for '--iterations'"),
        ("--trace zipf:1 --json .", ". is a folder; give the name of a file to write"),
        ("--trace zipf:1 --json a.x --html ./a.x", "a.x is to be written twice"),
        ("--trace zipf:1 --timeline 999", "--timeline 999 is not simulated; use one of the"),
    ],
)
def test_wrong_words_are_told_in_a_sentence(words, message) -> None:
    output = run(f"{COMMAND} {words}", code=2)
    assert message in " ".join(output.split())
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "flops_per_s: 200.0e+12",
            "flops_per_s: 0",
            "compute.flops_per_s is 0; use a number above",
        ),
        ("bytes_per_s: 300.0e+9", "bytes_per_s: .nan", "topology.intra_node.bytes_per_s is nan;"),
        ("bytes_per_s: 300.0e+9", "bytes_per_s: abc", "topology.intra_node.bytes_per_s is 'abc';"),
        ("latency_s: 5.0e-6", "latency_s: -1", "latency_s is -1; use a number of at least 0"),
        ("ranks_per_node: 8", "ranks_per_node: 0", "topology.ranks_per_node is 0; use a whole"),
        ("  flops_per_s: 200.0e+12", "", "compute lacks flops_per_s"),
        ("topology:", "topology: [", "is no YAML file: while parsing"),
        (
            "bytes_per_s: 300.0e+9",
            "bytes_per_s: 1e9\n    colour: 3",
            "topology.intra_node.colour is unknown; use bytes_per_s, latency_s",
        ),
        (
            "group_floor_s: 5.0e-6",
            "group_flor_s: 5.0e-6",
            "compute.group_flor_s is unknown; use flops_per_s, group_floor_s, rate_by_rows",
        ),
        (
            "group_floor_s: 5.0e-6",
            "cores_copy: 'false'",
            "compute.cores_copy is 'false'; use true or false",
        ),
        (
            "group_floor_s: 5.0e-6",
            "has_fused_kernels: 1",
            "compute.has_fused_kernels is 1; use true or false",
        ),
        (
            "adapters_per_node: 1",
            "adapters_per_node: 9",
            "topology.adapters_per_node is 9, more than the 8 ranks of a node",
        ),
        ("gpu:", "gpu: []\nother:", "gpu is []; use a mapping"),
    ],
)
def test_a_cluster_file_that_cannot_be_is_named_with_its_key(tmp_path, old, new, message) -> None:
    text = find_file("clusters", "a100_hgx").read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    output = run(f"{COMMAND} --cluster {path} --trace zipf:1", code=2)
    # A long path is one word.
    assert f"fssdp simulate: {path}" in output
    assert message in " ".join(output.split())


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("MODEL_ARGS", "--moe-router-topk", 65, "--moe-router-topk is 65, and --num-experts 64"),
        ("MODEL_ARGS", "--moe-layer-freq", 0, "--moe-layer-freq is 0; use a whole number"),
        ("MODEL_ARGS", "--moe-layer-freq", "[0,1", "--moe-layer-freq is [0,1; use a whole"),
        ("MODEL_ARGS", "--moe-layer-freq", "[0]*12", "zeros and ones, not all zero"),
        ("MODEL_ARGS", "--moe-layer-freq", "[0]*99999999999", "a list of 12 zeros and ones"),
        ("MODEL_ARGS", "--moe-layer-freq", [1, 2] * 6, "a list of 12 zeros and ones"),
        ("LAYOUTS", 0, {}, "LAYOUTS is no mapping from numbers of nodes, of at least 1, to flags"),
    ],
)
def test_a_model_file_that_cannot_be_is_named(tmp_path, part, key, value, message) -> None:
    """A 65th of 64 experts was simulated; the others ended in tracebacks."""
    values = yaml.safe_load(find_file("models", "gpt_moe_s").read_text())
    values[part][key] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    output = run(f"simulate --model {path} --cluster a100_hgx --trace zipf:1", code=2)
    assert f"fssdp simulate: {path}: " in output
    assert message in " ".join(output.split())


def test_brackets_of_names_are_printed_as_they_are(tmp_path) -> None:
    """Rich took `[/b]` for markup and ended in a traceback, and dropped `[bold]`."""
    folder = tmp_path / "a[/b][bold]:smile:"
    run(f"trace generate {folder} --iterations 2")
    assert "a[/b][bold]:smile:: 2 iterations" in run(f"trace info {folder}")
    output = run(f"{COMMAND} --trace {folder} --systems ep")
    assert "a[/b][bold]:smile:" in "".join(output.split())


def test_a_model_file_that_is_no_yaml_is_named(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("MODEL_ARGS: {--num-layers: [}")
    output = run(f"simulate --model {path} --cluster a100_hgx --trace zipf:1", code=2)
    assert f"fssdp simulate: {path} is no YAML file: while parsing" in output


def test_the_table_fits_a_terminal_and_a_pipe_is_wide() -> None:
    answer = CliRunner().invoke(
        app, f"{COMMAND} --trace zipf:1 --iterations 1".split(), env={"COLUMNS": "80"}
    )
    lines = answer.output.splitlines()
    rows = [line for line in lines if line.startswith(("system", "FSSDP", "EP (", "LAER"))]
    assert len(rows) == 4
    assert all(len(line.rstrip()) <= 80 for line in rows)
    assert "peak GB" in rows[0]
    assert max(map(len, lines)) > 80


def test_a_model_file_without_layouts_is_simulated_on_what_it_needs(tmp_path) -> None:
    """As `--fssdp-record-trace` writes them: nobody has said how many GPUs."""
    values = yaml.safe_load(find_file("models", "gpt_moe_s").read_text())
    values.pop("LAYOUTS")
    values["MODEL_ARGS"] |= {
        "--expert-model-parallel-size": 4,
        "--expert-tensor-parallel-size": 1,
        "--tensor-model-parallel-size": 2,
        "--sequence-parallel": True,
        "--pipeline-model-parallel-size": 3,
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    assert read_job(str(tmp_path / "mine.yaml")).layout.num_ranks == 12

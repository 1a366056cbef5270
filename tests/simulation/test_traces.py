"""Every format of traces reads to the same counts; torn files lose only what is torn."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fssdp.simulation.importers import deal
from megatron_fssdp.simulation.recording import FRAME, TraceWriter, open_recording
from megatron_fssdp.simulation.traces import Trace, open_trace, owned_loads, write_trace

# (iterations, layers, ranks, experts); above 65,535 too.
COUNTS = np.random.default_rng(0).integers(0, 70_000, (5, 3, 4, 8))


def all_counts(trace: Trace) -> np.ndarray:
    counts = np.stack([trace.counts(position) for position in range(trace.num_iterations)])
    shape = (trace.num_iterations, trace.num_layers, trace.num_ranks, trace.num_experts)
    assert counts.shape == shape
    assert counts.dtype == np.int64
    return counts


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_trace(Trace.of(COUNTS, "made"), folder)
    return folder


def test_recorded_format(recorded: Path) -> None:
    trace = open_trace(recorded)
    assert (all_counts(trace) == COUNTS).all()
    assert trace.notes == ()
    # What EP computes: experts 0 and 1 on rank 0, and so on.
    loads = open_recording(recorded).read(0).loads_LR
    assert (loads == COUNTS[0].sum(axis=1).reshape(3, 4, 2).sum(axis=2)).all()
    with pytest.raises(ValueError, match="holds a trace already"):
        write_trace(trace, recorded)


def test_documented_lines_read_a_frame(recorded: Path) -> None:
    """The docstring's numpy lines, by hand."""
    data = (recorded / "trace-stage0.bin").read_bytes()
    frame = np.frombuffer(data, FRAME, count=1, offset=0)[0]
    assert FRAME.itemsize == 20
    payload = zlib.decompress(data[20 : 20 + frame["num_bytes"]])
    values = np.frombuffer(payload, np.uint8).reshape(4, -1).T.copy().view("<i4")
    assert (values.reshape(3, -1)[:, :32].reshape(3, 4, 8) == COUNTS[0]).all()


@settings(max_examples=40, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), is_cut=st.booleans())
def test_torn_and_damaged_files_give_what_is_whole(
    tmp_path_factory: pytest.TempPathFactory, place: float, is_cut: bool
) -> None:
    """Whatever byte is cut off or changed, all other iterations read, and a sentence tells."""
    folder = tmp_path_factory.mktemp("torn") / "run"
    write_trace(Trace.of(COUNTS, "made"), folder)
    path = folder / "trace-stage0.bin"
    data = bytearray(path.read_bytes())
    ends = [sum(at) for at in open_recording(folder).stages[0].frames.values()]
    byte = int(place * len(data))
    whole = [i for i, end in enumerate(ends) if end <= byte]
    if is_cut:
        del data[byte:]
    else:
        data[byte] ^= 0x55
        whole = [i for i in range(5) if i != len(whole)]
    path.write_bytes(bytes(data))
    if not whole:
        with pytest.raises(ValueError, match="no iteration that all its stages finished"):
            open_trace(folder)
        return
    trace = open_trace(folder)
    assert trace.iterations == tuple(whole)
    assert (all_counts(trace) == COUNTS[whole]).all()
    assert len(trace.notes) == (not is_cut or byte not in ends)


def test_a_writer_goes_on_after_a_torn_frame(recorded: Path) -> None:
    path = recorded / "trace-stage0.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-7])
    writer = TraceWriter(recorded, 0, 1, [(4, 8)] * 3, range(1, 4))
    loads_LR = owned_loads(COUNTS[4])
    writer.append(4, list(COUNTS[4]), list(loads_LR), [0] * 3, [0] * 3)
    writer.close()
    assert path.read_bytes() == data
    with pytest.raises(ValueError, match="give --fssdp-record-trace another folder"):
        TraceWriter(recorded, 0, 1, [(4, 16)] * 3, range(1, 4))


def test_stages_are_joined_by_iteration_not_by_place(tmp_path: Path) -> None:
    """One stage wrote an iteration more before the job was killed and resumed."""
    for stage, written in ((0, [0, 1, 2, 1, 2, 3]), (1, [0, 1, 1, 2, 3])):
        writer = TraceWriter(tmp_path, stage, 2, [(2, 4)], [2 - stage])
        for iteration in written:
            counts = np.full((1, 2, 4), 10 * iteration + stage)
            writer.append(iteration, list(counts), list(owned_loads(counts)), [0], [0])
        writer.close()
    trace = open_trace(tmp_path)
    assert trace.iterations == (0, 1, 2, 3)
    # Layer 1 of the model is stage 1's here: numbers decide.
    assert trace.counts(2)[:, 0, 0].tolist() == [21, 20]


def test_bad_folders_and_files_say_what_is_expected(tmp_path: Path) -> None:
    cases: dict[str, tuple[str | None, str]] = {
        "absent": (None, "does not exist"),
        "x.txt": ("1", "is of no known kind"),
        "x.json": ("{", "is no JSON"),
        "y.json": ('{"a": 1}', "has none of: logical_count"),
        "z.json": ('{"logical_count": [[0, 0]]}', "counts no token"),
        "x.csv": ("a,b\n1,2\n", "its columns are"),
        "x.npz": ("no zip", "cannot be read"),
        "x.pt": ("", "fssdp trace import"),
    }
    for name, (text, message) in cases.items():
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            open_trace(tmp_path / name)
    with pytest.raises(ValueError, match="holds no trace"):
        open_trace(tmp_path)
    (tmp_path / "trace-stage0.json").write_text('{"version": 99, "layers": []}')
    with pytest.raises(ValueError, match="format 99; this reads 2"):
        open_trace(tmp_path)
    whole = '{"version": 2, "stages": 1, "layers": [[1, -4]], "numbers": [1]}'
    many = whole.replace("-4", "4").replace('"stages": 1', '"stages": 1000000000000')
    none = '{"version": 2, "stages": 1, "layers": [], "numbers": []}'
    for header in ('{"version": 2}', whole, whole.replace("[[1, -4]]", "[[1]]"), many, none):
        (tmp_path / "trace-stage0.json").write_text(header)
        with pytest.raises(ValueError, match="is damaged: 'layers' must be pairs"):
            open_trace(tmp_path)
    (tmp_path / "trace-stage0.json").write_text("no")
    with pytest.raises(ValueError, match="no header of a trace"):
        open_trace(tmp_path)


def test_a_header_of_another_run_is_noticed(recorded: Path) -> None:
    header = recorded / "trace-stage0.json"
    header.write_text(header.read_text().replace("[4, 8]", "[4, 4]"))
    with pytest.raises(ValueError, match="has 114 numbers, and its header tells of 66"):
        open_trace(recorded).counts(0)


def test_counts_that_the_format_cannot_hold_are_refused(tmp_path: Path) -> None:
    most = np.full((1, 1, 1, 2), 2**30 - 1)
    write_trace(Trace.of(most, "made"), tmp_path / "most")
    assert open_trace(tmp_path / "most").counts(0).sum() == 2**31 - 2
    with pytest.raises(ValueError, match="a count of 4294967292 tokens; the format holds at most"):
        write_trace(Trace.of(2 * most, "made"), tmp_path / "more")
    # Half a trace was left, and read as a whole one.
    assert list((tmp_path / "more").iterdir()) == []


@pytest.mark.parametrize(
    ("count", "told"), [(-5, "has the count -5; counts are 0 or"), (0, "counts no token in any")]
)
def test_negative_and_empty_recordings_are_refused(tmp_path: Path, count: int, told: str) -> None:
    """They were simulated, as perfectly balanced."""
    writer = TraceWriter(tmp_path, 0, 1, [(2, 4)], [1])
    for iteration in range(3):
        counts = np.full((2, 4), count)
        writer.append(iteration, [counts], [np.full(2, count)], [0], [0])
    writer.close()
    with pytest.raises(ValueError, match=told):
        open_trace(tmp_path)


@pytest.mark.parametrize(
    ("payload", "told"),
    [(b"no zlib", "cannot be read: it is damaged"), (zlib.compress(b"abc"), "has 3 bytes")],
)
def test_frames_that_are_no_numbers_name_the_file(
    recorded: Path, payload: bytes, told: str
) -> None:
    frame = np.array([(b"FSSDP\x00TR", 0, len(payload), zlib.crc32(payload, 0))], dtype=FRAME)
    (recorded / "trace-stage0.bin").write_bytes(frame.tobytes() + payload)
    with pytest.raises(ValueError, match=rf"trace-stage0\.bin.*{told}"):
        open_trace(recorded)


EPLB = {"expert_load_window": [[[1, 2]]], "physical_to_logical_map": [[0, 1]]}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("a.json", {"logical_count": [[1, -5]]}, "logical_count has -5; use whole numbers of at"),
        ("a.json", {"logical_count": [[1.7, 2]]}, "logical_count has 1.7; use whole"),
        ("a.json", {"logical_count": [[float("nan"), 2]]}, "logical_count has nan; use whole"),
        ("a.json", {"logical_count": [[1e30, 2]]}, r"logical_count has 1e\+30; use whole"),
        ("a.json", {"logical_count": [[1, 2], [3]]}, "rows of logical_count differ in length"),
        ("a.json", {"logical_count": [["x", "y"]]}, "values that are no numbers"),
        ("a.json", {"logical_count": []}, r"logical_count is \(0,\); use \(steps, layers, exp"),
        ("a.json", {**EPLB, "physical_to_logical_map": [[-1, 0]]}, "logical_map has -1; use"),
        ("a.json", {**EPLB, "physical_to_logical_map": [[10**9, 0]]}, "experts up to 1000000000"),
        ("a.json", {**EPLB, "physical_to_logical_map": [[0]]}, r"is \(1, 1\) with experts"),
        ("a.json", {"expert_load_window": [[[1]]]}, "it lacks 'physical_to_logical_map'"),
        ("a.json", {"records": []}, "records are none, or differ"),
        ("a.json", {"records": 5}, "a part of it is of another kind than expected"),
        ("a.json", {"routed_experts": [[[9]]]}, "a token chose expert 9, and 8 experts are"),
        ("a.json", {"routed_experts": [5]}, r"routed_experts is \(1,\); use \(tokens, layers"),
        ("a.npz", -np.ones((1, 1, 2)), "counts has -1.0; use whole"),
        ("a.npz", np.full((1, 1, 2), 0.9), "counts has 0.9; use whole"),
        ("a.npz", np.zeros((1, 1, 1, 2)), "counts no token in any iteration"),
        ("a.npz", np.array([{}]), "counts is no array of numbers"),
        ("a.csv", b"iteration,layer,expert,tokens\n0,0,999999999,5\n", "counts; use 1 to"),
        ("a.csv", b"\xff\xfe", "its byte 0 is no UTF-8 text"),
        ("a.csv", b"iteration,layer,expert,tokens\n0,0,0,99999999999999999999\n", "has no row"),
        ("a.json", "[" * 100_000, "nested too deeply"),
    ],
)
def test_imports_of_what_cannot_be_name_the_file(
    tmp_path: Path, name: str, value: Any, told: str
) -> None:
    """Negative and cut-off counts were imported; others ended in tracebacks or without a file."""
    path = tmp_path / name
    if name.endswith(".npz"):
        np.savez(path, counts=value)
    elif isinstance(value, bytes):
        path.write_bytes(value)
    else:
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(ValueError, match=told) as error:
        open_trace(path, num_experts=8)
    assert str(error.value).startswith(str(path))


def test_a_row_far_away_takes_no_memory(tmp_path: Path) -> None:
    """10^9 iterations were filled in."""
    lines = ["iteration,layer,expert,tokens", "1000000000,3,0,5", "1000000000,7,1,6"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    trace = open_trace(tmp_path / "a.csv")
    assert all_counts(trace).tolist() == [[[[5, 0]], [[0, 6]]]]
    assert "a.csv: no row names some layers up to 7: left out" in trace.notes
    with pytest.raises(ValueError, match="fewer iterations or ranks"):
        open_trace(tmp_path / "a.csv", num_ranks=10**9)


def test_npz_and_csv(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", counts=COUNTS)
    assert (all_counts(open_trace(tmp_path / "a.npz")) == COUNTS).all()
    np.savez(tmp_path / "b.npz", loads=COUNTS.sum(axis=2))
    pooled = open_trace(tmp_path / "b.npz", num_ranks=4)
    assert (all_counts(pooled).sum(axis=2) == COUNTS.sum(axis=2)).all()
    assert np.ptp(all_counts(pooled), axis=2).max() == 1
    assert "dealt out evenly over 4 ranks" in pooled.notes[0]

    lines = ["iteration,layer,rank,expert,tokens"]
    lines += [f"{i},{n},{r},{e},{COUNTS[i, n, r, e]}" for i, n, r, e in np.ndindex(COUNTS.shape)]
    (tmp_path / "a.csv").write_text("\n".join([*lines, "1,2,torn"]))
    trace = open_trace(tmp_path / "a.csv")
    assert (all_counts(trace) == COUNTS).all()
    assert trace.notes == ("a.csv: 1 rows are no whole numbers and were left out",)


def test_megatrons_router_trace(tmp_path: Path) -> None:
    """Two micro-batches of 3 tokens, top-2, on 2 ranks; the last step is torn on rank 1."""
    chosen = np.random.default_rng(1).integers(0, 6, (2, 2, 2, 2, 3, 2))
    expected = np.zeros((2, 2, 2, 6), dtype=np.int64)
    for rank in range(2):
        lines = []
        for step, micro, layer in np.ndindex(2, 2, 2):
            top = chosen[step, micro, layer, rank]
            np.add.at(expected[step, layer, rank], top.ravel(), 1)
            record = {"step": step + 7, "stage": "pre_dispatch", "block": "decoder"}
            record |= {"layer": layer + 2, "rank": rank, "num_tokens": 3, "topk": 2}
            lines.append(json.dumps({**record, "top_indices": top.tolist()}))
        (tmp_path / f"router_trace_rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    trace = open_trace(tmp_path, num_experts=6)
    assert (all_counts(trace) == expected).all()

    path = tmp_path / "router_trace_rank1.jsonl"
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole[:5]) + "\n" + whole[5][:20])
    trace = open_trace(tmp_path, num_experts=6)
    assert (all_counts(trace) == expected[:1]).all()
    assert any("1 lines are no JSON objects" in note for note in trace.notes)
    assert any("steps [8] lack records" in note for note in trace.notes)


def test_megatrons_router_trace_of_a_pipeline(tmp_path: Path) -> None:
    """Ranks 0 and 1 have layer 1, ranks 2 and 3 layer 2 and a layer of MTP."""
    for rank in range(4):
        record = {"step": 0, "rank": rank, "block": "decoder", "layer": 1 + rank // 2}
        lines = [json.dumps({**record, "top_indices": [[rank, 4]]})]
        if rank > 1:
            mtp = {**record, "block": "mtp", "mtp_idx": 0, "layer": 0}
            lines.append(json.dumps({**mtp, "top_indices": [[rank, 5]]}))
        (tmp_path / f"router_trace_rank{rank}.jsonl").write_text("\n".join(lines))
    chosen = [np.nonzero(rows)[1].tolist() for rows in all_counts(open_trace(tmp_path))[0]]
    assert chosen == [[0, 4, 1, 4], [2, 4, 3, 4], [2, 5, 3, 5]]
    (tmp_path / "router_trace_rank3.jsonl").unlink()
    with pytest.raises(ValueError, match=r"recorded by \[1, 2\] ranks: give all files"):
        open_trace(tmp_path)


def test_megatrons_own_tracer_writes_what_is_read(tmp_path: Path) -> None:
    """The record of Megatron's own class, so that a change of its format is noticed."""
    torch = pytest.importorskip("torch")
    tracer_module = pytest.importorskip("megatron.core.transformer.moe.router_trace")
    tracer = tracer_module.RouterTracer(str(tmp_path), max_steps=9, rank=0, training_mode=True)
    for step in range(2):
        tracer.record_indices([torch.tensor([[0, 3], [3, 1]])] * 2, layer_ids=[4, 5])
        tracer.advance_step(step)
    assert all_counts(open_trace(tmp_path)).tolist() == [[[[1, 1, 0, 2]]] * 2] * 2


LOADS = COUNTS.sum(axis=2)
# 8 logical experts on 10 physical ones.
PHYSICAL = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 0, 3]] * 3)
LOADS_P = np.concatenate([LOADS, np.zeros((5, 3, 2), dtype=np.int64)], axis=2)
LOADS_P[:, :, 8], LOADS_P[:, :, 0] = LOADS[:, :, 0] // 3, LOADS[:, :, 0] - LOADS[:, :, 0] // 3
DUMPS: dict[str, dict[str, Any]] = {
    "sglang stat": {"rank": 0, "logical_count": LOADS.tolist()},
    "sglang per pass": {
        "records": [
            {"forward_pass_id": i, "rank": 0, "global_physical_count": load.tolist()}
            for i, load in enumerate(LOADS_P)
        ],
        "last_physical_to_logical_map": PHYSICAL.tolist(),
    },
    "vllm eplb": {
        "expert_load_window": [*LOADS_P.tolist(), np.zeros((3, 10)).tolist()],
        "physical_to_logical_map": PHYSICAL.tolist(),
    },
}


@pytest.mark.parametrize("name", DUMPS)
def test_dumps_of_servers(name: str, tmp_path: Path) -> None:
    (tmp_path / "dump.json").write_text(json.dumps(DUMPS[name]))
    trace = open_trace(tmp_path / "dump.json", num_ranks=2)
    assert (all_counts(trace).sum(axis=2) == LOADS).all()
    assert "dealt out evenly over 2 ranks" in trace.notes[0]


def test_sglang_ranks_are_added_up(tmp_path: Path) -> None:
    for rank in range(2):
        path = tmp_path / f"expert_distribution_recorder_17.5_{rank}.json"
        path.write_text(json.dumps(DUMPS["sglang per pass"]))
    assert (all_counts(open_trace(tmp_path)).sum(axis=2) == 2 * LOADS).all()


def test_vllms_routed_experts(tmp_path: Path) -> None:
    """One request a line; (tokens, layers, k), -1 where a token is padding."""
    first = [[[0, 1], [2, 3]], [[0, 2], [3, 3]], [[-1, -1], [-1, -1]]]
    lines = [
        json.dumps({"outputs": [{"token_ids": [1], "routed_experts": first}]}),
        json.dumps({"choices": [{"routed_experts": [[[1, 2], [0, 1]]]}]}),
        "torn",
    ]
    (tmp_path / "out.jsonl").write_text("\n".join(lines))
    trace = open_trace(tmp_path / "out.jsonl")
    assert all_counts(trace)[:, :, 0].tolist() == [
        [[2, 1, 1, 0], [0, 0, 1, 3]],
        [[0, 1, 1, 0], [1, 1, 0, 0]],
    ]
    assert any("1 lines are no JSON" in note for note in trace.notes)


@given(loads=st.lists(st.integers(0, 1000), min_size=1, max_size=20), num_ranks=st.integers(1, 17))
def test_dealing_loses_nothing_and_is_even(loads: list[int], num_ranks: int) -> None:
    dealt = deal(np.array(loads), num_ranks)
    assert dealt.sum(axis=0).tolist() == loads
    assert np.ptp(dealt, axis=0).max() <= 1


def test_other_numbers_of_ranks() -> None:
    trace = Trace.of(COUNTS, "made").with_ranks(6)
    assert (all_counts(trace).sum(axis=2) == COUNTS.sum(axis=2)).all()
    assert "4 source ranks were made 6" in trace.notes[0]

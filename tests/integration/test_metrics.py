"""The trace tells what was routed; under plain EP it is taken by hooks that change nothing."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.simulation.recording import read_recording
from tests.integration.tiny import Job, TinyRun, Trained
from tests.ranks import run_ranks

JOB = Job(ep=2, steps=4, num_experts=8, num_microbatches=2)


def _train_ep_watched(job: Job, folder: str) -> tuple[Trained, Trained]:
    from megatron_fssdp.integration.metrics import attach, watch_routers, watching_runtime

    plain = TinyRun(job).train()
    run = TinyRun(job)
    config = FSSDPConfig(fssdp_record_trace=folder)
    runtime = watching_runtime(config)
    watch_routers(run.model, runtime)
    attach(runtime, config)
    watched = run.train()
    runtime.close()
    return plain, watched


def _train_fssdp_logged(job: Job, folder: str) -> Trained:
    from megatron_fssdp.integration.metrics import attach

    run = TinyRun(job)
    attach(run.runtime, FSSDPConfig(fssdp_record_trace=folder))
    return run.train()


def test_traces_of_both(tmp_path: Path) -> None:
    ep, fssdp = tmp_path / "ep", tmp_path / "fssdp"
    for plain, watched in run_ranks(4, _train_ep_watched, JOB, str(ep)):
        assert watched.losses == plain.losses
    trained = run_ranks(4, _train_fssdp_logged, JOB.as_fssdp(), str(fssdp))

    ep_log, log = read_recording(ep), read_recording(fssdp)
    # 4 ranks in 2 expert-data-parallel halves: a log holds the half of rank 0, 8 of 16 rows of
    # 16 tokens, top-2.
    for each in (ep_log, log):
        assert each.iterations.tolist() == [0, 1, 2, 3]
        assert each.counts_ILRE.shape == (4, 2, 2, 8)
        assert (each.counts_ILRE.sum(axis=(2, 3)) == 8 * 16 * 2).all()
        assert (each.loads_ILR.sum(axis=2) == 8 * 16 * 2).all()
    assert np.array_equal(log.counts_ILRE[0], ep_log.counts_ILRE[0])
    owned = ep_log.counts_ILRE.sum(axis=2).reshape(4, 2, 2, 4).sum(axis=3)
    assert np.array_equal(ep_log.loads_ILR, owned)
    assert not ep_log.replicas_IL.any()
    assert log.replicas_IL.sum(axis=1).tolist() == trained[0].replicas
    assert log.replicas_IL.any()
    # fc1 is (2 * 48, 32), fc2 (32, 48): 18,432 bytes in fp32; once an iteration.
    assert np.array_equal(log.copied_kb_IL, log.replicas_IL * 18432 // 1000)
    assert log.imbalance_IL()[1:].mean() < ep_log.imbalance_IL()[1:].mean()

    # A killed job leaves a torn record: what is whole is read.
    data = (fssdp / "trace-stage0.bin").read_bytes()
    (fssdp / "trace-stage0.bin").write_bytes(data[:-7])
    assert read_recording(fssdp).iterations.tolist() == [0, 1, 2]
    # The job that resumes appends after it; what it repeats counts.
    run_ranks(4, _train_fssdp_logged, JOB.as_fssdp(), str(fssdp))
    assert read_recording(fssdp).iterations.tolist() == [0, 1, 2, 3]
    # Another model must not.
    with pytest.raises(AssertionError, match="give --fssdp-record-trace another folder"):
        run_ranks(4, _train_fssdp_logged, replace(JOB, num_experts=4).as_fssdp(), str(fssdp))


def test_bad_logs_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no trace"):
        read_recording(tmp_path)
    (tmp_path / "trace-stage0.json").write_text('{"version": 99, "layers": []}')
    with pytest.raises(ValueError, match="format 99; this reads 2"):
        read_recording(tmp_path)


class _Writer:
    """Takes what Megatron's tensorboard and wandb writers take."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(name, []).append((step, value))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.add_scalar(name, value, step)


def _train_with_writers(job: Job) -> tuple[dict, dict, int]:
    from megatron_fssdp.integration.scalars import MovesSeen, ScalarWriter

    run, tensorboard, wandb = TinyRun(job), _Writer(), _Writer()
    moves = MovesSeen(events=3, num_experts=8, num_bytes=5_000_000)
    writer = ScalarWriter(2, tensorboard, wandb, moves, numbers=[2, 3])
    run.runtime.listeners.append(writer)
    replicas = run.train().replicas
    return tensorboard.scalars, wandb.scalars, replicas[-1]


def test_scalars_for_megatrons_writers() -> None:
    """Every second iteration, always the same names; bytes are those of the plan."""
    job = replace(JOB, ep=4, num_microbatches=1).as_fssdp(fssdp_ranks_per_node=2)
    tensorboard, wandb, replicas = run_ranks(4, _train_with_writers, job)[0]
    assert tensorboard == wandb
    assert all([step for step, _ in values] == [2, 4] for values in tensorboard.values())
    last = {name: values[-1][1] for name, values in tensorboard.items()}
    assert set(last) == {
        "fssdp/imbalance-before-p50", "fssdp/imbalance-before-p95", "fssdp/imbalance-before-max",
        "fssdp/imbalance-after-p50", "fssdp/imbalance-after-p95", "fssdp/imbalance-after-max",
        "fssdp/replicas", "fssdp/calibrated-replicas", "fssdp/calibration-saved-ms",
        "fssdp/calibration-cost-ms", "fssdp/copied-inside-nodes-mb",
        "fssdp/copied-between-nodes-mb", "fssdp/copies-ms", "fssdp/copies-exposed-ms",
        "fssdp/replica-memory-mb", "fssdp/plan-ms", "fssdp/reshard-events",
        "fssdp/moved-experts", "fssdp/moved-mb",
        "moe/fssdp_imbalance_before_layer_2", "moe/fssdp_imbalance_before_layer_3",
        "moe/fssdp_imbalance_after_layer_2", "moe/fssdp_imbalance_after_layer_3",
    }  # fmt: skip
    assert last["fssdp/replicas"] == replicas > 0
    assert 1 <= last["fssdp/imbalance-after-max"] < last["fssdp/imbalance-before-max"]
    for name in ("before", "after"):
        layers = [last[f"moe/fssdp_imbalance_{name}_layer_{number}"] for number in (2, 3)]
        assert last[f"fssdp/imbalance-{name}-max"] == max(layers)
        assert last[f"fssdp/imbalance-{name}-p50"] == pytest.approx(sum(layers) / 2)
    moved = [last[f"fssdp/{name}"] for name in ("reshard-events", "moved-experts", "moved-mb")]
    assert moved == [3, 8, 5]
    # Weights there and gradients back, 18,432 bytes each in fp32.
    copied = last["fssdp/copied-inside-nodes-mb"] + last["fssdp/copied-between-nodes-mb"]
    assert copied == pytest.approx(2 * replicas * 18432 / 1e6)
    assert last["fssdp/copies-ms"] > 0
    assert last["fssdp/replica-memory-mb"] > 0


def _describe_start(job: Job) -> str:
    from megatron_fssdp.integration import outlook

    run = TinyRun(job)
    run.runtime.close()
    return outlook.describe(run.runtime)


def test_the_start_tells_memory_of_both_ways() -> None:
    """Experts of 18,432 bytes, 2 layers, 400 slots: kept takes two layers' weights, and more."""
    job = replace(JOB, ep=2).as_fssdp(fssdp_num_replica_slots=400)
    line = run_ranks(2, _describe_start, job)[0]
    # With 2 micro-batches: weights and gradients of 2 layers, against those of one.
    assert "replicas of 2 MoE layers, 400 slots a rank: kept 29 MB a rank" in line
    assert "re-materialized 15 MB" in line
    assert "This run: kept (give --fssdp-rematerialize for re-materialized)" in line
    again = run_ranks(2, _describe_start, job.as_fssdp(fssdp_rematerialize=True))[0]
    assert "This run: re-materialized (drop --fssdp-rematerialize for kept)" in again


def test_one_cuda_connection_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_fssdp.integration import outlook

    for connections, overlap, warns in (("1", "on", True), ("1", "off", False), ("8", "on", False)):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
        assert outlook.may_not_overlap(FSSDPConfig(fssdp_overlap=overlap)) == warns


def test_the_record_of_iterations(tmp_path: Path) -> None:
    """Beside the loads: what started, and a line of figures an iteration, also after a kill."""
    run_ranks(4, _train_fssdp_logged, JOB.as_fssdp(), str(tmp_path))
    path = tmp_path / "iterations-stage0.jsonl"
    start, *lines = map(json.loads, path.read_text().splitlines())
    # fc1 is (2 * 48, 32), fc2 (32, 48), in fp32.
    assert start["start"]["expert-bytes"] == 18432
    assert start["start"]["nodes"] == 1
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    assert all(line["time-ms"] > 0 for line in lines)
    assert lines[0]["replicas"] == 0 < lines[3]["replicas"]
    assert lines[3]["imbalance-after-max"] < lines[3]["imbalance-before-max"]
    # Bounded: the names are fixed, whatever the layers, ranks and experts.
    assert all(len(json.dumps(line)) < 1000 for line in lines)

    path.write_text(path.read_text()[:-9])
    run_ranks(4, _train_fssdp_logged, JOB.as_fssdp(), str(tmp_path))
    assert "start" in json.loads(path.read_text().splitlines()[5])


def test_the_preset_of_a_run(tmp_path: Path) -> None:
    """The simulator reads the sizes that a run had."""
    from megatron_fssdp.integration.recorder import write_preset
    from megatron_fssdp.simulation.model import read_job

    args = Namespace(
        world_size=8, num_layers=3, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4,
        moe_layer_freq=[0, 1, 1], num_experts=8, moe_router_topk=2, seq_length=16, swiglu=True,
        padded_vocab_size=128, max_position_embeddings=16, normalization="RMSNorm",
        position_embedding_type="rope", add_bias_linear=False, group_query_attention=False,
        expert_model_parallel_size=4, expert_tensor_parallel_size=1,
        micro_batch_size=1, global_batch_size=16, bf16=False, kv_channels=None,
        recompute_granularity="selective", recompute_modules=["core_attn", "moe"],
    )  # fmt: skip
    write_preset(tmp_path, args)
    job = read_job(str(tmp_path / "model.yaml"))
    assert job.layout.num_ranks == 8
    assert job.shape.moe_layers == (2, 3)
    assert (job.shape.num_experts, job.shape.moe_ffn_size, job.layout.ep) == (8, 48, 4)
    assert (job.layout.num_microbatches, job.recompute, job.param_bytes) == (2, "moe", 4)

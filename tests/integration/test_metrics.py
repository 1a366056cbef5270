"""The load log tells what was routed; under plain EP it is taken by hooks that change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.simulation.load_log import read_load_log
from tests.integration.tiny import Job, TinyRun, Trained
from tests.ranks import run_ranks

JOB = Job(ep=2, steps=4, num_experts=8, num_microbatches=2)


def _train_ep_watched(job: Job, folder: str) -> tuple[Trained, Trained]:
    from megatron_fssdp.integration.metrics import attach, watch_routers, watching_runtime

    plain = TinyRun(job).train()
    run = TinyRun(job)
    config = FSSDPConfig(fssdp_load_log=folder)
    runtime = watching_runtime(config)
    watch_routers(run.model, runtime)
    attach(runtime, config)
    watched = run.train()
    runtime.close()
    return plain, watched


def _train_fssdp_logged(job: Job, folder: str) -> Trained:
    from megatron_fssdp.integration.metrics import attach

    run = TinyRun(job)
    attach(run.runtime, FSSDPConfig(fssdp_load_log=folder))
    return run.train()


def test_load_logs_of_both(tmp_path: Path) -> None:
    ep, fssdp = tmp_path / "ep", tmp_path / "fssdp"
    for plain, watched in run_ranks(4, _train_ep_watched, JOB, str(ep)):
        assert watched.losses == plain.losses
    trained = run_ranks(4, _train_fssdp_logged, JOB.as_fssdp(), str(fssdp))

    ep_log, log = read_load_log(ep), read_load_log(fssdp)
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
    data = (fssdp / "loads-stage0.bin").read_bytes()
    (fssdp / "loads-stage0.bin").write_bytes(data[:-7])
    assert read_load_log(fssdp).iterations.tolist() == [0, 1, 2]
    # The job that resumes appends after it.
    run_ranks(4, _train_fssdp_logged, JOB.as_fssdp(), str(fssdp))
    assert read_load_log(fssdp).iterations.tolist() == [0, 1, 2, 0, 1, 2, 3]
    # Another model must not.
    with pytest.raises(AssertionError, match="give --fssdp-load-log another folder"):
        run_ranks(4, _train_fssdp_logged, replace(JOB, num_experts=4).as_fssdp(), str(fssdp))


def test_bad_logs_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no load log"):
        read_load_log(tmp_path)
    (tmp_path / "loads-stage0.json").write_text('{"version": 99, "layers": []}')
    with pytest.raises(ValueError, match="format 99; this reads 1"):
        read_load_log(tmp_path)

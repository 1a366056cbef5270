"""Expert tensor parallelism: a replica is a shard of an expert, on all ranks that share it.

Tolerances and their reasons are those of test_equality.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.shards import join
from tests.integration.test_checkpoint import _checkpoint_keys, _first_half, _second_half, _whole
from tests.integration.test_copy_options import SLOW_COMPUTE
from tests.integration.test_equality import (
    RTOL,
    assert_equal_training,
    assert_replicated,
    train,
)
from tests.integration.tiny import Job, TinyRun, Trained, merge
from tests.ranks import a_few, run_ranks

TP2_ETP2 = {"tp": 2, "ep": 2, "etp": 2}
LATENCY, MEMORY = "latency.yaml", "memory.yaml"
CLUSTERS = {
    LATENCY: "topology: {ranks_per_node: 1, intra_node: {bytes_per_s: 1.0e+9, latency_s: 1}}",
    MEMORY: "{topology: {ranks_per_node: 1}, compute: {flops_per_s: 1, memory_bytes_per_s: 1}}",
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-ep2-etp2": (4, TP2_ETP2),
    "tp2-ep4-etp1": (4, {"tp": 2, "ep": 4}),
    "tp2-ep2-etp1-edp2": (4, {"tp": 2, "ep": 2, "num_microbatches": 2}),
    "tp1-ep2-etp2": (4, {"ep": 2, "etp": 2}),
    "allgather": (4, {**TP2_ETP2, "dispatcher": "allgather"}),
    "rematerialize": (4, {**TP2_ETP2, "fssdp": {"fssdp_rematerialize": True}}),
    "recompute": (
        4,
        {
            "ep": 2,
            "etp": 2,
            "model": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        },
    ),
    "calibration": (4, {"ep": 2, "etp": 2, "fssdp": {"fssdp_calibration": True}}),
    "tp1-ep2-etp2-edp2": (8, {"ep": 2, "etp": 2}),
    "tp2-ep2-etp2-edp2-distributed-optimizer": (
        8,
        {
            **TP2_ETP2,
            "distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "num_microbatches": 2,
        },
    ),
    "tp2-ep4-etp2": (8, {"tp": 2, "ep": 4, "etp": 2}),
}


@pytest.mark.parametrize("world_size", [4, 8])
def test_layouts_equal_ep(world_size: int) -> None:
    """Every rank's losses and gradient norms, and each shard of every parameter."""
    names = [name for name, (size, _) in LAYOUTS.items() if size == world_size]
    jobs = [
        Job(steps=3, **LAYOUTS[name][1])
        for name in (a_few(names, (0, 3, 4)) if world_size == 4 else a_few(names, (1,)))
    ]
    pairs = [each for job in jobs for each in (job, job.as_fssdp(fssdp_check_plans=True))]
    # The same model without any tensor parallelism.
    results = train(world_size, Job(steps=3), *pairs)
    reference = results[0]
    for want, got in zip(results[1::2], results[2::2], strict=True):
        assert_replicated(got)
        assert_equal_training(got, want)
        losses = torch.tensor(got[0].losses)
        torch.testing.assert_close(losses, torch.tensor(reference[0].losses), rtol=RTOL, atol=0)
        theirs = join(merge(reference, "params"))
        for name, tensor in join(merge(got, "params")).items():
            scale = theirs[name].abs().max().item()
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4 * scale, msg=name)


FUSED = {
    "fused": ({}, {"fssdp_etp_schedule": "fused"}, True),
    "megatron": ({}, {"fssdp_etp_schedule": "megatron"}, False),
    "fused-tp1-recompute": (
        {"tp": 1, "model": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
        {"fssdp_etp_schedule": "fused"},
        True,
    ),
    # One message less on a link that waits for a second; or copies that take days.
    "auto-slow-link": ({}, {"fssdp_cluster": LATENCY}, True),
    "auto-slow-memory": ({"num_microbatches": 2}, {"fssdp_cluster": MEMORY}, False),
}


def _train_and_tell(jobs: list[Job]) -> tuple[list[Trained], list[list[str]]]:
    """Train jobs, and tell which dispatchers their layers ended up with."""
    from megatron_fssdp.integration.layer import FSSDPMoELayer

    results, kinds = [], []
    for job in jobs:
        run = TinyRun(job)
        results.append(run.train())
        layers = [m for m in run.model[0].modules() if isinstance(m, FSSDPMoELayer)]
        kinds.append([type(layer.token_dispatcher).__name__ for layer in layers])
    return results, kinds


def test_fused_schedule_equals_ep(tmp_path: Path) -> None:
    """Partial results add up in another order, nothing else changes; resized layers stay fused."""
    for name, text in CLUSTERS.items():
        (tmp_path / name).write_text(text)
    names, jobs = a_few(list(FUSED), (0, 3)), []
    for name in names:
        model, settings, _ = FUSED[name]
        job = Job(**{"steps": 4, **TP2_ETP2, **model})
        if cluster := settings.get("fssdp_cluster"):
            settings = {"fssdp_cluster": str(tmp_path / cluster)}
        jobs += [job, replace(job, reshard_every=2).as_fssdp(**settings)]
    answers = run_ranks(4, _train_and_tell, jobs)
    for number, name in enumerate(names):
        want, got = ([results[2 * number + k] for results, _ in answers] for k in (0, 1))
        assert_replicated(got)
        assert_equal_training(got, want)
        kind = "FusedAlltoAllDispatcher" if FUSED[name][2] else "MoEAlltoAllTokenDispatcher"
        for _, kinds in answers:
            assert kinds[2 * number + 1] == [kind, kind], name


@pytest.mark.parametrize("distributed_optimizer", a_few([False, True], (1,)))
def test_moved_experts_change_no_result(distributed_optimizer: bool) -> None:
    """All shards of an expert move together, optimizer state included."""
    job = Job(steps=5, **TP2_ETP2, distributed_optimizer=distributed_optimizer).as_fssdp()
    stays, moves = train(8, job, replace(job, reshard_every=2))
    for result in moves:
        assert [each.is_done for each in result.reshards] == [True, True]
        assert all(each.num_moves > 0 for each in result.reshards)
    assert_equal_training(moves, stays, rtol=1e-6)


def _look(cluster: str) -> tuple[list[list[int]], list[bool], Trained]:
    """Let the cost model decide about owners; none start even after that."""
    job = Job(steps=5, num_layers=3, ep=2, etp=2).as_fssdp(
        # Replicas would level these ranks by themselves.
        fssdp_num_replica_slots=0,
        fssdp_reshard_interval=2,
        fssdp_cluster=cluster,
    )
    run, looks = TinyRun(job), []
    run.runtime.owners.listeners.append(lambda iteration, look: looks.append(look.is_done))
    trained = run.train()
    owners = [each.owner_LE.ravel().tolist() for each in run.runtime.owners.resharders]
    return owners, looks, trained


def test_all_shards_decide_alike(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(SLOW_COMPUTE)
    answers = run_ranks(4, _look, str(cluster))
    assert any(answers[0][1])
    assert all(answer[:2] == answers[0][:2] for answer in answers)
    (want,) = train(4, Job(steps=5, num_layers=3, ep=2, etp=2))
    assert_equal_training([trained for _, _, trained in answers], want)


TP2_EP2, EP4 = Job(steps=6, tp=2, ep=2), Job(steps=6, ep=4)
SHARDED = Job(steps=6, **TP2_ETP2)
PAIRS = {
    "etp-fssdp-to-ep4": (SHARDED.as_fssdp(), EP4),
    "ep4-to-etp-fssdp": (EP4, SHARDED.as_fssdp()),
    "tp2-fssdp-to-etp-fssdp": (TP2_EP2.as_fssdp(), replace(SHARDED, tp=1).as_fssdp()),
    "moved-etp-fssdp-to-ep4": (replace(SHARDED, reshard_every=2).as_fssdp(), EP4),
    "distributed-optimizer-etp-fssdp-to-tp2": (
        replace(SHARDED, distributed_optimizer=True).as_fssdp(),
        replace(TP2_EP2, distributed_optimizer=True),
    ),
}


def _save_and_train_on(job: Job, folder: str) -> None:
    """Save half a run; while that is written, the other half trains and moves experts."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    run, queue = TinyRun(job), AsyncCallsQueue()
    for step in range(3):
        run.step(step)
    run.save(folder, queue)
    trained = run.train(first=3)
    assert len(trained.reshards) == 2
    assert len(queue.maybe_finalize_async_calls(blocking=True)) == 1
    queue.close()


def _save_and_resume_all(pairs: list[tuple[Job, Job]], folder: str) -> list[Trained]:
    """Train half of each job, and the other half as another, from its checkpoint."""
    resumed = []
    for number, (first, second) in enumerate(pairs):
        place = Path(folder) / str(number)
        place.mkdir(exist_ok=True)
        save = _save_and_train_on if first.reshard_every else _first_half
        save(first, str(place))
        resumed.append(_second_half(second, str(place)))
    return resumed


def test_checkpoints_between_layouts(tmp_path: Path) -> None:
    """Every expert is saved once and whole, whatever cuts it (fault 47)."""
    names = a_few(list(PAIRS), (3, 4))
    runs = run_ranks(4, _save_and_resume_all, [PAIRS[name] for name in names], str(tmp_path))
    whole = run_ranks(4, _whole, EP4)
    theirs = join(merge(whole, "params"))
    for number, name in enumerate(names):
        resumed = [by_rank[number] for by_rank in runs]
        for ours, full in zip(resumed, whole, strict=True):
            assert ours.losses == pytest.approx(full.losses[3:], rel=RTOL), name
            assert ours.grad_norms == pytest.approx(full.grad_norms[3:], rel=RTOL), name
        for key, tensor in join(merge(resumed, "params")).items():
            scale = theirs[key].abs().max().item()
            torch.testing.assert_close(
                tensor, theirs[key], rtol=1e-3, atol=1e-4 * scale, msg=f"{name}: {key}"
            )
        experts = {
            key: shape
            for key, shape in _checkpoint_keys(tmp_path / str(number)).items()
            if key.startswith("decoder") and "experts.experts.linear" in key and "weight" in key
        }
        # 2 layers x 8 experts x (3 matrices of 32 x 48), gate and values in one entry.
        assert sum(torch.Size(shape).numel() for shape in experts.values()) == 2 * 8 * 3 * 32 * 48


def _watch(job: Job) -> tuple[list[Any], list[Any]]:
    """What plain EP's load log and FSSDP's record count in the first iteration."""
    from megatron_fssdp.config import FSSDPConfig
    from megatron_fssdp.integration import metrics

    counts: list[list[Any]] = []
    for each in (job, job.as_fssdp()):
        run, seen = TinyRun(each), []
        runtime = run.runtime if each.moe_parallel == "fssdp" else None
        if runtime is None:
            runtime = metrics.watching_runtime(FSSDPConfig())
            metrics.watch_routers(run.model, runtime)
        runtime.listeners.append(lambda record, seen=seen: seen.append(record))
        run.step(0)
        counts.append([each.tolist() for each in seen[0].counts_LRE])
        runtime.close()
    return counts[0], counts[1]


def test_loads_are_those_of_all_shards() -> None:
    """2 layers of 16 x 16 tokens, two experts each; plain EP's load log says the same."""
    for watched, ours in run_ranks(4, _watch, Job(steps=1, ep=2, etp=2)):
        assert watched == ours
        assert [sum(map(sum, counts_RE)) for counts_RE in ours] == [16 * 16 * 2] * 2


def _speaking(layout: dict[str, int]) -> tuple[int, bool, tuple[int, ...]]:
    from megatron.core import parallel_state

    from megatron_fssdp.integration import cpu_platform, metrics, saved_state

    cpu_platform.enable()
    parallel_state.initialize_model_parallel(**layout, create_gloo_process_groups=False)
    entry = saved_state._entry(None)
    return (
        parallel_state.get_expert_data_parallel_rank(),
        metrics._speaks_for_stage(),
        (*map(int, entry.replica_id),),
    )


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 2, 2), (4, 2, 1)])
def test_one_rank_speaks_and_one_saves(tp: int, ep: int, etp: int) -> None:
    """Dense tensor parallelism says nothing of the experts' ranks.

    With TP 4 and EP 2 the second replica's ranks all have TP ranks above 0: its loads were not
    saved. With TP 1 and ETP 2 two ranks wrote one load log, and one object of the checkpoint.
    """
    layout = {
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }
    answers = run_ranks(4, _speaking, layout)
    assert [speaks for _, speaks, _ in answers] == [True, False, False, False]
    savers = Counter(replica for replica, _, place in answers if place == (0, 0, 0))
    assert savers == dict.fromkeys(range(4 // (ep * etp)), 1)
    places = [(replica, place) for replica, _, place in answers]
    assert len(set(places)) == 4

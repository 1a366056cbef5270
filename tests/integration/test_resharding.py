"""Experts change owners while training runs, and nothing else changes.

Random new owners every few steps, 0 to E experts of a layer on a rank. Without replicas, clipping
and expert data parallelism the losses are the same bits: an expert computes the same wherever it
lives. Else sums run in another order: 1e-6.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.test_copy_options import SLOW_COMPUTE, SLOW_NETWORK
from tests.integration.test_equality import assert_equal_training, train
from tests.integration.tiny import Job, TinyRun, Trained, merge
from tests.ranks import ALL, a_few, run_ranks


def assert_moved(results: list[Trained], times: int) -> None:
    for result in results:
        assert [each.is_done for each in result.reshards] == [True] * times
        assert all(each.num_moves > 0 for each in result.reshards)


@pytest.mark.parametrize(
    ("world_size", "distributed_optimizer"),
    a_few(list(product((2, 4, 8), (False, True))), (1, 2)),
)
def test_moving_changes_no_bit(world_size: int, distributed_optimizer: bool) -> None:
    steps, every = (60, 10) if ALL else (21, 5)
    job = Job(
        ep=world_size,
        steps=steps,
        num_experts=16,
        num_layers=3,
        clip_grad=0.0,
        distributed_optimizer=distributed_optimizer,
        fssdp={"fssdp_num_replica_slots": 0},
    ).as_fssdp()
    stays, moves = train(world_size, job, replace(job, reshard_every=every))
    assert_moved(moves, (steps - 1) // every)
    assert moves[0].losses == stays[0].losses
    for name in ("params", "grads", "moments"):
        ours, theirs = merge(moves, name), merge(stays, name)
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert torch.equal(ours[key], tensor), key


LAYOUTS = {
    "replicas": {"ep": 4},
    "edp": {"ep": 2},
    "edp-distributed-optimizer": {"ep": 2, "distributed_optimizer": True},
    "overlaps": {
        "ep": 2,
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "num_microbatches": 2,
    },
    "rematerialize": {"ep": 4, "fssdp": {"fssdp_rematerialize": True}, "num_microbatches": 2},
    "recompute": {
        "ep": 4,
        "model": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    },
    "dense-first-layer": {"ep": 4, "num_layers": 3, "model": {"moe_layer_freq": [0, 1, 1]}},
    "biases": {"ep": 4, "model": {"add_bias_linear": True, "gated_linear_unit": False}},
    "allgather": {"ep": 2, "dispatcher": "allgather"},
    "sgd": {"ep": 4, "optimizer": "sgd", "lr": 0.1},
    "pipeline": {"ep": 2, "pp": 2, "num_layers": 4, "num_microbatches": 2},
}


@pytest.mark.parametrize("layout", a_few(list(LAYOUTS), (0, 3, 6, 10)))
def test_moving_changes_no_result(layout: str) -> None:
    job = Job(steps=7, **LAYOUTS[layout])
    want, got = train(4, job, replace(job.as_fssdp(), reshard_every=2))
    assert_moved(got, 3)
    if job.pp == 1:
        assert_equal_training(got, want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
        assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-5)


def _decide(job: Job) -> tuple[Trained, list[Any]]:
    run, looks = TinyRun(job), []
    run.runtime.owners.listeners.append(lambda iteration, result: looks.append((iteration, result)))
    return run.train(), looks


@pytest.mark.parametrize(
    ("pays", "sharding"), a_few(list(product((True, False), ("swaps", "load"))), (1, 2))
)
def test_experts_move_when_the_model_says_that_it_pays(
    sharding: str, pays: bool, tmp_path: Any
) -> None:
    """The whole way: loads, new owners, the decision, the move, the log line."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(SLOW_COMPUTE if pays else SLOW_NETWORK)
    job = Job(ep=2, steps=7, num_layers=3)
    ours = job.as_fssdp(
        # Replicas would level these ranks by themselves.
        fssdp_num_replica_slots=0,
        fssdp_reshard_interval=2,
        fssdp_sharding=sharding,
        fssdp_cluster=str(cluster),
    )
    (want,) = train(4, job)
    results = run_ranks(4, _decide, ours)
    got, looks = [trained for trained, _ in results], results[0][1]
    assert_equal_training(got, want)
    assert [iteration for iteration, _ in looks] == [2, 4, 6]
    for _, theirs in results[1:]:
        assert [look.is_done for _, look in theirs] == [look.is_done for _, look in looks]
    done = [result.is_done for _, result in looks]
    assert any(done) == pays
    for iteration, result in looks:
        line = result.describe(iteration + 1, 2)
        assert f"re-sharding before iteration {iteration + 1}: {result.num_moves} experts" in line
        assert ("moved in" in line) == result.is_done


def test_owners_of_a_file_are_where_training_starts(tmp_path: Any) -> None:
    """Layer 2's experts all on rank 1, layer 3's on rank 0: the same losses from the first on."""
    owners, wrong, short = (tmp_path / name for name in ("owners.json", "wrong.json", "short.json"))
    owners.write_text('{"2": [1, 1, 1, 1, 1, 1, 1, 1], "3": [0, 0, 0, 0, 0, 0, 0, 0]}')
    wrong.write_text('{"2": [1, 1, 1, 1, 1, 1, 1, 1]}')
    short.write_text('{"2": [1, 0]}')
    job = Job(ep=2, steps=4, num_layers=3)
    want, got = train(4, job, job.as_fssdp(fssdp_owners=str(owners)))
    assert_equal_training(got, want)
    for path, sentence in (
        (wrong, "rank 0 owns 8 experts of all layers"),
        (short, "has 2 owners for MoE layer 2, which has 8 experts"),
        (tmp_path / "none.json", "cannot be used on rank 0"),
    ):
        for error in run_ranks(
            2, _decide, job.as_fssdp(fssdp_owners=str(path)), check=False, timeout_s=100
        ):
            assert sentence in error
    _, looks = run_ranks(2, _decide, job.as_fssdp(fssdp_owners=str(owners)))[0]
    assert [(result.num_moves, result.is_done) for _, result in looks] == [(8, True)]


def test_bf16_master_parameters_move_too() -> None:
    """After a move the first step equals: then rounding may flip a token's expert."""
    job = Job(ep=4, steps=3, params_dtype=torch.bfloat16, clip_grad=0.0)
    job = replace(job, fssdp={"fssdp_num_replica_slots": 0}).as_fssdp()
    for changes in (
        {},
        {"distributed_optimizer": True},
        # Keeps nothing but the master parameter.
        {"optimizer": "sgd", "lr": 0.1},
    ):
        each = replace(job, **changes)
        stays, moves = train(4, each, replace(each, reshard_every=1))
        assert_moved(moves, 2)
        assert moves[0].losses == stays[0].losses


def _round_trip(job: Job, folder: str, more: int) -> tuple[Trained, list[float]]:
    """Train with moves and save; go on for `more` steps; then load into a fresh run and repeat."""
    run = TinyRun(job)
    for step in range(job.steps):
        run.step(step)
    run.save(folder)
    for step in range(job.steps, job.steps + more):
        run.step(step)
    first = run.result
    run.runtime.close()
    return first, first.losses[job.steps :]


def _resume(job: Job, folder: str, first: int, more: int) -> tuple[list[float], str]:
    run = TinyRun(job)
    run.load(folder)
    losses = [run.step(step) for step in range(first, first + more)]
    if job.moe_parallel == "fssdp":
        run.runtime.close()
    return losses, getattr(run, "restored", "")


@pytest.mark.parametrize("distributed_optimizer", a_few((False, True), (1,)))
def test_checkpoints_of_moved_experts_are_plain(tmp_path: Any, distributed_optimizer: bool) -> None:
    """FSSDP with moved experts -> EP 4, EP 2, FSSDP with even and with other owners.

    By default three of the six.

    Megatron's optimizers keep experts in a group of their own only where EP > 1, so EP 1 reads no
    optimizer state of another size, with or without us.
    """
    job = Job(ep=4, steps=5, num_layers=3, distributed_optimizer=distributed_optimizer)
    moved = replace(job.as_fssdp(), reshard_every=2)
    folder = tmp_path / "moved"
    folder.mkdir()
    saved = run_ranks(4, _round_trip, moved, str(folder), 3, timeout_s=240)
    want = saved[0][1]
    targets = (
        (4, job, ""),
        (2, replace(job, ep=2), ""),
        (8, job.as_fssdp(), "no loads or owners for this layout in the checkpoint"),
        (
            4,
            job.as_fssdp(fssdp_reshard_interval=0),
            "loads of 3 MoE layers in the checkpoint; experts start even: their owners are fixed",
        ),
        (4, moved, "loads of 3 MoE layers in the checkpoint; experts are where they were"),
        (
            2,
            replace(moved, ep=2, reshard_every=3),
            "loads of 3 MoE layers in the checkpoint; experts start even",
        ),
    )
    for world_size, other, found in a_few(targets, (1, 2, 4)):
        results = run_ranks(world_size, _resume, other, str(folder), 5, 3, timeout_s=240)
        assert len({restored for _, restored in results}) == 1
        losses, restored = results[0]
        assert restored.startswith(found)
        assert losses == pytest.approx(want, rel=1e-5), (world_size, other)
        if other is moved:
            assert losses == want, "the same world and owners: the same bits"


def _link(
    job: Job, source: str | None, target: str | None, first: int, steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One link of the chain: load, note the weights, train, save."""
    run = TinyRun(job)
    if source is not None:
        run.load(source, with_optimizer=job.ep > 1)
    weights = {name: p.detach().clone() for name, p in run.named_parameters().items()}
    losses = [run.step(step) for step in range(first, first + steps)]
    if target is not None:
        run.save(target)
    if job.moe_parallel == "fssdp":
        run.runtime.close()
    return losses, weights if target is None else {
        name: p.detach().clone() for name, p in run.named_parameters().items()
    }


@pytest.mark.skipif(not ALL, reason="a minute; FSSDP_ALL=1 runs it")
def test_a_chain_of_layouts_trains_like_one_run(tmp_path: Any) -> None:
    """EP 4 -> FSSDP 4, uneven -> EP 2 -> FSSDP 8, uneven -> one process.

    Megatron's optimizer has no group of experts at EP 1, so there the weights are compared, bit for
    bit, and the loss that they give.
    """
    job = Job(ep=4, num_layers=3, num_experts=8, steps=20)
    moved = replace(job.as_fssdp(), reshard_every=2)
    chain = [
        (4, job),
        (4, moved),
        (2, replace(job, ep=2)),
        (8, replace(moved, ep=8)),
        (1, replace(job, ep=1)),
    ]
    source: str | None = None
    losses: list[float] = []
    saved: dict[str, torch.Tensor] = {}
    for number, (world_size, each) in enumerate(chain):
        is_last = number == len(chain) - 1
        folder = tmp_path / str(number)
        folder.mkdir()
        target = None if is_last else str(folder)
        steps = 1 if is_last else 5
        results = run_ranks(world_size, _link, each, source, target, 5 * number, steps)
        losses += results[0][0]
        weights: dict[str, torch.Tensor] = {}
        for _, part in results:
            weights.update(part)
        if is_last:
            assert weights.keys() == saved.keys()
            assert all(torch.equal(weights[name], saved[name]) for name in saved)
        source, saved = target, weights
    whole = run_ranks(4, _link, job, None, None, 0, 21)[0][0]
    assert losses == pytest.approx(whole, rel=1e-5)


def _refuse_a_move(job: Job) -> tuple[list[float], list[str | None]]:
    """One rank's optimizer has lost a moment: moving would lose it for good."""
    import torch.distributed as dist

    run = TinyRun(job)
    run.step(0)
    if dist.get_rank() == 1:
        for optimizer in run.optimizer.chained_optimizers:
            for parameter, state in optimizer.optimizer.state.items():
                if tuple(parameter.shape) == (96, 32):
                    state.pop("exp_avg_sq", None)
    results = run.reshard(3)
    run.runtime.close()
    return [each.is_done for each in results], [each.problem for each in results]


def _move_frozen(job: Job) -> tuple[list[bool], list[str | None]]:
    run = TinyRun(job)
    run.step(0)
    results = run.reshard(3)
    run.runtime.close()
    return [each.is_done for each in results], [each.problem for each in results]


def test_frozen_experts_do_not_trade_places_with_trained_ones() -> None:
    job = Job(ep=2, steps=3, freeze="local_experts.0").as_fssdp()
    for done, problems in run_ranks(2, _move_frozen, job):
        assert done == [False]
        assert "trained (True, True)" in problems[0]
        assert "trained (False, False)" in problems[0]


def test_damaged_loads_and_owners_are_found_before_anything_changes() -> None:
    from megatron_fssdp.config import FSSDPConfig
    from megatron_fssdp.integration.runtime import FSSDPRuntime

    def state(**changes: Any) -> dict[str, Any]:
        owners = {
            "num_ranks": 2,
            "owner": torch.tensor([[0, 0, 1, 1]]),
            "home": torch.tensor([[0, 1, 0, 1]]),
        }
        loads = {
            "layers": [0],
            "predictor": "exponential",
            "state": {"mean": torch.tensor([[5, 1, 1, 1]])},
        }
        found = {"version": 2, "num_microbatches": 4, "owners": [owners], "loads": [loads]}
        return {**found, **changes}

    runtime = FSSDPRuntime(FSSDPConfig())
    assert runtime.check_state_dict(state()) is not None
    good = state()
    for damaged in (
        {},
        state(version=7),
        state(num_microbatches=0),
        state(owners=[{**good["owners"][0], "owner": torch.tensor([[0, 0, 0, 1]])}]),
        state(owners=[{**good["owners"][0], "home": torch.tensor([[0, 0, 0, 1]])}]),
        state(
            loads=[{**good["loads"][0], "state": {"mean": torch.tensor([[-7, 1, 1, 1]]) * 10**6}}]
        ),
        state(loads=[{**good["loads"][0], "state": {"mean": torch.tensor([5.0])}}]),
        state(loads=[{**good["loads"][0], "predictor": "oracle"}]),
        state(loads=[{"layers": [0]}]),
    ):
        with pytest.raises((ValueError, KeyError, TypeError)):
            runtime.check_state_dict(damaged)
    runtime.close()


def _live_slots(job: Job) -> list[bool]:
    run = TinyRun(job)
    run.step(0)
    layer = next(m for m in run.model[0].modules() if hasattr(m, "_slot_experts"))
    before = weakref.ref(layer._slot_experts)
    run.reshard(1)
    run.step(1)
    gc.collect()
    run.runtime.close()
    return [before() is not None, before() is not layer._slot_experts]


def test_slots_before_a_move_do_not_live_on() -> None:
    """They keep what Transformer Engine quantized for them, so memory grew with each move."""
    for is_alive, is_replaced in run_ranks(2, _live_slots, Job(ep=2).as_fssdp()):
        assert is_replaced
        assert not is_alive


def test_what_cannot_move_stays_and_is_told_on_all_ranks() -> None:
    job = Job(ep=2, steps=3).as_fssdp()
    for done, problems in run_ranks(2, _refuse_a_move, job):
        assert done == [False]
        assert "optimizers keep different tensors of different experts" in problems[0]


@pytest.mark.parametrize(
    ("world_size", "distributed_optimizer"), [(2, False), (4, False), (2, True), (4, True)]
)
def test_moved_bytes_are_the_plans(world_size: int, distributed_optimizer: bool) -> None:
    """Two experts' state travels, not the layer's, and once to each replica that keeps it."""
    job = Job(ep=2, steps=2, distributed_optimizer=distributed_optimizer).as_fssdp()
    results = run_ranks(world_size, _count_bytes, job)
    planned = results[0][1]
    assert sum(each for each, _ in results) == planned.num_bytes
    # fc1 (96, 32) and fc2 (32, 48), fp32; two moments, and with the distributed optimizer a main
    # parameter, on every replica without it and on one with it.
    weights = 4 * (96 * 32 + 32 * 48)
    replicas = world_size // 2
    state = 3 * weights if distributed_optimizer else 2 * weights * replicas
    assert planned.num_bytes == 2 * (weights * replicas + state)


def _count_bytes(job: Job) -> tuple[int, Any]:
    run = TinyRun(job)
    run.step(0)
    (resharder,) = run.runtime.owners.resharders.values()
    sent: list[int] = []
    stock = resharder.mover.move
    resharder.mover.move = lambda *args: sent.append(stock(*args)) or sent[-1]  # type: ignore[method-assign]
    owners = np.array(resharder.mover.ownership.owner_LE)
    owners[0, [0, -1]] = owners[0, [-1, 0]]
    result = resharder.move(owners)
    run.runtime.close()
    return sent[0], result

"""Faults that users of other MoE systems met: the ones that no other test here would notice.

docs/faults.md lists all of them, and the test of each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.integration.records import IterationRecord
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.topology import Topology
from tests.integration.test_equality import RTOL, assert_equal_training
from tests.integration.tiny import Job, TinyRun, Trained
from tests.ranks import a_few, run_ranks

ONE_RANK_GETS_ALL = ((0, 1),) * 4


def _train_on_dirty_memory(job: Job) -> list[Trained]:
    """Train EP as it is, then FSSDP with every fresh tensor full of NaN."""
    want = TinyRun(job).train()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(2).isnan().all()
    return [want, TinyRun(job.as_fssdp()).train()]


@pytest.mark.parametrize("forced", a_few((None, ONE_RANK_GETS_ALL), (1,)))
def test_uninitialised_memory_is_never_used(forced: Any) -> None:
    """transformers#48205 (fault 5): fresh memory was zero, so only the second step was NaN."""
    job = Job(ep=4, steps=3, num_microbatches=2, forced_experts=forced)
    ranks = run_ranks(4, _train_on_dirty_memory, job)
    want, got = ([of_rank[kind] for of_rank in ranks] for kind in (0, 1))
    assert sum(got[0].replicas) > 0
    assert_equal_training(got, want)


def _count_ready_gradients(job: Job) -> list[dict[str, int]]:
    """Return how often DDP heard of each parameter's gradient, by step."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    run = TinyRun(job)
    names = {id(parameter): name for name, parameter in run.named_parameters().items()}
    group = buffers._ParamAndGradBucketGroup
    stock, steps = group.register_grad_ready, []

    def counting(self: Any, parameter: Any, *rest: Any, **options: Any) -> Any:
        steps[-1][names[id(parameter)]] = steps[-1].get(names[id(parameter)], 0) + 1
        return stock(self, parameter, *rest, **options)

    group.register_grad_ready = counting
    for step in range(job.steps):
        steps.append({})
        run.step(step)
    assert all(each.keys() == set(names.values()) for each in steps)
    return steps


def test_each_gradient_is_ready_once_a_step() -> None:
    """Megatron-LM#1150 (fault 16): "communication call has not been issued for this bucket".

    Half of the experts get no token, and replicas take part in no bucket.
    """
    job = Job(
        ep=4,
        steps=3,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        forced_experts=ONE_RANK_GETS_ALL,
    )
    for steps in run_ranks(4, _count_ready_gradients, job.as_fssdp()):
        for counts in steps:
            assert set(counts.values()) == {1}


RECOMPUTE = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def _replay_otherwise(job: Job) -> tuple[Trained, int]:
    """Train a router full of exact ties, which a replay's noise breaks in another way."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_fssdp.integration.owners import is_in_backward

    run, maps, differing = TinyRun(job), {}, 0
    tilt = torch.arange(job.num_experts) * 1e-5
    routers = [each for each in run.model[0].modules() if isinstance(each, TopKRouter)]

    def note(router: Any, inputs: Any, output: Any) -> None:
        nonlocal differing
        if is_in_backward():
            differing += int((maps[id(router)] != output[1]).sum())
        maps[id(router)] = output[1]

    for router in routers:
        with torch.no_grad():
            router.weight[1::2] = router.weight[::2]
        gating = router.gating
        # In the forward the lower expert of two wins, in a replay the higher.
        router.gating = lambda rows, gating=gating: (
            gating(rows) + (tilt if is_in_backward() else -tilt)
        )
        router.register_forward_hook(note)
    return run.train(), differing


def _replay_both(job: Job) -> list[tuple[Trained, int]]:
    return [_replay_otherwise(job), _replay_otherwise(job.as_fssdp())]


@pytest.mark.parametrize("recompute", a_few(list(RECOMPUTE), (1,)))
def test_a_replay_that_routes_otherwise_trains_like_ep(recompute: str) -> None:
    """Automodel#2635 (fault 18): near-ties flipped in the replay of the router, counts differed.

    A replay plans its own quotas from its own counts, as Megatron's dispatches by its own.
    """
    job = Job(ep=4, topk=1, steps=3, optimizer="sgd", lr=0.1, model=RECOMPUTE[recompute])
    job = replace(job, model={**job.model, "moe_router_pre_softmax": True})
    ranks = run_ranks(4, _replay_both, job, timeout_s=60)
    assert all(differing > 0 for of_rank in ranks for _, differing in of_rank)
    want, got = ([of_rank[kind][0] for of_rank in ranks] for kind in (0, 1))
    assert sum(got[0].replicas) > 0
    assert_equal_training(got, want)


WATCHED = (
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "reduce_scatter_tensor",
)


def _watch_collectives(job: Job) -> list[tuple[str, list[int]]]:
    """Return the group collectives of all MoE layers' forwards, in their order."""
    from megatron_fssdp.integration.layer import FSSDPMoELayer

    run, seen, inside = TinyRun(job), [], []
    stock_forward = FSSDPMoELayer.forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        inside.append(self)
        try:
            return stock_forward(self, *args, **options)
        finally:
            inside.pop()

    def watching(name: str, stock: Any) -> Any:
        def watched(*args: Any, **options: Any) -> Any:
            if inside:
                group = options.get("group")
                seen.append((name, dist.get_process_group_ranks(group)))
            return stock(*args, **options)

        return watched

    FSSDPMoELayer.forward = forward  # type: ignore[method-assign]
    for name in WATCHED:
        setattr(dist, name, watching(name, getattr(dist, name)))
    run.train()
    return seen


def test_moe_layers_talk_in_their_group_alone_and_in_one_order() -> None:
    """World collectives in a pipeline hung (fastmoe#58, fault 23).

    So did ranks that need different experts and made different calls (DeepSpeed#7461, fault 30).
    Here every rank's tokens pick other experts.
    """
    job = Job(
        ep=2,
        pp=2,
        steps=5,
        num_microbatches=4,
        forced_experts=((0, 1), (0, 7), (2, 3), (5, 6)),
    )
    ranks = run_ranks(4, _watch_collectives, job.as_fssdp(), timeout_s=60)
    for seen in ranks:
        assert len(seen) >= 2 * job.steps * job.num_microbatches
        assert all(len(group) == 2 for _, group in seen)
    # Expert-parallel groups are ranks 0, 1 and ranks 2, 3.
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]


def test_each_layer_shows_its_own_imbalance() -> None:
    """Qwen3#1418 (fault 42): pooled over layers, two that are hot on other ranks look balanced."""
    counts_LRE = np.array([[[8, 0], [8, 0]], [[0, 8], [0, 8]]])
    plan = plan_layers(None, np.array([[0, 1], [0, 1]]), Topology.from_hosts(["a", "a"]), _NONE)
    loads_LR = np.array([[16, 0], [0, 16]])
    record = IterationRecord(0, list(counts_LRE), list(loads_LR), [plan.layer(0), plan.layer(1)])
    assert record.imbalance() == ([2.0, 2.0], [2.0, 2.0])


_NONE = PlanSettings(num_replica_slots=0)


def _groups_used(job: Job) -> list[tuple[list[int], bool]]:
    """Return the groups that building the model made, and whether each was used by then."""
    made, used = [], set()
    stock_group, stock_reduce = dist.new_group, dist.all_reduce

    def new_group(ranks: Any = None, *args: Any, **options: Any) -> Any:
        group = stock_group(ranks, *args, **options)
        if options.get("group_desc", "").startswith("FSSDP"):
            made.append((list(ranks), group))
        return group

    def all_reduce(tensor: Any, *args: Any, **options: Any) -> Any:
        used.add(id(options.get("group")))
        return stock_reduce(tensor, *args, **options)

    dist.new_group, dist.all_reduce = new_group, all_reduce
    TinyRun(job)
    rank = dist.get_rank()
    return [(ranks, id(group) in used) for ranks, group in made if rank in ranks]


def test_our_groups_are_few_and_used_at_the_start() -> None:
    """Communicators made at the memory's peak (ms-swift#9486, fault 58), or one a layer (fault 59).

    Two groups a rank, however many layers: one for copies, one for moves of experts.
    """
    for num_layers in (1, 3):
        for groups in run_ranks(4, _groups_used, Job(ep=2, num_layers=num_layers).as_fssdp()):
            assert [len(ranks) for ranks, _ in groups] == [2, 4]
            assert all(is_used for _, is_used in groups)


def _shared_experts(jobs: list[Job]) -> list[Trained]:
    return [TinyRun(job).train() for job in jobs]


def test_overlapped_shared_experts_change_no_bit_of_the_forward() -> None:
    """Automodel#3109 (fault 26): missing fences on the side stream corrupted gradients."""
    model = {"moe_shared_expert_intermediate_size": 24}
    job = Job(ep=2, steps=4, model=model).as_fssdp()
    overlap = replace(job, model={**model, "moe_shared_expert_overlap": True})
    # Moving experts builds the dispatcher anew: it must get its shared experts again.
    moving = replace(overlap, reshard_every=2)
    ranks = run_ranks(2, _shared_experts, [job, overlap, moving])
    for off, on, _ in ranks:
        # After it the two ways add gradients up in another order.
        assert on.losses[0] == off.losses[0]
        assert on.losses == pytest.approx(off.losses, rel=RTOL)
    off, on, moved = ([of_rank[kind] for of_rank in ranks] for kind in range(3))
    assert_equal_training(on, off)
    assert moved[0].reshards
    assert_equal_training(moved, off)

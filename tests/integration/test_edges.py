"""Routing at its worst, and what must never differ from a stock layer."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.test_equality import assert_equal_training, train
from tests.integration.tiny import Job, TinyRun
from tests.ranks import a_few, run_ranks

BASE = Job(ep=4, steps=4)

# What the tokens of each rank are forced to (top-2 unless said otherwise).
EXTREMES: dict[str, Job] = {
    # Ranks 1 to 3 own nothing that is used: without replicas they get no token at all.
    "one-rank-gets-everything": replace(BASE, forced_experts=((0, 1),) * 4),
    "all-tokens-to-one-expert": replace(
        BASE, topk=1, forced_experts=((5,),) * 4, model={"moe_router_pre_softmax": True}
    ),
    "each-rank-its-own-experts": replace(BASE, forced_experts=((0, 1), (2, 3), (4, 5), (6, 7))),
    "each-rank-the-next-rank's": replace(BASE, forced_experts=((2, 3), (4, 5), (6, 7), (0, 1))),
    "one-token-a-rank": replace(BASE, global_batch=4, sequence=1),
    "one-token-a-rank-all-to-one-expert": replace(
        BASE,
        topk=1,
        global_batch=4,
        sequence=1,
        forced_experts=((3,),) * 4,
        model={"moe_router_pre_softmax": True},
    ),
    "one-expert-a-rank": replace(BASE, num_experts=4, forced_experts=((0, 1),) * 4),
}


@pytest.mark.parametrize(
    ("case", "dispatcher"),
    a_few(list(product(EXTREMES, ["alltoall", "allgather"])), (0, 1, 2, 4, 6, 8, 11, 12)),
)
def test_extreme_routing_equals_ep(case: str, dispatcher: str) -> None:
    job = replace(EXTREMES[case], dispatcher=dispatcher)
    want, got = train(4, job, job.as_fssdp())
    assert_equal_training(got, want)
    for before, after in got[0].imbalance:
        assert after <= before
    if case == "one-rank-gets-everything":
        # 2 of 8 experts, replicated to all: from 4 times the mean to the mean.
        assert got[0].imbalance[0] == (4.0, 4.0)
        assert got[0].imbalance[-1][1] <= 1.05


def _train_counting_copies(job: Job) -> list[Any]:
    """Train EP and FSSDP; return both, and the bytes that FSSDP copied."""
    stock, run = TinyRun(job).train(), TinyRun(job.as_fssdp())
    copied: list[int] = []
    run.runtime.listeners.append(
        lambda record: copied.extend(
            each.num_bytes for each in (*record.gathers, *record.reductions)
        )
    )
    return [stock, run.train(), sum(copied)]


def test_balanced_loads_copy_nothing_and_train_the_same_bits() -> None:
    """Replication that costs more than it saves (MoonEP#6, fault 51): 0 replicas, 0 bytes."""
    for want, got, copied in run_ranks(
        4, _train_counting_copies, EXTREMES["each-rank-the-next-rank's"]
    ):
        assert got.replicas == [0] * BASE.steps
        assert copied == 0
        assert (got.losses, got.grad_norms) == (want.losses, want.grad_norms)
        for name, tensor in want.params.items():
            assert torch.equal(got.params[name], tensor), name


def _norms_and_dense_parameters(job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    run = TinyRun(job)
    if dist.get_rank() == 0:
        # One rank's experts get far larger gradients than the others'.
        for name, parameter in run.named_parameters().items():
            if "experts" in name and "linear_fc2" in name:
                parameter.data.mul_(30)
    trained = run.train()
    dense = {name: value for name, value in trained.params.items() if "experts" not in name}
    return trained.grad_norms, dense


def test_norm_is_one_number_and_dense_weights_stay_equal() -> None:
    """Clipping by each group's own norm would let dense weights drift apart (fault 7)."""
    results = run_ranks(4, _norms_and_dense_parameters, Job(ep=2, steps=5).as_fssdp())
    for norms, dense in results[1:]:
        assert norms == results[0][0]
        for name, value in dense.items():
            assert torch.equal(value, results[0][1][name]), name


def _describe(job: Job) -> dict[str, Any]:
    groups: list[int] = []
    original = dist.new_group

    def counting(*args: Any, **kwargs: Any) -> Any:
        groups.append(1)
        return original(*args, **kwargs)

    run = TinyRun(job)
    dist.new_group = counting
    run.train()
    dist.new_group = original
    model = run.model[0].module
    return {
        "parameters": [name for name, _ in model.named_parameters()],
        "state": list(model.state_dict()),
        "modules": [name for name, _ in model.named_modules()],
        "buckets": [
            [tuple(parameter.shape) for parameter in bucket.params_list]
            for group in run.model[0].bucket_groups + run.model[0].expert_parallel_bucket_groups
            for bucket in group.buckets
        ],
        "new_groups": len(groups),
    }


def _describe_both(job: Job) -> list[dict[str, Any]]:
    return [_describe(job), _describe(job.as_fssdp())]


def test_model_looks_like_a_stock_one() -> None:
    """Same parameters in the same order, same state, same buckets, no process groups of ours."""
    for stock, ours in run_ranks(2, _describe_both, Job(ep=2, steps=3)):
        assert ours == stock
        assert ours["new_groups"] == 0


def _initial_parameters(job: Job) -> list[dict[str, torch.Tensor]]:
    return [
        {
            name: value.detach().clone()
            for name, value in TinyRun(replace(kind, stock_init=True)).named_parameters().items()
        }
        for kind in (job, job.as_fssdp())
    ]


def test_initial_weights_are_megatrons() -> None:
    """Building our layer must not draw random numbers that Megatron would have drawn."""
    for stock, ours in run_ranks(2, _initial_parameters, Job(ep=2)):
        for name, value in stock.items():
            assert torch.equal(ours[name], value), name


class _TwoForwards:
    """One MoE layer run twice before its backwards, in the other order."""

    def __init__(self, job: Job) -> None:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        run = TinyRun(job)
        run.step(0)  # so that replicas exist
        self.layer = next(m for m in run.model[0].modules() if isinstance(m, MoELayer))
        run.model[0].zero_grad_buffer()

    def gradients(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        inputs = [torch.randn(16, 1, 32, generator=generator).requires_grad_() for _ in range(2)]
        outputs = [self.layer(each)[0] for each in inputs]
        outputs[1].square().sum().backward()
        outputs[0].pow(3).sum().backward()
        found = {f"input{i}": each.grad.clone() for i, each in enumerate(inputs)}
        found |= {name: p.main_grad.clone() for name, p in self.layer.named_parameters()}
        return found


def _two_forwards(job: Job) -> list[dict[str, torch.Tensor]]:
    return [_TwoForwards(kind).gradients() for kind in (job, job.as_fssdp())]


def test_two_forwards_in_flight() -> None:
    """What a forward dispatched belongs to that call, not to the layer (fault 21)."""
    for stock, ours in run_ranks(4, _two_forwards, Job(ep=4)):
        assert ours["router.weight"].any()
        for name, value in stock.items():
            scale = value.abs().max().item()
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5 * scale, msg=name)


def _only_model_parallel_groups(job: Job) -> set[int]:
    """Sizes of the groups used inside MoE layers."""
    sizes: set[int] = set()
    run = TinyRun(job)
    original = dist.batch_isend_irecv

    def watching(ops: list[dist.P2POp]) -> list[dist.Work]:
        sizes.update(op.group.size() for op in ops)
        return original(ops)

    dist.batch_isend_irecv = watching
    run.train()
    return sizes


def test_replicas_travel_in_the_expert_parallel_group() -> None:
    for sizes in run_ranks(4, _only_model_parallel_groups, Job(ep=2, steps=3).as_fssdp()):
        assert sizes == {2}


def _order_of_buckets(job: Job) -> tuple[list[list[int]], list[Any]]:
    """Train EP and FSSDP; list the expert buckets in the order in which their reductions start."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    group = buffers._ParamAndGradBucketGroup
    start_grad_sync = group.start_grad_sync
    orders, results = [], []
    for kind in (job, job.as_fssdp()):
        run = TinyRun(kind)
        number = {id(each): n for n, each in enumerate(run.model[0].expert_parallel_bucket_groups)}
        order: list[int] = []

        def noting(
            self: Any, *args: Any, number: Any = number, order: Any = order, **options: Any
        ) -> Any:
            if id(self) in number:
                order.append(number[id(self)])
            return start_grad_sync(self, *args, **options)

        group.start_grad_sync = noting
        results.append(run.train())
        group.start_grad_sync = start_grad_sync
        orders.append(order)
    return orders, results


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer": "sgd", "lr": 0.1},
        {"distributed_optimizer": True, "overlap_param_gather": True},
    ],
    ids=["sgd", "overlap-param-gather"],
)
def test_buckets_are_reduced_in_one_order_whatever_the_plans(optimizer: dict[str, Any]) -> None:
    """Gradients of the wrong experts were added up (symptom: a silently other loss).

    Two expert-parallel groups, one skewed, one balanced, have different plans; their experts'
    buckets meet in the expert-data-parallel groups, which reduce them in the order in which they
    fill. A rank without copies used to fill its buckets in another order than its peer. Likewise
    it used to wait for gathered parameters later than its peer, which could be for ever.
    """
    job = Job(
        ep=2,
        steps=5,
        overlap_grad_reduce=True,
        forced_experts=((0, 1), (0, 1), (0, 4), (0, 4)),
        **optimizer,
    )
    ranks = run_ranks(4, _order_of_buckets, job)
    (_, first), _ = ranks[0]
    assert len(set(first)) > 4, "one bucket has no order"
    for orders, _ in ranks:
        assert orders[0] == orders[1] == first
    assert_equal_training(*([results[kind] for _, results in ranks] for kind in (1, 0)))
    replicas = [results[1].replicas[-1] for _, results in ranks]
    assert replicas[0] > 0
    assert replicas[2] == 0


def _freeze_one_rank(job: Job) -> list[list[float]]:
    """Rank 0's experts are frozen, rank 1's are not: ids decide who owns what."""
    kinds = (job, job.as_fssdp())
    freeze = "local_experts" if dist.get_rank() == 0 else None
    return [TinyRun(replace(kind, freeze=freeze)).train().losses for kind in kinds]


def test_ranks_with_frozen_experts_send_their_replicas_gradients() -> None:
    """A rank that owned frozen experts only had no backward, and its peers waited for ever."""
    job = Job(ep=2, steps=4, forced_experts=((4, 5),))
    for want, got in run_ranks(2, _freeze_one_rank, job, timeout_s=60):
        assert got == pytest.approx(want, rel=1e-5)


def _step_another_optimizer(job: Job) -> tuple[list[int], list[float]]:
    """Rank 0 steps an optimizer of its own in the middle of every iteration."""
    run = TinyRun(job)
    run.runtime.watch_optimizers([each.optimizer for each in run.optimizer.chained_optimizers])
    probe = torch.nn.Parameter(torch.zeros(1))
    other, forward_step = torch.optim.SGD([probe], lr=0.1), run._forward_step

    def stepping(iterator: Any, model: torch.nn.Module) -> Any:
        result = forward_step(iterator, model)
        if dist.get_rank() == 0:
            probe.grad = torch.ones(1)
            other.step()
        return result

    run._forward_step = stepping  # type: ignore[method-assign]
    trained = run.train()
    return trained.replicas, trained.losses


def test_another_optimizer_ends_no_iteration() -> None:
    """One rank alone changed its plan, and the job hung."""
    job = Job(ep=2, steps=4, num_microbatches=2)
    (want,) = train(2, job.as_fssdp())
    for replicas, losses in run_ranks(2, _step_another_optimizer, job.as_fssdp(), timeout_s=60):
        assert replicas == want[0].replicas
        assert losses == want[0].losses


def _exchange_parameters(job: Job) -> list[float]:
    """Exchange every expert parameter after the model is built (weight surgery, merging)."""
    outputs = []
    for kind in (job, job.as_fssdp()):
        run = TinyRun(kind)
        for module in run.model[0].modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if not getattr(parameter, "allreduce", True):
                    setattr(module, name, torch.nn.Parameter(parameter.detach() * 2))
        rows = run._batches(0)[0]
        output, _ = run._forward_step(iter([rows]), run.model[0])
        outputs.append(output.sum().item())
    return outputs


def test_exchanged_parameters_are_used() -> None:
    for want, got in run_ranks(2, _exchange_parameters, Job(ep=2)):
        assert got == want


def _log_into(path: str) -> str:
    from megatron_fssdp.config import FSSDPConfig
    from megatron_fssdp.integration.metrics import attach

    run = TinyRun(Job(ep=2, steps=1).as_fssdp())
    try:
        attach(run.runtime, FSSDPConfig(fssdp_record_trace=path))
    except ValueError as error:
        return str(error)
    return "attached"


def test_unwritable_trace_stops_every_rank_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answers = run_ranks(2, _log_into, str(tmp_path / "file" / "log"))
    assert answers[0] == answers[1]
    assert "--fssdp-record-trace" in answers[0]
    assert "cannot be written" in answers[0]


def _die_in_a_collective(job: Job, collective: str) -> None:
    """Rank 3 is killed as it enters the second such collective of MoE layer 2."""
    from megatron_fssdp.experts import replicas

    stock, entered = getattr(replicas, collective), []

    def deadly(*args: Any, **options: Any) -> None:
        if "MoE layer 2" in args[-1] and args[1].copies:
            entered.append(1)
            if len(entered) == 2:
                os._exit(9)
        stock(*args, **options)

    if dist.get_rank() == 3:
        setattr(replicas, collective, deadly)
    TinyRun(job).train()


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize(
    ("collective", "name"), [("sparse_all_gather", "spAG"), ("sparse_reduce_scatter", "spRS")]
)
def test_a_killed_rank_ends_all_others_and_is_named(
    collective: str, name: str, overlap: str
) -> None:
    """Ranks that exchange copies with it name it; the rest end in the next collective."""
    # All tokens go to ranks 0 to 2's experts: rank 3 gets replicas from them.
    job = Job(ep=4, steps=5, forced_experts=((0, 2), (0, 2), (0, 4), (0, 2)))
    killed = job.as_fssdp(fssdp_overlap=overlap)
    answers = run_ranks(4, _die_in_a_collective, killed, collective, timeout_s=100, check=False)
    errors = [str(answer) for answer in answers[:3]]
    assert answers[3] == "died with exit code 9"
    for error in errors:
        assert "Error" in error, "a rank ended without noticing"
        assert "MoE layer 2" in error or name == "spRS", error
    pattern = rf"{name} of MoE layer 2 failed .*rank 3"
    assert any(re.search(pattern, error) for error in errors), errors

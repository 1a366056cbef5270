"""Materialization against a dense one-process computation, in fp64."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.lanes import make_lane
from megatron_fssdp.experts import compute
from megatron_fssdp.experts.compute import RowGroups, grouped_linear
from megatron_fssdp.experts.gradients import GradientSums
from megatron_fssdp.experts.materialize import Materializer
from megatron_fssdp.experts.placement import Placement
from megatron_fssdp.experts.replicas import ReplicaPool, Transport
from megatron_fssdp.planning.plan import EMPTY, LayerPlan
from tests.ranks import run_ranks

HIDDEN, FFN, EXPERTS = 6, 5, 4


def _weights(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(expert)
    return (
        torch.randn(FFN, HIDDEN, generator=generator, dtype=torch.float64),
        torch.randn(HIDDEN, FFN, generator=generator, dtype=torch.float64),
    )


def _rows(rank: int, slot: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + 10 * rank + slot)
    return torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)


def _own(placement: Placement) -> list[list[torch.Tensor]]:
    """Return parameters for the experts that a rank owns."""
    held = placement.plan.slot_expert_RS[placement.rank]
    return [
        [weight.clone().requires_grad_() for weight in _weights(int(held[slot]))]
        for slot in placement.owned_slots
    ]


def _poison_allocator() -> None:
    # Memory that the allocator hands out again must never show: fill some with NaN and free it.
    for size in (8, 64, 512, 4096):
        torch.full((size, HIDDEN), float("nan"), dtype=torch.float64)


def _compute(
    slot_expert: list[list[int]],
    rows_per_slot: list[list[int]],
    owner: tuple[int, ...] = (0, 0, 1, 1),
) -> None:
    group = dist.group.WORLD
    rank = group.rank()
    plan = LayerPlan(np.array(owner), np.array(slot_expert))
    placement = Placement(plan, rank)
    owned = placement.owned_slots
    owned_weights = _own(placement)
    lane = make_lane(torch.device("cpu"), overlap=True)
    materializer = Materializer(Transport(group, lane), ReplicaPool(2))
    _poison_allocator()
    visit = materializer.launch(Placement(plan, rank), owned_weights, _weights(0), is_trained=True)
    weights = visit.arrive()
    visit.wait()
    fc1, fc2 = zip(*weights, strict=True)
    counts = rows_per_slot[rank]
    rows = torch.cat([_rows(rank, slot, count) for slot, count in enumerate(counts)])
    rows.requires_grad_()
    groups = RowGroups(torch.tensor(counts), rows.device)
    hidden = torch.tanh(grouped_linear(rows, fc1, groups))
    output = grouped_linear(hidden, fc2, groups)
    visit.guard(output, weights)
    assert not output.isnan().any()
    _poison_allocator()
    output.square().sum().backward()
    lane.close()

    for slot, expert in enumerate(plan.slot_expert_RS[rank].tolist()):
        if expert == EMPTY:
            assert not fc1[slot].requires_grad
        else:
            assert torch.equal(fc1[slot], _weights(expert)[0])
        if slot in owned:
            assert fc1[slot].data_ptr() == owned_weights[slot][0].data_ptr(), "owned, yet copied"

    # The oracle: every rank computes every instance of its owned experts itself.
    for index, slot in enumerate(owned):
        expert = int(plan.slot_expert_RS[rank, slot])
        reference = [weight.clone().requires_grad_() for weight in _weights(expert)]
        total = torch.zeros((), dtype=torch.float64)
        for other in range(group.size()):
            for place, held in enumerate(plan.slot_expert_RS[other].tolist()):
                if held == expert:
                    inputs = _rows(other, place, rows_per_slot[other][place])
                    result = torch.tanh(inputs @ reference[0].t()) @ reference[1].t()
                    total = total + result.square().sum()
        total.backward()
        for ours, theirs in zip(owned_weights[index], reference, strict=True):
            assert ours.grad is not None, "a gradient must exist even where no token came"
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


CASES = {
    # expert 0 on both ranks; one empty slot each
    "one-replica": ([[0, 1, EMPTY], [2, 3, 0]], [[3, 2, 0], [1, 0, 4]]),
    "no-replica": ([[0, 1, EMPTY], [2, 3, EMPTY]], [[3, 2, 0], [1, 1, 0]]),
    "crosswise": ([[0, 1, 3], [2, 3, 0]], [[1, 2, 3], [3, 2, 1]]),
    "all-zero-tokens-on-a-rank": ([[0, 1, 3], [2, 3, 0]], [[0, 0, 0], [3, 2, 1]]),
    "replica-without-tokens": ([[0, 1, 3], [2, 3, 0]], [[2, 1, 0], [1, 2, 0]]),
    # rank 1 owns nothing, and helps with two experts
    "rank-that-owns-nothing": (
        [[0, 1, 2, 3], [1, 3, EMPTY, EMPTY]],
        [[2, 1, 3, 1], [3, 2, 0, 0]],
        (0, 0, 0, 0),
    ),
    "rank-that-owns-and-holds-nothing": (
        [[0, 1, 2, 3], [EMPTY, EMPTY, EMPTY, EMPTY]],
        [[2, 1, 3, 1], [0, 0, 0, 0]],
        (0, 0, 0, 0),
    ),
    "expert-used-only-as-replica": ([[0, 1, EMPTY], [2, 3, 0]], [[0, 2, 0], [1, 1, 5]]),
}


@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients_equal_dense(case: str) -> None:
    run_ranks(2, _compute, *CASES[case])


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_gemm_equals_the_loop(
    dtype: torch.dtype, use_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA path's kernel runs on CPUs too.

    On most CPUs bit for bit; some add in another order where a product has one row.
    """
    monkeypatch.setattr(compute, "has_grouped_gemm", lambda *unused: use_kernel)
    torch.manual_seed(0)
    counts = [5, 0, 7, 1]
    weights = [torch.randn(8, 16, dtype=dtype, requires_grad=True) for _ in counts]
    rows = torch.randn(13, 16, dtype=dtype, requires_grad=True)
    got = grouped_linear(rows, weights, RowGroups(torch.tensor(counts), rows.device))
    want = torch.cat([part @ w.t() for part, w in zip(rows.split(counts), weights, strict=True)])
    torch.testing.assert_close(got, want)
    gradient = torch.randn_like(got)
    for ours, theirs in zip(
        torch.autograd.grad(got, (rows, *weights), gradient),
        torch.autograd.grad(want, (rows, *weights), gradient),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_no_rows_at_all() -> None:
    weights = [torch.randn(8, 16, requires_grad=True) for _ in range(4)]
    empty = torch.zeros(0, 16, requires_grad=True)
    groups = RowGroups(torch.zeros(4, dtype=torch.int64), empty.device)
    nothing = grouped_linear(empty, weights, groups)
    grad_rows, *grad_weights = torch.autograd.grad(nothing.sum(), (empty, *weights))
    assert nothing.shape == (0, 8)
    assert grad_rows.shape == (0, 16)
    for gradient in grad_weights:
        assert gradient.shape == (8, 16)
        assert not gradient.any()


def _leaks() -> tuple[list[bool], int, int]:
    """Run three forwards, each with its backward; then one that is never used, and one more."""
    group = dist.group.WORLD
    rank = group.rank()
    placement = Placement(LayerPlan(np.array([0, 0, 1, 1]), np.array(CASES["crosswise"][0])), rank)
    owned = _own(placement)
    transport = Transport(group, make_lane(torch.device("cpu"), overlap=True))
    materializer = Materializer(transport, ReplicaPool(1))
    visits, sizes = [], []
    for _ in range(3):
        visit = materializer.launch(placement, owned, owned[0], is_trained=True)
        weights = visit.arrive()
        visit.wait()
        output = torch.stack([weight.sum() for slot in weights for weight in slot]).sum()
        visit.guard(output, weights)
        output.backward()
        materializer.settle()
        materializer.pool.forget()
        visits.append(weakref.ref(visit))
        sizes.append(transport.num_bytes + materializer.pool.num_bytes)
        del visit, weights, output
    return [visit() is None for visit in visits], sizes[0], sizes[-1]


def test_nothing_outlives_its_backward_and_no_memory_is_taken_twice() -> None:
    """A cycle through autograd's nodes would keep a layer's activations of every iteration."""
    for are_gone, first, last in run_ranks(2, _leaks):
        assert are_gone == [True, True, True]
        assert first == last > 0


def _give_up_an_iteration() -> tuple[str, int]:
    group = dist.group.WORLD
    rank = group.rank()
    placement = Placement(LayerPlan(np.array([0, 0, 1, 1]), np.array(CASES["crosswise"][0])), rank)
    owned = _own(placement)
    lane = make_lane(torch.device("cpu"), overlap=True)
    materializer = Materializer(
        Transport(group, lane),
        ReplicaPool(1),
        "layer 7",
        GradientSums(num_backwards=lambda: 2),
    )
    message = ""
    for backwards in (2, 1, 2):
        for _ in range(backwards):
            visit = materializer.launch(placement, owned, owned[0], is_trained=True)
            weights = visit.arrive()
            visit.wait()
            torch.stack([weight.sum() for slot in weights for weight in slot]).sum().backward()
        if backwards == 1:
            continue  # given up: no step, as after an error in the loss
        try:
            materializer.settle()
        except RuntimeError as error:
            message = str(error)
    return message, len(materializer.reductions)


def test_an_iteration_that_is_given_up_is_noticed_before_the_next_step() -> None:
    """Gradients that were kept for its last micro-batch would come with the next iteration's."""
    for message, reductions in run_ranks(2, _give_up_an_iteration):
        assert message.startswith("layer 7: the optimizer steps, and gradients of replicas")
        assert "kept" not in message or "--fssdp-rematerialize" in message
        assert reductions == 2

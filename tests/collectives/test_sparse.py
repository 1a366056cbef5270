"""spAG and spRS against their dense twins, on real gloo ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.reference import dense_all_gather, dense_reduce_scatter
from megatron_fssdp.collectives.sparse import sparse_all_gather, sparse_reduce_scatter
from megatron_fssdp.planning.plan import EMPTY, LayerPlan
from megatron_fssdp.planning.schedule import Copy, Schedule
from tests.ranks import run_ranks


def make_plan(num_ranks: int, num_experts: int, num_replica_slots: int, seed: int) -> LayerPlan:
    """Build a random plan: even owners, each replica slot holds some expert or nothing."""
    rng = np.random.default_rng(seed)
    per_rank = num_experts // num_ranks
    slots = np.full((num_ranks, per_rank + num_replica_slots), EMPTY, dtype=np.int64)
    for rank in range(num_ranks):
        owned = np.arange(rank * per_rank, (rank + 1) * per_rank)
        slots[rank, :per_rank] = owned
        others = np.setdiff1d(np.arange(num_experts), owned)
        count = rng.integers(0, num_replica_slots + 1)
        slots[rank, per_rank : per_rank + count] = rng.permutation(others)[:count]
    return LayerPlan(np.arange(num_experts) // per_rank, slots)


def test_schedule_lists_copies_in_a_fixed_order() -> None:
    # rank 0 owns experts 0, 1; rank 1 owns 2, 3. Rank 0 replicates 3; rank 1 replicates 1, 0.
    plan = LayerPlan(np.array([0, 0, 1, 1]), np.array([[0, 1, 3, EMPTY], [2, 3, 1, 0]]))
    schedule = Schedule.from_plan(plan)
    assert schedule.copies == (Copy(0, 0, 0, 1, 3), Copy(1, 0, 1, 1, 2), Copy(3, 1, 1, 0, 2))
    assert schedule.max_sends == 2
    assert [copy.expert for copy in schedule.receives_of(1)] == [0, 1]


def _compare_with_dense(dtype: torch.dtype, contiguous: bool, seed: int) -> None:
    group = dist.group.WORLD
    rank = group.rank()
    plan = make_plan(group.size(), 8, 3, seed)
    schedule = Schedule.from_plan(plan)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    values = torch.randint(-50, 50, (plan.num_slots, 6, 4), generator=generator).to(dtype)
    slots = values.transpose(1, 2) if not contiguous else values
    assert slots[0].is_contiguous() == contiguous

    expected = dense_all_gather(slots.unbind(0), schedule, group)
    gathered = list(slots.clone().unbind(0))
    sparse_all_gather(gathered, schedule, group).wait()
    for slot, (got, want) in enumerate(zip(gathered, expected, strict=True)):
        assert torch.equal(got, want), f"spAG, rank {rank}, slot {slot}"

    expected = dense_reduce_scatter(slots.unbind(0), schedule, group)
    reduced = list(slots.clone().unbind(0))
    sparse_reduce_scatter(reduced, schedule, group).wait()
    for slot, (got, want) in enumerate(zip(reduced, expected, strict=True)):
        assert torch.equal(got, want), f"spRS, rank {rank}, slot {slot}"


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_equal_to_dense(world_size: int) -> None:
    run_ranks(world_size, _compare_with_dense, torch.float32, True, world_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.float64])
def test_any_dtype_not_contiguous(dtype: torch.dtype) -> None:
    run_ranks(2, _compare_with_dense, dtype, False, 3)


def _count_messages() -> None:
    group = dist.group.WORLD
    sent: list[int] = []
    original = dist.batch_isend_irecv

    def counting(ops: list[dist.P2POp]) -> list[dist.Work]:
        sent.append(len(ops))
        return original(ops)

    dist.batch_isend_irecv = counting
    slots = [torch.zeros(3) for _ in range(5)]
    empty = Schedule(())
    sparse_all_gather(slots, empty, group).wait()
    sparse_reduce_scatter(slots, empty, group).wait()
    assert sent == [], "an empty plan must cost nothing"
    # One group call however many copies there are.
    one = Schedule((Copy(0, 0, 0, 1, 4), Copy(1, 0, 1, 1, 3)))
    sparse_all_gather(slots, one, group).wait()
    assert sent == [2]
    # Tensors without elements send nothing.
    sparse_all_gather([torch.zeros(0) for _ in range(5)], one, group).wait()
    assert sent == [2]


def test_empty_plans_cost_nothing_and_calls_are_coalesced() -> None:
    run_ranks(2, _count_messages)


def _die_inside() -> str:
    group = dist.group.WORLD
    if group.rank() == 1:
        import os

        os._exit(9)
    try:
        sparse_all_gather(
            [torch.zeros(1_000_000) for _ in range(2)], Schedule((Copy(0, 1, 0, 0, 1),)), group
        ).wait()
    except RuntimeError as error:
        raise AssertionError("the peer's death was noticed") from error
    return "did not notice"


def test_killed_peer_is_an_error_not_a_hang() -> None:
    with pytest.raises(AssertionError, match="the peer's death was noticed"):
        run_ranks(2, _die_inside, timeout_s=60)

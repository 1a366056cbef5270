"""spAG and spRS against their dense twins, on real gloo ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.collectives.buffers import RowBuffer
from megatron_fssdp.collectives.lanes import Meter, make_lane
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


def test_flat_schedule_lists_copies_in_a_fixed_order() -> None:
    # rank 0 owns experts 0, 1; rank 1 owns 2, 3. Rank 0 replicates 3; rank 1 replicates 1, 0.
    plan = LayerPlan(np.array([0, 0, 1, 1]), np.array([[0, 1, 3, EMPTY], [2, 3, 1, 0]]))
    schedule = Schedule.flat(plan)
    assert schedule.stages == ((Copy(0, 0, 0, 1, 3), Copy(1, 0, 1, 1, 2), Copy(3, 1, 1, 0, 2)),)
    assert schedule.max_sends == 2
    # Rank 1 holds a replica of 1 already: only the others are missing.
    present = LayerPlan(np.array([0, 0, 1, 1]), np.array([[0, 1, EMPTY, EMPTY], [2, 3, EMPTY, 1]]))
    assert [copy.expert for copy in Schedule.flat(plan, present).copies] == [0, 3]
    assert [copy.expert for copy in Schedule.tree(plan, (0, 1), present).copies] == [0, 3]


def test_tree_crosses_to_each_node_once() -> None:
    """Owner 0 on node 0 of three nodes of 2; expert 0 goes everywhere, expert 1 to ranks 2 to 5."""
    slots = np.array([[0, 1, EMPTY]] + [[2, 0, EMPTY]] + [[3 + r, 0, 1] for r in range(4)])
    plan = LayerPlan(np.array([0, 0, 1, 2, 3, 4, 5]), slots)
    schedule = Schedule.tree(plan, (0, 0, 1, 1, 2, 2))
    links = [[(c.expert, c.sender, c.receiver) for c in stage] for stage in schedule.stages]
    # The second expert enters each node through the rank that the first did not use.
    assert links == [
        [(0, 0, 1), (0, 0, 2), (0, 0, 4), (1, 0, 3), (1, 0, 5)],
        [(0, 2, 3), (0, 4, 5), (1, 3, 2), (1, 5, 4)],
    ]
    assert schedule.num_far((0, 0, 1, 1, 2, 2)) == 4
    assert Schedule.flat(plan).num_far((0, 0, 1, 1, 2, 2)) == 8


def test_nodes_take_turns_in_the_stages_of_trees() -> None:
    """Six ranks of the first of 4 nodes own an expert each, which a rank of each other node needs.

    No rank has two replicas. An owner sends to two nodes, and the third waits for the second
    stage: every node in turn, and every node sends in turn.
    """
    expert_R = np.arange(24) % 6
    slots = np.stack([expert_R, np.full(24, EMPTY)], axis=1)
    slots[6:] = np.stack([np.arange(6, 24), expert_R[6:]], axis=1)
    nodes = np.arange(24) // 6
    first, second = Schedule.tree(LayerPlan(np.arange(24), slots), nodes.tolist()).stages
    assert Counter(nodes[copy.receiver] for copy in first) == {1: 4, 2: 4, 3: 4}
    assert Counter(nodes[copy.receiver] for copy in second) == {1: 2, 2: 2, 3: 2}
    assert Counter(nodes[copy.sender] for copy in second) == {1: 2, 2: 2, 3: 2}


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 5))
def test_trees_deliver_what_flat_delivers(seed: int, fanout: int, per_node: int) -> None:
    """Every replica is sent once, by a rank that has it by then; senders keep to the fan-out."""
    plan = make_plan(12, 24, 5, seed)
    nodes = [rank // per_node for rank in range(12)]
    tree = Schedule.tree(plan, nodes, fanout=fanout)
    wanted = sorted((copy.expert, copy.receiver) for copy in Schedule.flat(plan).copies)
    assert sorted((copy.expert, copy.receiver) for copy in tree.copies) == wanted
    for stage in tree.stages:
        order = [(copy.expert, copy.receiver) for copy in stage]
        assert order, "a stage without a message"
        assert order == sorted(order)
    held = {(expert, int(rank)) for expert, rank in enumerate(plan.owner_E)}
    sends: Counter[tuple[int, int, bool]] = Counter()
    crossed: Counter[tuple[int, int]] = Counter()
    for stage in tree.stages:
        assert all((copy.expert, copy.sender) in held for copy in stage)
        for copy in stage:
            held.add((copy.expert, copy.receiver))
            is_far = nodes[copy.sender] != nodes[copy.receiver]
            sends[copy.expert, copy.sender, is_far] += 1
            crossed[copy.expert, nodes[copy.receiver]] += is_far
            assert plan.slot_expert_RS[copy.sender, copy.sender_slot] == copy.expert
            assert plan.slot_expert_RS[copy.receiver, copy.receiver_slot] == copy.expert
    assert max(sends.values(), default=0) <= fanout
    assert max(crossed.values(), default=0) <= 1


def _compare_with_dense(dtype: torch.dtype, per_node: int | None, seed: int) -> None:
    group = dist.group.WORLD
    rank = group.rank()
    plan = make_plan(group.size(), 8, 3, seed)
    if per_node is None:
        schedule = Schedule.flat(plan)
    else:
        schedule = Schedule.tree(plan, [r // per_node for r in range(group.size())])
    generator = torch.Generator().manual_seed(100 * seed + rank)
    slots = torch.randint(-50, 50, (plan.num_slots, 24), generator=generator).to(dtype)

    expected = dense_all_gather(slots.unbind(0), plan, group)
    gathered = dict(enumerate(slots.clone().unbind(0)))
    sparse_all_gather(gathered, schedule, group)
    for slot, want in enumerate(expected):
        assert torch.equal(gathered[slot], want), f"spAG, rank {rank}, slot {slot}"

    expected = dense_reduce_scatter(slots.unbind(0), plan, group)
    reduced = dict(enumerate(slots.clone().unbind(0)))
    sparse_reduce_scatter(reduced, schedule, group, RowBuffer())
    owned = [s for s, e in enumerate(plan.slot_expert_RS[rank]) if plan.owner_E[e] == rank]
    for slot in owned:
        assert torch.equal(reduced[slot], expected[slot]), f"spRS, rank {rank}, slot {slot}"


@pytest.mark.parametrize("per_node", [None, 2, 3])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_equal_to_dense(world_size: int, per_node: int | None) -> None:
    run_ranks(world_size, _compare_with_dense, torch.float32, per_node, world_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.float64])
def test_any_dtype(dtype: torch.dtype) -> None:
    run_ranks(2, _compare_with_dense, dtype, None, 3)


def _count_messages() -> None:
    group = dist.group.WORLD
    sent: list[int] = []
    original = dist.batch_isend_irecv

    def counting(ops: list[dist.P2POp]) -> list[dist.Work]:
        sent.append(len(ops))
        return original(ops)

    dist.batch_isend_irecv = counting
    rows = {slot: torch.zeros(3) for slot in range(5)}
    empty = Schedule(())
    sparse_all_gather(rows, empty, group)
    sparse_reduce_scatter(rows, empty, group, RowBuffer())
    assert sent == [], "an empty plan must cost nothing"
    # One group call however many copies there are.
    one = Schedule(((Copy(0, 0, 0, 1, 4), Copy(1, 0, 1, 1, 3)),))
    sparse_all_gather(rows, one, group)
    assert sent == [2]
    # Tensors without elements send nothing.
    sparse_all_gather({slot: torch.zeros(0) for slot in range(5)}, one, group)
    assert sent == [2]


def test_empty_plans_cost_nothing_and_calls_are_coalesced() -> None:
    run_ranks(2, _count_messages)


def _die_inside(collective: str, overlap: bool) -> str:
    """Rank 1 is killed; rank 0 must be told of the collective, the layer, the expert, the peer."""
    group = dist.group.WORLD
    if group.rank() == 1:
        os._exit(9)
    schedule = Schedule(((Copy(7, 1, 0, 0, 1),),))
    rows = {slot: torch.zeros(1_000_000) for slot in range(2)}

    def run() -> None:
        if collective == "spAG":
            sparse_all_gather(rows, schedule, group, "spAG of MoE layer 3")
        else:
            sparse_reduce_scatter(rows, schedule, group, RowBuffer(), "spRS of MoE layer 3")

    lane = make_lane(torch.device("cpu"), overlap=overlap)
    lane.start(run, Meter()).wait()
    return "did not notice"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("collective", "way"), [("spAG", "receiving"), ("spRS", "sending")])
def test_killed_peer_is_an_error_that_names_it(collective: str, way: str, overlap: bool) -> None:
    error, killed = run_ranks(2, _die_inside, collective, overlap, timeout_s=60, check=False)
    assert killed == "died with exit code 9"
    assert re.search(rf"{collective} of MoE layer 3 failed {way} expert 7 (from|to) rank 1", error)


def test_lanes_count_what_is_waited_for() -> None:
    for overlap, exposed in ((False, True), (True, False)):
        lane, meter = make_lane(torch.device("cpu"), overlap=overlap), Meter()
        pending = lane.start(lambda: time.sleep(0.2), meter)
        time.sleep(0.3)
        pending.wait()
        lane.close()
        total_s, exposed_s = meter.read()
        assert total_s >= 0.2
        assert (exposed_s >= 0.2) == exposed
        assert meter.read() == (0.0, 0.0)


def test_a_rank_that_fails_ends_though_its_thread_waits() -> None:
    """Else its peers, and torchrun, would notice only after the process group's timeout."""
    script = (
        "import time, torch\n"
        "from megatron_fssdp.collectives.lanes import Meter, make_lane\n"
        "lane = make_lane(torch.device('cpu'), overlap=True)\n"
        "lane.start(lambda: time.sleep(300), Meter())\n"
        "raise ValueError('the loss is NaN')\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert answer.returncode == 1
    assert "the loss is NaN" in answer.stderr

"""Moves: homes, rounds by hand and at random, as few rounds as can be, modelled time, errors."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_fssdp.planning.moves import Homes, Move, moved_bytes, moves_s, plan_moves
from megatron_fssdp.planning.topology import LinkClass, Topology
from tests.planning.cases import seeds


def array(rows):
    return np.array(rows, dtype=np.int64)


def random_case(seed, num_layers, num_ranks, owned):
    """Homes in any order, and new owners: few, many or all experts change hands."""
    rng = np.random.default_rng(seed)
    even = Homes.even(num_layers, num_ranks * owned, num_ranks)
    homes, _ = plan_moves(even, rng.permutation(even.owner_LE.ravel()).reshape(even.owner_LE.shape))
    owner = homes.owner_LE.flatten()
    chosen = rng.permutation(owner.size)[: rng.integers(0, owner.size + 1)]
    owner[chosen] = rng.permutation(owner[chosen])
    return homes, owner.reshape(homes.owner_LE.shape)


def contents(homes):
    """{(rank, home): (layer, expert)}."""
    return {
        (rank, home): tuple(expert)
        for rank in range(homes.num_ranks)
        for home, expert in enumerate(homes.expert_of(rank).tolist())
    }


def simulate(homes, rounds):
    """Carry the rounds out; a rank has room for one expert that has not yet got its home."""
    held = contents(homes)
    for moves in rounds:
        assert moves, "an empty round"
        sources, targets = [m.source for m in moves], [m.target for m in moves]
        assert sources == sorted(set(sources)), "a rank sends twice"
        assert sorted(targets) == sources, "a rank receives twice, or without sending"
        vacated = {m.source: m.source_home for m in moves}
        in_flight = {}
        for move in moves:
            assert move.source != move.target
            assert move.target_home == vacated[move.target]
            in_flight[move.target] = held.pop((move.source, move.source_home))
            assert in_flight[move.target] == (move.layer, move.expert)
        for move in moves:
            held[move.target, move.target_home] = in_flight[move.target]
    return held


def most_sent(homes, new_owner_LE):
    """The lower bound of the number of rounds."""
    changed = new_owner_LE != homes.owner_LE
    return int(np.bincount(homes.owner_LE[changed], minlength=1).max())


def check(homes, new_owner_LE):
    new, rounds = plan_moves(homes, new_owner_LE)
    assert (new.owner_LE == new_owner_LE).all()
    assert simulate(homes, rounds) == contents(new)
    stays = new_owner_LE == homes.owner_LE
    assert (new.home_LE == homes.home_LE)[stays].all()
    moved = [(move.layer, move.expert) for moves in rounds for move in moves]
    assert sorted(moved) == [tuple(at) for at in np.argwhere(~stays).tolist()]
    assert len(rounds) == most_sent(homes, new_owner_LE)
    return new, rounds


def test_even_homes():
    """Two layers, four experts, two ranks: layer 1's experts live behind layer 0's."""
    homes = Homes.even(2, 4, 2)
    assert homes.owner_LE.tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]
    assert homes.home_LE.tolist() == [[0, 1, 0, 1], [2, 3, 2, 3]]
    assert homes.expert_of(1).tolist() == [[0, 2], [0, 3], [1, 2], [1, 3]]
    assert homes.owned(1, 0) == [(0, 2), (1, 3)]


def test_a_home_may_hold_an_expert_of_any_layer():
    homes = Homes(array([[1, 0, 1], [0, 0, 1]]), array([[2, 1, 0], [0, 2, 1]]))
    assert homes.expert_of(0).tolist() == [[1, 0], [0, 1], [1, 1]]
    assert homes.owned(0, 1) == [(0, 2), (2, 0)]
    assert homes.owned(0, 0) == [(1, 1)]


def test_docstring_example():
    _, rounds = plan_moves(Homes.even(1, 2, 2), array([[1, 0]]))
    assert rounds == ((Move(0, 0, 0, 0, 1, 0), Move(0, 1, 1, 0, 0, 0)),)


def test_opposite_cycles_by_hand():
    """Three ranks of two experts each; every rank gives one to each of the others.

    Three swaps would take three rounds, as any two of them share a rank; two cycles take two.

    Experts in turn: 0 (0 -> 1) gets round 0. 1 (0 -> 2) gets round 1, as rank 0 sends in 0. 2
    (1 -> 0) gets round 0. For 3 (1 -> 2) rank 1 has round 1 and rank 2 has round 0: 1 and with it
    0 change rounds, and 3 gets round 1. 4 (2 -> 0) gets round 1, 5 (2 -> 1) round 0.
    """
    new, rounds = check(Homes.even(1, 6, 3), array([[1, 2, 0, 2, 0, 1]]))
    assert rounds == (
        (Move(0, 1, 0, 1, 2, 1), Move(0, 2, 1, 0, 0, 1), Move(0, 5, 2, 1, 1, 0)),
        (Move(0, 0, 0, 0, 1, 1), Move(0, 3, 1, 1, 2, 0), Move(0, 4, 2, 0, 0, 0)),
    )
    assert new.home_LE.tolist() == [[1, 1, 1, 0, 0, 0]]


def test_disjoint_swaps_share_a_round():
    """Ranks 0 and 1 swap experts of layer 0, ranks 2 and 3 of layer 1: one round."""
    owner_LE = Homes.even(2, 4, 4).owner_LE.copy()
    owner_LE[0, [0, 1]], owner_LE[1, [2, 3]] = [1, 0], [3, 2]
    new, rounds = check(Homes.even(2, 4, 4), owner_LE)
    assert [[(m.layer, m.source, m.target) for m in moves] for moves in rounds] == [
        [(0, 0, 1), (0, 1, 0), (1, 2, 3), (1, 3, 2)]
    ]
    assert new.owned(1, 3) == [(2, 1)]


def test_owners_that_stay_need_no_rounds():
    homes = Homes.even(2, 6, 3)
    new, rounds = check(homes, homes.owner_LE.copy())
    assert rounds == ()
    assert new.home_LE.tolist() == homes.home_LE.tolist()


@settings(max_examples=300, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(1, 9), st.integers(1, 4))
@example(0, 4, 9, 4)
def test_any_new_owners(seed, num_layers, num_ranks, owned):
    """Each move once, homes as promised, as few rounds as can be, the same at every call."""
    homes, new_owner_LE = random_case(seed, num_layers, num_ranks, owned)
    new, rounds = check(homes, new_owner_LE)
    again, same_rounds = plan_moves(homes, new_owner_LE)
    assert same_rounds == rounds
    assert (again.home_LE == new.home_LE).all()


def test_a_large_model_whose_experts_all_move():
    """58 layers of 256 experts on 64 ranks: 14.6k moves, 232 rounds at the most."""
    homes = Homes.even(58, 256, 64)
    rng = np.random.default_rng(0)
    check(homes, rng.permutation(homes.owner_LE.ravel()).reshape(58, 256))
    _, rounds = check(homes, (homes.owner_LE + 1) % 64)
    assert len(rounds) == 232


def test_plan_leaves_the_new_owners_writable():
    owner_LE = array([[1, 0]])
    plan_moves(Homes.even(1, 2, 2), owner_LE)
    owner_LE[0, 0] = 0


def test_bytes_and_seconds():
    """Ranks 0 and 1 on a node, 2 on another; 0 and 1 swap, then 1 and 2.

    Near: 1 s latency and 100 / 100 s. Far: 2 s and 100 / 10 s. A round in which both are used
    takes as long as the far one.
    """
    near, far = LinkClass(bytes_per_s=100, latency_s=1), LinkClass(bytes_per_s=10, latency_s=2)
    topology = Topology((0, 0, 1), intra_node=near, inter_node=far)
    _, rounds = plan_moves(Homes.even(1, 6, 3), array([[1, 0, 0, 2, 1, 2]]))
    assert [[(m.source, m.target) for m in moves] for moves in rounds] == [
        [(0, 1), (1, 0)],
        [(1, 2), (2, 1)],
    ]
    assert moved_bytes(rounds, 100) == 400
    assert moves_s(rounds, topology, 100) == pytest.approx(2.0 + 12.0)
    _, rounds = plan_moves(Homes.even(1, 3, 3), array([[1, 2, 0]]))
    assert moves_s(rounds, topology, 100) == pytest.approx(12.0)
    assert moves_s((), topology, 100) == moved_bytes((), 100) == 0


@pytest.mark.parametrize(
    ("owner_LE", "home_LE", "message"),
    [
        ([[0, 1]], [[0], [0]], "owner_LE has shape (1, 2), home_LE (2, 1)"),
        ([0, 1], [0, 0], "both must be (layers, experts)"),
        ([[]], [[]], "there are no experts"),
        ([[0, -1]], [[0, 0]], "name a rank outside 0..0"),
        ([[0, 9]], [[0, 0]], "name a rank outside 0..1"),
        ([[0, 0, 0, 1]], [[0, 1, 2, 0]], "rank 0 owns 3 experts of all layers, but 4 experts on 2"),
        ([[0, 0, 1]], [[0, 1, 0]], "3 experts on 2 ranks must be 1.5 each"),
        ([[0, 0, 1, 1]], [[0, 1, 0, 2]], "home_LE names a home outside 0..1"),
        ([[0, 0, 1, 1]], [[0, -1, 0, 1]], "home_LE names a home outside 0..1"),
        ([[0, 0, 1, 1]], [[0, 1, 1, 1]], "home 0 of rank 1 holds 0 experts"),
    ],
)
def test_homes_that_cannot_be(owner_LE, home_LE, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Homes(array(owner_LE), array(home_LE))


def test_even_homes_need_even_owners():
    with pytest.raises(ValueError, match="3 experts cannot be owned evenly by 2"):
        Homes.even(1, 3, 2)


@pytest.mark.parametrize(
    ("new_owner_LE", "message"),
    [
        ([[0, 0, 1]], "the new owners have shape (1, 3), the old (1, 4)"),
        ([[0, 0, 1, 2]], "name a rank outside 0..1"),
        ([[0, 0, 1, -1]], "name a rank outside 0..1"),
        ([[0, 1, 1, 1]], "rank 0 owns 1 experts of all layers, but 4 experts on 2 ranks must be 2"),
    ],
)
def test_new_owners_that_cannot_be(new_owner_LE, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_moves(Homes.even(1, 4, 2), array(new_owner_LE))

"""Sharding: even, algorithm 2 by hand, swaps."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.sharding import shard_by_load, shard_evenly, shard_for_replicas
from megatron_fssdp.planning.topology import Topology


def test_even():
    assert shard_evenly(2, 4, 2).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]
    with pytest.raises(ValueError, match="3 experts cannot be owned evenly by 2"):
        shard_evenly(1, 3, 2)


def test_algorithm_2_by_hand():
    """Two layers, four experts, two nodes of one rank; t = 1: each layer's hottest is left over.

    Layer 1 has the more loaded cold expert (30), so it goes first: 30 to rank 0, 20 to rank 1
    (emptier), 10 to rank 1 (20 < 30). Layer 0: 9 to the emptier rank; both are at 0, rank 1 has
    fewer free slots (2 against 3): rank 1. Then 8 to rank 0, 7 to rank 0 (8 < 9). Then the hot
    ones: both stay with their owners, 0 and 1, who have one slot left each.
    """
    load_LE = np.array([[100, 9, 8, 7], [10, 20, 30, 100]], dtype=np.int64)
    owner_LE = shard_evenly(2, 4, 2)
    owners = shard_by_load(load_LE, owner_LE, Topology((0, 1)), overlap_degree=1)
    assert owners.tolist() == [[0, 1, 0, 0], [1, 1, 0, 1]]


def test_algorithm_2_keeps_memory_even_over_all_layers():
    rng = np.random.default_rng(0)
    load_LE = rng.integers(0, 1000, (6, 16))
    owners = shard_by_load(load_LE, shard_evenly(6, 16, 8), Topology.uniform(8, 4), 3)
    assert np.bincount(owners.ravel(), minlength=8).tolist() == [12] * 8
    with pytest.raises(ValueError, match="cannot be owned evenly"):
        shard_by_load(load_LE[:, :15], shard_evenly(6, 15, 5), Topology.uniform(8, 4), 3)


def test_swap_levels_two_ranks():
    """Ranks own {8, 1} and {2, 1}: swapping 8 with 2 overshoots, so nothing helps more than 6.

    Owners 9 and 3: the gap is 6; swapping 8 and 2 moves 6, which only turns them round.
    """
    load_LE = np.array([[8, 1, 2, 1]], dtype=np.int64)
    owner_LE = shard_evenly(1, 4, 2)
    assert (shard_for_replicas(load_LE, owner_LE, 2) == owner_LE).all()
    # Owners 7 and 3: swapping 5 with 3 makes both 5.
    load_LE = np.array([[5, 2, 3, 0]], dtype=np.int64)
    assert shard_for_replicas(load_LE, owner_LE, 2).tolist() == [[1, 0, 0, 1]]


def test_swaps_need_no_more_replicas_and_move_little():
    rng = np.random.default_rng(1)
    load_LE = np.sort(rng.zipf(1.6, (20, 64)).clip(max=500), axis=1)[:, rng.permutation(64)]
    owner_LE = shard_evenly(20, 64, 16)
    owners = shard_for_replicas(load_LE, owner_LE, 16)
    assert (owners != owner_LE).sum(axis=1).max() <= 8
    for row in owners:
        assert np.bincount(row, minlength=16).tolist() == [4] * 16
    topology, settings = Topology.uniform(16, 8), PlanSettings(spare_tokens=None)
    before = plan_layers(load_LE, owner_LE, topology, settings).num_replicas_L.sum()
    assert plan_layers(load_LE, owners, topology, settings).num_replicas_L.sum() <= before

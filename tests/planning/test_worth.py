"""What new owners are worth."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_fssdp.planning.cost import ComputeRate, Copying, LayerShape
from megatron_fssdp.planning.planner import PlanSettings
from megatron_fssdp.planning.topology import LinkClass, Topology
from megatron_fssdp.planning.worth import saved_by_owners


def test_every_micro_batch_saves() -> None:
    """A move was paid by the saving of one micro-batch, so large batches re-sharded too late."""
    load_LE = np.array([[900, 900, 100, 100]])
    old_LE, new_LE = np.array([[0, 0, 1, 1]]), np.array([[0, 1, 0, 1]])
    shape = LayerShape(
        hidden_size=64, ffn_size=64, num_matrices=3, param_bytes=2, grad_bytes=4, activation_bytes=2
    )
    cluster = (Topology.uniform(2), PlanSettings(num_replica_slots=0), shape)
    rate = ComputeRate(flops_per_s=1e9)
    once_s = saved_by_owners(load_LE, old_LE, new_LE, *cluster, rate)
    assert once_s > 0
    four = Copying(num_microbatches=4)
    assert saved_by_owners(load_LE, old_LE, new_LE, *cluster, rate, four) == 4 * once_s


def test_replicas_that_are_not_needed_any_more() -> None:
    """Every trip has its latency: copies were one long message an iteration.

    Rank 1 needs a replica of 800 of rank 0's 1800 tokens; the new owners are even by themselves. A
    replica's weights (200 bytes) take 1 + 0.2 s, its gradients (400 bytes) 1 + 0.4 s. Kept, they
    travel once in 4 micro-batches: 2.6 s. Re-materialized 8 and 4 times: 9.6 + 5.6 s.
    """
    load_LE = np.array([[900, 900, 100, 100]])
    old_LE, new_LE = np.array([[0, 0, 1, 1]]), np.array([[0, 1, 0, 1]])
    link = LinkClass(bytes_per_s=1000.0, latency_s=1.0)
    shape = LayerShape(hidden_size=10, ffn_size=5, num_matrices=2, grad_bytes=4)
    settings = PlanSettings(num_replica_slots=1, spare_tokens=None)
    rate = ComputeRate(flops_per_s=1000.0)
    for again, seconds in ((False, 2.6), (True, 15.2)):
        copying = Copying(num_microbatches=4, rematerializes=again)
        args = Topology((0, 0), intra_node=link), settings, shape, rate, copying
        assert saved_by_owners(load_LE, old_LE, new_LE, *args) == pytest.approx(seconds)

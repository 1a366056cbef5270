"""What new owners are worth."""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.cost import ComputeRate, Copying, LayerShape
from megatron_fssdp.planning.planner import PlanSettings
from megatron_fssdp.planning.topology import Topology
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

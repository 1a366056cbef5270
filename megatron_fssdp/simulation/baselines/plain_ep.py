# SPDX-License-Identifier: Apache-2.0

"""Plain expert parallelism: every expert at home, no replicas."""

from __future__ import annotations

from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines.common import with_replicas


def plan(load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int) -> LayerPlan:
    """Return the owners."""
    return with_replicas(owner_E, [], topology.num_ranks, num_slots)

# SPDX-License-Identifier: Apache-2.0

"""What plans made after the gate cost: seconds that a micro-batch waits for in each layer.

Nothing here was measured on a GPU by this project. FSSDP's is, in this order: what the user says
(`--planning-us`), what the cluster file says (`compute: planning_s`), an assumption that follows
from how today's routine is made.
"""

from __future__ import annotations

from megatron_fssdp.simulation.cluster import Cluster

# Counts, placement and routes in fused kernels, published of GPU planners at 64 ranks and 256
# experts: 67 to 78 us for the placement and 36 to 39 us for the routes (UltraEP's README).
FUSED_S = 110e-6
# Today's quotas (`experts.quotas`) are 600 to 1,700 small torch operations, by the plan: their
# middle, of a launch of about 5 us each, is about 6 ms. Not captured in a CUDA graph, not fused.
OPERATIONS, LAUNCH_S = 1150, 5e-6
DEVICE_S = OPERATIONS * LAUNCH_S
# On CPUs quotas are numpy (`planning.quotas`).
HOST_S = 0.2e-3


def fssdp_planning(cluster: Cluster, given_s: float | None) -> tuple[float, str]:
    """Return the seconds of FSSDP's quotas in a layer and micro-batch, and where they are from.

    Args:
        cluster: where it runs; ranks that share CPU cores have no GPU.
        given_s: what the user says; None: nothing.
    """
    if given_s is not None:
        return given_s, "as given"
    if cluster.planning_s is not None:
        return cluster.planning_s, f"as cluster {cluster.name} says"
    if cluster.shared_cores is not None:
        return HOST_S, "assumed: numpy on CPUs"
    text = f"assumed of today's routine: {OPERATIONS:,} operations x {LAUNCH_S * 1e6:.0f} us"
    return DEVICE_S, text


def fssdp_note(seconds: float, source: str) -> str:
    """Say what is charged."""
    return (
        f"FSSDP waits {seconds * 1e6:,.0f} us for counts and quotas in each MoE layer and "
        f"micro-batch ({source}; --planning-us changes it)"
    )

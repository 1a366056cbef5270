# SPDX-License-Identifier: Apache-2.0

"""What plans made after the gate cost: seconds that a micro-batch waits for in each layer.

FSSDP's is, in this order: what the user says (`--planning-us`), what the cluster file says
(`compute: planning_s`), what the routine took where it was measured.
"""

from __future__ import annotations

from megatron_fssdp.simulation.cluster import Cluster

# Counts, placement and routes in fused kernels, published of GPU planners at 64 ranks and 256
# experts: 67 to 78 us for the placement and 36 to 39 us for the routes (UltraEP's README).
FUSED_S = 110e-6
# Quotas and a rank's split on the host (`planning.quotas`), measured on one core: 0.3 to 0.4 ms for
# 8 ranks, 0.4 to 0.6 for 64, 2 to 4 for 1,024 (`make bench-planner` times them). What follows is
# near the upper end of each.
HOST_S, HOST_RANK_S = 0.35e-3, 4e-6
# The counts' way to the host, the split's to the device, and some 17 launches of the translation
# until the device has work again: assumed.
RETURN_S = 100e-6


def host_quotas_s(num_ranks: int) -> float:
    """Return the seconds of a layer's quotas, made on the host for so many expert-parallel ranks.

    That the host waits for the counts is not in it: Megatron's own dispatcher waits so as well.
    """
    return HOST_S + num_ranks * HOST_RANK_S + RETURN_S


def fssdp_planning(cluster: Cluster, given_s: float | None, num_ranks: int) -> tuple[float, str]:
    """Return the seconds of FSSDP's quotas in a layer and micro-batch, and where they are from.

    Args:
        cluster: where it runs.
        given_s: what the user says; None: nothing.
        num_ranks: of an expert-parallel group.
    """
    if given_s is not None:
        return given_s, "as given"
    if cluster.planning_s is not None:
        return cluster.planning_s, f"as cluster {cluster.name} says"
    seconds = host_quotas_s(num_ranks)
    source = f"the host's part as measured on a core, for {num_ranks} ranks"
    # Ranks on CPUs have no device that waits.
    return (seconds - RETURN_S if cluster.shared_cores else seconds), source


def fssdp_note(seconds: float, source: str) -> str:
    """Say what is charged."""
    return (
        f"FSSDP waits {seconds * 1e6:,.0f} us for its quotas in each MoE layer and "
        f"micro-batch ({source}; --planning-us changes it)"
    )

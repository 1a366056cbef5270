# SPDX-License-Identifier: Apache-2.0

"""How long weights take to reach replicas, and gradients to come back, on a group's links."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.schedule import Copy, Schedule, traffic
from megatron_fssdp.simulation.cluster import Network
from megatron_fssdp.simulation.flow import instances

Float64Array = npt.NDArray[np.float64]


def scheduled_s(schedule: Schedule, network: Network, num_bytes: int) -> Float64Array:
    """Return (R,) seconds until each rank is through with a schedule of this project.

    Stages follow each other; a rank is through after the last one that it is an end of.

    Args:
        schedule: the messages.
        network: the links.
        num_bytes: of a message.
    """
    num_ranks = len(network.node_R)
    end_R, now = np.zeros(num_ranks), 0.0
    for stage in schedule.stages:
        bytes_RR = traffic(stage, num_ranks) * num_bytes
        now += network.exchange_s(bytes_RR)
        end_R[(bytes_RR.any(axis=0)) | (bytes_RR.any(axis=1))] = now
    return end_R


def cheapest_scheduled_s(
    plan: LayerPlan, network: Network, num_bytes: int, return_bytes: int
) -> tuple[Float64Array, Float64Array, Schedule]:
    """Return the seconds there, the seconds back, and the faster schedule (`planning.cost`'s way).

    The way back is the same messages reversed.
    """
    flat = Schedule.flat(plan)
    found = [flat]
    if not network.is_one_node or flat.max_sends > 2:
        found.append(Schedule.tree(plan, tuple(network.node_R.tolist())))
    there = [scheduled_s(each, network, num_bytes) for each in found]
    best = int(np.argmin([each.max(initial=0.0) for each in there]))
    schedule = found[best]
    reverse = Schedule(tuple(tuple(map(_reversed, stage)) for stage in schedule.stages[::-1]))
    back_R = scheduled_s(reverse, network, return_bytes)
    return there[best], back_R, schedule


def _reversed(copy: Copy) -> Copy:
    return Copy(copy.expert, copy.receiver, copy.receiver_slot, copy.sender, copy.sender_slot)


def broadcast_s(
    members: Iterable[tuple[int, Int64Array]], network: Network, num_bytes: int
) -> Float64Array:
    """Return (R,) seconds of one broadcast (or reduce) for each expert, all at once.

    What NCCL's group calls do: an expert travels along a chain of its ranks, node after node, in
    pieces, so that each link of the chain carries it once and no node is entered twice.

    Args:
        members: for each expert its root and its (I,) ranks, the root among them or not.
        network: the links.
        num_bytes: of an expert.
    """
    num_ranks = len(network.node_R)
    bytes_RR = np.zeros((num_ranks, num_ranks))
    hops, is_end_R = 0, np.zeros(num_ranks, dtype=bool)
    num_nodes = int(network.node_R.max()) + 1
    for root, ranks in members:
        others = ranks[ranks != root]
        away = (network.node_R[others] - network.node_R[root]) % num_nodes
        chain = np.concatenate([[root], others[np.argsort(away, kind="stable")]])
        np.add.at(bytes_RR, (chain[:-1], chain[1:]), num_bytes)
        hops = max(hops, len(chain) - 1)
        is_end_R[chain] = True
    if not hops:
        return np.zeros(num_ranks)
    latency_s = network.near.latency_s if network.is_one_node else network.far.latency_s
    return np.where(is_end_R, network.exchange_s(bytes_RR) + (hops - 1) * latency_s, 0.0)


def replicated(plan: LayerPlan) -> list[tuple[int, Int64Array]]:
    """Return the owner and the ranks of each expert that has replicas."""
    expert_N, rank_N, _ = instances(plan)
    count_E = np.bincount(expert_N, minlength=plan.num_experts)
    first_E = np.cumsum(count_E) - count_E
    return [
        (int(plan.owner_E[expert]), rank_N[first_E[expert] : first_E[expert] + count_E[expert]])
        for expert in np.flatnonzero(count_E > 1)
    ]


def shard_traffic(plan: LayerPlan, num_bytes: int) -> Float64Array:
    """Return the (R, R) bytes of restoring experts that every rank holds a shard of (FSEP).

    Each rank receives its experts' other shards from all ranks, and sends its own shards as often
    as experts have instances.

    Args:
        plan: which rank restores which expert.
        num_bytes: of an expert.
    """
    num_ranks = plan.num_ranks
    _, rank_N, _ = instances(plan)
    received_R = np.bincount(rank_N, minlength=num_ranks) * (num_bytes / num_ranks)
    bytes_RR = np.tile(received_R, (num_ranks, 1))
    np.fill_diagonal(bytes_RR, 0)
    return bytes_RR


def far_bytes(bytes_RR: npt.NDArray[Any], network: Network) -> int:
    """Bytes of a traffic matrix that cross between nodes."""
    is_far_RR = network.node_R[:, None] != network.node_R
    return int(bytes_RR[is_far_RR].sum())

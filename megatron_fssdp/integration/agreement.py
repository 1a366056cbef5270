# SPDX-License-Identifier: Apache-2.0

"""What the ranks of an expert-parallel group must agree on, asked over the group itself."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.experts.placement import Placement
from megatron_fssdp.integration.step import LayerStep
from megatron_fssdp.planning.cost import ComputeRate
from megatron_fssdp.planning.files import LINKS
from megatron_fssdp.planning.topology import LinkClass, Topology, read_cluster

GroupByRanks = dict[tuple[int, ...], dist.ProcessGroup]

# Dense bf16 products of an H100, as training reaches them; until `fssdp calibrate` has measured.
DEFAULT_RATE = ComputeRate(flops_per_s=4e14)
# Of ranks on CPUs, in orders of magnitude: a core's products, gloo on a host and over Ethernet. An
# H100's would leave `make train` one slot of spares a rank, where two pay.
CPU_RATE = ComputeRate(flops_per_s=1e10, memory_bytes_per_s=1e10)
CPU_LINK = LinkClass(bytes_per_s=1e9, latency_s=1e-4)
CPU_NETWORK = LinkClass(bytes_per_s=1e8, latency_s=3e-4)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, in the order of ranks. Collective; None: over the world."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def all_agree(is_so: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether it is so on every rank. Collective; None: over the world."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    votes = torch.tensor([int(is_so)], device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())


def find_cluster(
    tp_ep_group: dist.ProcessGroup, config: FSSDPConfig, num_ranks: int
) -> tuple[Topology, ComputeRate]:
    """Ask every rank for its node; read links and rates from the cluster file.

    Collective.

    All ranks must agree, or they would make different plans; so a rank's own environment
    (LOCAL_WORLD_SIZE differs between nodes of unequal size) decides nothing.

    Args:
        tp_ep_group: of expert and expert tensor parallelism together; the shards of an
            expert-parallel rank follow each other.
        config: the `--fssdp-*` settings.
        num_ranks: R, expert-parallel ranks.

    Returns:
        The expert-parallel ranks' nodes and links (each is where its first shard is), and what a
        rank computes.

    Raises:
        ValueError: on every rank, if the ranks read different cluster files, or one cannot.
    """
    per_node = config.fssdp_ranks_per_node
    mine = f"node {dist.get_rank() // per_node}" if per_node else socket.gethostname()
    links, rate, problem = Topology((0,)), DEFAULT_RATE, None
    if dist.get_backend(tp_ep_group) == "gloo":
        links = Topology((0,), intra_node=CPU_LINK, inter_node=CPU_NETWORK)
        rate = CPU_RATE
    if config.fssdp_cluster is not None:
        try:
            read = read_cluster(config.fssdp_cluster)
            given = Topology.from_mapping({**read["topology"], "ranks_per_node": 1}, 1)
            # What the file leaves open stays as it is without a file.
            named = {name: getattr(given, name) for name in LINKS if name in read["topology"]}
            links = replace(links, **named)
            if "compute" in read:
                rate = ComputeRate.from_mapping(read["compute"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = str(error)
    answers = gather_objects(((links, rate), mine, problem), tp_ep_group)
    for rank, (_, _, found) in enumerate(answers):
        if found:
            raise ValueError(
                f"--fssdp-cluster {config.fssdp_cluster} cannot be read on rank {rank} of the "
                f"expert-parallel group: {found}; give every rank the same file, as written by "
                "`fssdp calibrate`."
            )
    if any(answer[0] != answers[0][0] for answer in answers):
        raise ValueError(
            f"--fssdp-cluster {config.fssdp_cluster} differs between the ranks of an "
            "expert-parallel group; give every rank the same file."
        )
    topology = Topology.from_hosts([host for _, host, _ in answers[:: len(answers) // num_ranks]])
    return replace(topology, intra_node=links.intra_node, inter_node=links.inter_node), rate


def make_groups(wanted: Sequence[Sequence[int]], purpose: str) -> GroupByRanks:
    """Make groups for sets of ranks. Collective over the world: every rank must call it.

    All ranks make all groups, in one order: torch names a group by a counter of its own on each
    rank, and ranks that count differently would wait for each other.

    Args:
        wanted: the sets of global ranks that this rank is in, ascending; it may want none.
        purpose: what messages call the groups.

    Returns:
        This rank's groups by their ranks. Each has been used once by all of its ranks: NCCL makes
        a communicator at the first use, and needs them all for that, while copies are the affair
        of a few.

    Raises:
        RuntimeError: the ranks of a group are not ascending.
    """
    for ranks in wanted:
        if list(ranks) != sorted(ranks):
            raise RuntimeError(
                f"the ranks of an expert-parallel group are not ascending: {list(ranks)}; "
                "--moe-parallel fssdp needs them so, use --moe-parallel ep"
            )
    made: GroupByRanks = {}
    everyone = gather_objects([tuple(ranks) for ranks in wanted])
    for ranks in sorted({each for of_rank in everyone for each in of_rank}):
        group = dist.new_group(list(ranks), group_desc=purpose)
        if dist.get_rank() in ranks:
            # The first use.
            all_agree(True, group)
            made[ranks] = group
    return made


def read_owners(path: str) -> dict[int, list[int]]:
    """Read `--fssdp-owners`, the same on every rank. Collective over the world.

    Returns:
        The owner of each expert, by the number of the MoE layer.

    Raises:
        ValueError: on every rank, if a rank cannot read the file, or reads another.
    """
    problem, owners = None, {}
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
        owners = {int(number): [int(rank) for rank in ranks] for number, ranks in read.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        problem = str(error)
    everyone = gather_objects((problem, owners))
    for rank, (found, theirs) in enumerate(everyone):
        if found or theirs != everyone[0][1]:
            why = found or "it differs from rank 0's"
            raise ValueError(
                f"--fssdp-owners {path} cannot be used on rank {rank}: {why}; give every rank the "
                'same JSON file, as {"1": [0, 0, 1, 1], ...}: the number of a MoE layer, the '
                "owner of each expert."
            )
    return owners


def peers_of(expert_group: dist.ProcessGroup, replica_group: dist.ProcessGroup) -> list[list[int]]:
    """Ask for the expert groups of all expert-data-parallel peers. Collective.

    Returns:
        Global ranks by expert-data-parallel rank, then by rank in the expert group.
    """
    return gather_objects(dist.get_process_group_ranks(expert_group), replica_group)


def check_plans(steps: Mapping[str, LayerStep], group: dist.ProcessGroup) -> None:
    """Prove that all ranks made the same plans and messages. Collective; one small message.

    Args:
        steps: of each layer, by its name.
        group: of expert and expert tensor parallelism together.

    Raises:
        RuntimeError: on every rank, with the first difference.
    """
    names, placements = list(steps), [step.placement for step in steps.values()]
    device = steps[names[0]].device
    digests = torch.tensor([_digest(p) for p in placements], dtype=torch.int64, device=device)
    everyone = digests.new_empty(group.size() * len(placements))
    dist.all_gather_into_tensor(everyone, digests, group=group)
    everyone = everyone.view(group.size(), -1).cpu()
    differs = (everyone != everyone[0]).nonzero().tolist()
    if not differs:
        return
    index = min(layer for _, layer in differs)
    plan = placements[index].plan
    held = gather_objects((plan.owner_E, plan.slot_expert_RS), group)
    rank = min(rank for rank, layer in differs if layer == index)
    raise RuntimeError(
        f"--fssdp-check-plans: rank {rank} of the expert-parallel group made another plan for "
        f"{names[index]} than rank 0: {_first_difference(held[0], held[rank])}. Plans follow from "
        "the loads, the settings and the topology alone; look for ranks that run other software, "
        "settings or hardware, and start again from the last checkpoint"
    )


def _digest(placement: Placement) -> int:
    plan = placement.plan
    content = plan.owner_E.tobytes() + plan.slot_expert_RS.tobytes()
    content += repr(placement.schedule.stages).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big", signed=True)


def _first_difference(ours: tuple[np.ndarray, ...], theirs: tuple[np.ndarray, ...]) -> str:
    for what, ours_, theirs_ in zip(("owner of expert", "slot"), ours, theirs, strict=True):
        if ours_.shape != theirs_.shape:
            return f"it has {theirs_.shape} entries there, not {ours_.shape}"
        places = np.argwhere(ours_ != theirs_).tolist()
        if places:
            place = tuple(places[0])
            where = f"{what} {place[0]}" if len(place) == 1 else f"rank {place[0]}, slot {place[1]}"
            return f"{where} is {int(theirs_[place])}, not {int(ours_[place])}"
    return "the same slots, filled by other messages (--fssdp-cluster, --fssdp-collectives)"

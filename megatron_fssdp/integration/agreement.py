# SPDX-License-Identifier: Apache-2.0

"""What the ranks of an expert-parallel group must agree on, asked over the group itself."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.planning.cost import ComputeRate
from megatron_fssdp.planning.plan import LayerPlan
from megatron_fssdp.planning.topology import Topology, read_cluster

# Dense bf16 products of an H100, as training reaches them; until `fssdp calibrate` has measured.
DEFAULT_RATE = ComputeRate(flops_per_s=4e14)


def find_cluster(group: dist.ProcessGroup, config: FSSDPConfig) -> tuple[Topology, ComputeRate]:
    """Ask every rank of the group for its node; read links and rates from the cluster file.

    Collective.

    All ranks must agree, or they would make different plans; so a rank's own environment
    (LOCAL_WORLD_SIZE differs between nodes of unequal size) decides nothing.

    Raises:
        ValueError: on every rank, if the ranks read different cluster files, or one cannot.
    """
    per_node = config.fssdp_ranks_per_node
    mine = f"node {dist.get_rank() // per_node}" if per_node else socket.gethostname()
    links, rate, problem = None, DEFAULT_RATE, None
    if config.fssdp_cluster is not None:
        try:
            read = read_cluster(config.fssdp_cluster)
            links = Topology.from_mapping({**read["topology"], "ranks_per_node": 1}, 1)
            if "compute" in read:
                rate = ComputeRate.from_mapping(read["compute"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = str(error)
    answers: list[Any] = [None] * group.size()
    dist.all_gather_object(answers, ((links, rate), mine, problem), group=group)
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
    topology = Topology.from_hosts([host for _, host, _ in answers])
    if links is not None:
        topology = replace(topology, intra_node=links.intra_node, inter_node=links.inter_node)
    return topology, rate


def make_copy_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a second communicator for the ranks of a group. Collective over that group only.

    On the expert-parallel group itself copies would queue behind the tokens' all-to-all.
    """
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend(group)
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    options = getattr(group._get_backend(device), "options", None)
    copies: dist.ProcessGroup = dist.new_group(
        ranks,
        backend=backend,
        timeout=getattr(options, "_timeout", None),
        use_local_synchronization=True,
        group_desc="FSSDP_COPIES",
    )
    if dist.get_process_group_ranks(copies) != ranks:
        raise RuntimeError(
            f"the ranks of an expert-parallel group are not ascending: {ranks}; --moe-parallel "
            "fssdp needs them so, use --moe-parallel ep"
        )
    return copies


def check_plans(
    plans: Sequence[LayerPlan], names: Sequence[str], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Prove that all ranks made the same plans. Collective; one small message.

    Raises:
        RuntimeError: on every rank, with the first difference.
    """
    digests = torch.tensor([_digest(plan) for plan in plans], dtype=torch.int64, device=device)
    everyone = digests.new_empty(group.size() * len(plans))
    dist.all_gather_into_tensor(everyone, digests, group=group)
    everyone = everyone.view(group.size(), -1).cpu()
    differs = (everyone != everyone[0]).nonzero().tolist()
    if not differs:
        return
    index = min(layer for _, layer in differs)
    held: list[Any] = [None] * group.size()
    dist.all_gather_object(held, (plans[index].owner_E, plans[index].slot_expert_RS), group=group)
    rank = min(rank for rank, layer in differs if layer == index)
    raise RuntimeError(
        f"--fssdp-check-plans: rank {rank} of the expert-parallel group made another plan for "
        f"{names[index]} than rank 0: {_first_difference(held[0], held[rank])}. Plans follow from "
        "the loads, the settings and the topology alone; look for ranks that run other software, "
        "settings or hardware, and start again from the last checkpoint"
    )


def _digest(plan: LayerPlan) -> int:
    content = plan.owner_E.tobytes() + plan.slot_expert_RS.tobytes()
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
    return "no difference is left to show"

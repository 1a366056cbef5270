# SPDX-License-Identifier: Apache-2.0

"""The machine that is simulated: nodes, links, adapters that ranks share, rates.

It reads the same cluster files as the planner (`configs/clusters`, or what `fssdp calibrate`
wrote). Keys that only the simulator uses, all optional:

    topology:
      adapters_per_node: 1     # network adapters that a node's ranks share; default one each.
                               # inter_node.bytes_per_s stays a rank's share of them: ranks that
                               # send alone get more where fewer adapters are shared by more ranks
    compute:
      memory_bytes_per_s: 3e12 # what passes that only move data reach; default: they take nothing
      shared_cores: 2          # CPU cores that all ranks share, where they are fewer
      cores_copy: true         # cores that compute copy replicas too; default false
      has_fused_kernels: false # attention, activation, gradient accumulation; default true
      planning_s: 0.5e-3       # of FSSDP's quotas in a layer and micro-batch; see systems.planning
    gpu:
      memory_bytes: 80e9       # of a rank

Shape letter: R ranks of one group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.cost import ComputeRate
from megatron_fssdp.planning.topology import NETWORK, NVLINK, LinkClass, Topology, read_cluster
from megatron_fssdp.presets.sizes import usable_bytes

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a job runs on.

    Attributes:
        name: for titles.
        ranks_per_node: of each node.
        intra_node, inter_node: links; `inter_node.bytes_per_s` is one rank's share of a node's
            adapters.
        adapters_per_node: adapters that a node's ranks share; None: one each.
        rate: how fast a rank multiplies, with all ranks of the node at work.
        memory_bytes_per_s: rate of passes that only move data.
        shared_cores: CPU cores that all ranks share; None: a device each.
        cores_copy: replicas that travel in the background take the cores from the ranks'
            computation, as gloo's threads do where no core is idle; GPUs have engines for it.
        has_fused_kernels: the attention writes no scores and leaves later tokens out; the
            gated activation is one pass, and products add to gradients themselves.
        memory_bytes: of a rank; None: not known.
        planning_s: what FSSDP's counts and quotas take here, as measured; None: not known.
    """

    name: str
    ranks_per_node: int
    intra_node: LinkClass = NVLINK
    inter_node: LinkClass = NETWORK
    adapters_per_node: int | None = None
    rate: ComputeRate
    memory_bytes_per_s: float = math.inf
    shared_cores: int | None = None
    cores_copy: bool = False
    has_fused_kernels: bool = True
    memory_bytes: float | None = None
    planning_s: float | None = None

    @property
    def usable_bytes(self) -> float | None:
        """Memory of a rank that a job may take; see `presets.sizes.usable_bytes`."""
        return None if self.memory_bytes is None else usable_bytes(self.memory_bytes)

    def nodes_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the node of each rank of a group, numbered from 0 as they appear."""
        nodes = [rank // self.ranks_per_node for rank in ranks]
        number = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
        return tuple(number[node] for node in nodes)

    def topology(self, ranks: Sequence[int]) -> Topology:
        """Return a group's topology for the planner."""
        return Topology(self.nodes_of(ranks), self.intra_node, self.inter_node)

    def network(self, ranks: Sequence[int]) -> Network:
        """Return a group's links.

        Where the group has only some of the ranks that share an adapter, the others are thought to
        use their part of it at the same time.
        """
        node_R = np.array(self.nodes_of(ranks), dtype=np.int64)
        local_R = np.array(ranks, dtype=np.int64) % self.ranks_per_node
        adapters = self.adapters_per_node or self.ranks_per_node
        adapter_R = node_R * adapters + local_R * adapters // self.ranks_per_node
        _, adapter_R = np.unique(adapter_R, return_inverse=True)
        return Network(node_R, adapter_R.astype(np.int64), self.intra_node, self.inter_node)

    def with_links(self, factor: float) -> Cluster:
        """Return the cluster with links that are `factor` times as fast."""
        faster = [
            replace(link, bytes_per_s=link.bytes_per_s * factor)
            for link in (self.intra_node, self.inter_node)
        ]
        return replace(self, intra_node=faster[0], inter_node=faster[1])


@dataclass(frozen=True, eq=False)
class Network:
    """The links of a group's ranks.

    Attributes:
        node_R: (R,) int64, node of each rank.
        adapter_R: (R,) int64, the network adapter of each rank; some may share one.
        near: link between ranks of a node.
        far: a rank's share of a link between nodes.
    """

    node_R: npt.NDArray[np.int64]
    adapter_R: npt.NDArray[np.int64]
    near: LinkClass
    far: LinkClass

    @property
    def is_one_node(self) -> bool:
        """Whether no link between nodes is there."""
        return bool((self.node_R == self.node_R[0]).all())

    def exchange_s(self, bytes_RR: npt.NDArray[Any]) -> float:
        """Seconds of an exchange: the fullest link of each class, both classes at once.

        Ranks that share an adapter share its bandwidth: what they send together counts.

        Args:
            bytes_RR: (R, R) bytes from each rank (row) to each (column); the diagonal is free.
        """
        is_far_RR = self.node_R[:, None] != self.node_R
        far_RR = np.where(is_far_RR, bytes_RR, 0)
        near_RR = np.where(is_far_RR, 0, bytes_RR)
        np.fill_diagonal(near_RR, 0)
        near = max(float(near_RR.sum(axis=0).max()), float(near_RR.sum(axis=1).max()))
        seconds = self.near.time_s(near) if near else 0.0
        share = np.bincount(self.adapter_R)
        for axis in (0, 1):
            load = np.bincount(self.adapter_R, weights=far_RR.sum(axis=axis)) / share
            if load.max():
                seconds = max(seconds, self.far.time_s(float(load.max())))
        return seconds

    def ring_s(self, num_bytes: float, ranks: npt.NDArray[np.int64], passes: int = 1) -> float:
        """Seconds of a ring reduce-scatter or all-gather (2 passes: all-reduce) of `num_bytes`.

        Each rank sends (n - 1) / n of the bytes a pass. Between nodes the rings of all ranks that
        a node has in the group use their adapters together (bus bandwidth as in nccl-tests,
        doc/PERFORMANCE.md).

        Args:
            num_bytes: each rank's part of the sum before it is scattered.
            ranks: the group's ranks, positions in this network.
            passes: 1, or 2 for an all-reduce.
        """
        size = len(ranks)
        if size < 2:
            return 0.0
        nodes = self.node_R[ranks]
        link = self.near
        if (nodes != nodes[0]).any():
            together = float(np.bincount(nodes)[nodes].min())
            bandwidth = min(self.far.bytes_per_s * together, self.near.bytes_per_s)
            link = LinkClass(bytes_per_s=bandwidth, latency_s=self.far.latency_s)
        # A tree's latency: NCCL takes trees where rings would be all latency.
        steps = math.ceil(math.log2(size))
        volume = num_bytes * (size - 1) / size
        return passes * (steps * link.latency_s + volume / link.bytes_per_s)


def load_cluster(path: str | Path, ranks_per_node: int | None = None) -> Cluster:
    """Read a cluster file.

    Args:
        path: of the YAML file.
        ranks_per_node: instead of the file's.

    Raises:
        ValueError: if it lacks `topology` or `compute`, or its nodes differ in size.
    """
    return cluster_from_mapping(read_cluster(path), Path(path).stem, ranks_per_node)


def cluster_from_mapping(
    values: dict[str, Any], name: str, ranks_per_node: int | None = None
) -> Cluster:
    """Build a cluster from a cluster file's mapping; see `load_cluster`."""
    topology, compute = values["topology"], values.get("compute")
    if not compute:
        raise ValueError(f"cluster {name} has no 'compute' part: run `fssdp calibrate`")
    size = topology["ranks_per_node"] if ranks_per_node is None else ranks_per_node
    if not isinstance(size, int):
        if len(set(size)) != 1:
            raise ValueError(
                f"cluster {name} has nodes of {size} ranks: the simulator needs equal nodes, "
                "give topology.ranks_per_node one number"
            )
        size = int(size[0])
    links = Topology.from_mapping({**topology, "ranks_per_node": 1}, 1)
    adapters, cores = topology.get("adapters_per_node"), compute.get("shared_cores")
    memory, planning = values.get("gpu", {}).get("memory_bytes"), compute.get("planning_s")
    return Cluster(
        name=str(values.get("name", name)),
        ranks_per_node=size,
        intra_node=links.intra_node,
        inter_node=links.inter_node,
        adapters_per_node=None if adapters is None else int(adapters),
        rate=ComputeRate.from_mapping(compute),
        memory_bytes_per_s=float(compute.get("memory_bytes_per_s", math.inf)),
        shared_cores=None if cores is None else int(cores),
        cores_copy=bool(compute.get("cores_copy", False)),
        has_fused_kernels=bool(compute.get("has_fused_kernels", True)),
        memory_bytes=None if memory is None else float(memory),
        planning_s=None if planning is None else float(planning),
    )

# SPDX-License-Identifier: Apache-2.0

"""Topology: which node each rank is on, and what a byte costs inside and between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fssdp.planning.files import check_cluster, read_yaml
from megatron_fssdp.planning.plan import Int64Array


@dataclass(frozen=True, kw_only=True)
class LinkClass:
    """What one rank gets out of one kind of link, in one direction.

    Attributes:
        bytes_per_s: bandwidth of one rank's link.
        latency_s: time until the first byte of a message arrives.
    """

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError(
                f"a link of {self.bytes_per_s} bytes/s and {self.latency_s} s latency cannot be"
            )

    def time_s(self, num_bytes: float) -> float:
        """Seconds that `num_bytes` take over this link."""
        return self.latency_s + num_bytes / self.bytes_per_s


# Public figures of an H100 DGX node: NVLink 4, 450 GB/s a direction and GPU; one 400 Gbit/s
# adapter a GPU. The defaults until `fssdp calibrate` has measured a cluster.
NVLINK = LinkClass(bytes_per_s=450e9, latency_s=5e-6)
NETWORK = LinkClass(bytes_per_s=50e9, latency_s=15e-6)


@dataclass(frozen=True)
class Topology:
    """Ranks on nodes. Nodes may differ in size; nodes are numbered from 0.

    Attributes:
        node_of_rank: the node of each rank.
        intra_node: links between the ranks of a node.
        inter_node: links between nodes, per rank (a node's adapters, divided by its ranks).
    """

    node_of_rank: tuple[int, ...]
    intra_node: LinkClass = field(default=NVLINK)
    inter_node: LinkClass = field(default=NETWORK)

    def __post_init__(self) -> None:
        nodes = set(self.node_of_rank)
        if not nodes:
            raise ValueError("a topology needs at least one rank")
        if nodes != set(range(len(nodes))):
            raise ValueError(f"nodes must be numbered 0..{len(nodes) - 1}, not {sorted(nodes)}")

    @classmethod
    def uniform(cls, num_ranks: int, ranks_per_node: int | None = None) -> Topology:
        """Build nodes of equal size, the last one smaller if the ranks do not divide.

        Args:
            num_ranks: R.
            ranks_per_node: None puts all ranks on one node.
        """
        size = num_ranks if ranks_per_node is None else ranks_per_node
        if num_ranks < 1 or size < 1:
            raise ValueError(f"{num_ranks} ranks in nodes of {size} cannot be")
        return cls(tuple(rank // size for rank in range(num_ranks)))

    @classmethod
    def from_hosts(cls, hosts: Sequence[str]) -> Topology:
        """Build from the host name of each rank: nodes are numbered as they first appear."""
        number = {host: node for node, host in enumerate(dict.fromkeys(hosts))}
        return cls(tuple(number[host] for host in hosts))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], num_ranks: int | None = None) -> Topology:
        """Build from the `topology` part of a cluster file (see `read_cluster`).

        Args:
            values: `ranks_per_node` (an int, or a list with one entry a node), and the link
                classes `intra_node` and `inter_node`, each with `bytes_per_s` and `latency_s`.
            num_ranks: R; needed where `ranks_per_node` is an int and `num_nodes` is not given.
        """
        sizes = values["ranks_per_node"]
        links = {
            name: LinkClass(**{key: float(value) for key, value in values[name].items()})
            for name in ("intra_node", "inter_node")
            if name in values
        }
        if isinstance(sizes, int):
            if num_ranks is None:
                num_ranks = sizes * int(values.get("num_nodes", 1))
            nodes = tuple(rank // sizes for rank in range(num_ranks))
        else:
            nodes = tuple(node for node, size in enumerate(sizes) for _ in range(size))
            if num_ranks is not None and len(nodes) != num_ranks:
                raise ValueError(
                    f"ranks_per_node {sizes} describes {len(nodes)} ranks, not {num_ranks}"
                )
        return cls(nodes, **links)

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.node_of_rank)

    @cached_property
    def num_nodes(self) -> int:
        """How many nodes."""
        return max(self.node_of_rank) + 1

    @cached_property
    def node_R(self) -> Int64Array:
        """(R,) int64, `node_of_rank` as an array."""
        node_R = np.array(self.node_of_rank, dtype=np.int64)
        node_R.setflags(write=False)
        return node_R


def read_cluster(path: str | Path) -> dict[str, Any]:
    """Read a cluster file (`configs/clusters/*.yaml`).

    Returns:
        The file's mapping. Its parts `topology` and `compute` are what `Topology.from_mapping`
        and `cost.ComputeRate.from_mapping` take.

    Raises:
        ValueError: if there is no such file, it is not a mapping with a `topology`, or a number in
            it cannot be.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no cluster file {path}")
    values = read_yaml(path)
    check_cluster(values, path)
    return dict(values)


def read_topology(path: str | Path, num_ranks: int | None = None) -> Topology:
    """Read the topology of a cluster file, for `num_ranks` ranks if the file leaves that open."""
    return Topology.from_mapping(read_cluster(path)["topology"], num_ranks)

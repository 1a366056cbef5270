"""Topologies from numbers, hosts and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fssdp.planning.cost import ComputeRate
from megatron_fssdp.planning.topology import LinkClass, Topology, read_cluster, read_topology

CLUSTERS = Path(__file__).parents[2] / "configs" / "clusters"


def test_uniform_and_ragged():
    assert Topology.uniform(5, 2).node_of_rank == (0, 0, 1, 1, 2)
    assert Topology.uniform(3).num_nodes == 1
    assert Topology.from_hosts(["b", "a", "b"]).node_of_rank == (0, 1, 0)


def test_wrong_numbers_are_named():
    with pytest.raises(ValueError, match=r"numbered 0\.\.1"):
        Topology((0, 2))
    with pytest.raises(ValueError, match="at least one rank"):
        Topology(())
    with pytest.raises(ValueError, match="cannot be"):
        LinkClass(bytes_per_s=0.0, latency_s=0.0)
    with pytest.raises(ValueError, match="3 ranks, not 4"):
        Topology.from_mapping({"ranks_per_node": [1, 2]}, num_ranks=4)


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_cluster_file_reads(path):
    topology = read_topology(path, num_ranks=16)
    assert topology.num_ranks == 16
    assert topology.intra_node.bytes_per_s > 0
    assert ComputeRate.from_mapping(read_cluster(path)["compute"]).flops_per_s > 0


def test_ragged_file(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("topology:\n  ranks_per_node: [2, 1]\n")
    assert read_topology(path).node_of_rank == (0, 0, 1)
    path.write_text("name: x\n")
    with pytest.raises(ValueError, match="no 'topology'"):
        read_cluster(path)


def test_time_of_a_link():
    link = LinkClass(bytes_per_s=1e9, latency_s=1e-6)
    assert link.time_s(1000) == pytest.approx(2e-6)

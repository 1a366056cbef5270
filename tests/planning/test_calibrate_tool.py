"""`fssdp calibrate`: what it writes can be read, alone and with several ranks."""

from __future__ import annotations

import pytest

from megatron_fssdp.planning.cost import ComputeRate
from megatron_fssdp.planning.topology import NETWORK, LinkClass, read_cluster, read_topology
from megatron_fssdp.simulation.cluster import load_cluster
from megatron_fssdp.tools.calibrate import _targets, calibrate, count_adapters
from tests.ranks import run_ranks

SIZES = {"hidden_size": 32, "ffn_size": 16, "rows": (1, 8), "large_bytes": 1 << 16}


def calibrate_rank(folder):
    return calibrate(f"{folder}/cluster.yaml", **SIZES)


def test_two_ranks_measure_their_link(tmp_path):
    run_ranks(2, calibrate_rank, str(tmp_path))
    values = read_cluster(tmp_path / "cluster.yaml")
    assert values["measured"] == ["compute", "intra_node"]
    topology = read_topology(tmp_path / "cluster.yaml")
    assert topology.node_of_rank == (0, 0)
    assert topology.intra_node.bytes_per_s > 0
    assert topology.inter_node == NETWORK
    rate = ComputeRate.from_mapping(values["compute"])
    assert [rows for rows, _ in rate.rate_by_rows] == [1, 8]
    assert rate.memory_bytes_per_s == values["compute"]["memory_bytes_per_s"] > 0
    assert rate.flops_per_s == max(rate for _, rate in rate.rate_by_rows)
    # What the simulator reads besides.
    cluster = load_cluster(tmp_path / "cluster.yaml")
    assert (cluster.ranks_per_node, cluster.has_fused_kernels) == (2, False)
    assert isinstance(values["compute"]["cores_copy"], bool)
    assert 0 < cluster.memory_bytes_per_s < 1e13


def test_ranks_send_to_all_of_their_node_and_to_their_like_in_the_next():
    hosts = ["a", "a", "b", "b", "b"]
    assert _targets(hosts, "intra_node") == [[1], [0], [3, 4], [2, 4], [2, 3]]
    assert _targets(hosts, "inter_node") == [[2], [3], [0], [1], []]


@pytest.mark.parametrize(
    ("num_ranks", "together", "adapters"),
    # 100 alone: 8 ranks have an adapter each, two one, all one; a busy link is no sharing.
    [
        (8, 99, 8),
        (8, 51, 4),
        (8, 13, 1),
        (8, 80, 8),
        (2, 70, 1),
        (2, 80, 2),
        (3, 40, 1),
        (1, 90, 1),
    ],
)
def test_a_pair_alone_tells_shared_adapters(num_ranks, together, adapters):
    assert count_adapters(num_ranks, 100.0, together) == adapters


def test_one_process_asks_for_a_local_link(tmp_path, monkeypatch):
    """The two processes that measure it are left out here: they take seconds to import torch."""
    link = LinkClass(bytes_per_s=1e9, latency_s=1e-6)
    monkeypatch.setattr("megatron_fssdp.tools.calibrate._measure_local_link", lambda _: link)
    values = calibrate(tmp_path / "cluster.yaml", name="here", **SIZES)
    assert values["name"] == "here"
    topology = read_topology(tmp_path / "cluster.yaml")
    assert topology.num_ranks == 1
    assert topology.inter_node == NETWORK

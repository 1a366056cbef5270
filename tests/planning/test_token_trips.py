"""Tokens to the shards of an expert, both ways, by hand."""

from __future__ import annotations

import pytest

from megatron_fssdp.planning.cost import ComputeRate, LayerShape
from megatron_fssdp.planning.token_trips import TokenTrip, token_trip
from megatron_fssdp.planning.topology import LinkClass, Topology

# 10 bytes a row.
SHAPE = LayerShape(hidden_size=5, ffn_size=4, num_shards=2)
RATE = ComputeRate(flops_per_s=1.0, memory_bytes_per_s=1000.0)
NEAR, FAR = (
    LinkClass(bytes_per_s=100.0, latency_s=1.0),
    LinkClass(bytes_per_s=10.0, latency_s=2.0),
)


def _topology(*nodes: int) -> Topology:
    return Topology(nodes, intra_node=NEAR, inter_node=FAR)


def test_one_node_by_hand() -> None:
    """2 ranks, 2 shards each, 8 rows: 12 rows leave a rank in either schedule.

    Megatron: 4 rows to the other rank (1 + 0.4 s), then 8 to the other shard (1 + 0.8 s). Fused: 12
    rows at once (1 + 1.2 s), and 8 rows copied: read and written, 160 bytes (0.16 s).
    """
    topology = _topology(0, 0)
    stock = token_trip(8, topology, SHAPE, fused=False)
    assert stock == TokenTrip(near_bytes=40, far_bytes=0, shared_bytes=80)
    assert stock.time_s(topology, RATE) == pytest.approx(3.2)
    fused = token_trip(8, topology, SHAPE, fused=True)
    assert fused == TokenTrip(near_bytes=120, far_bytes=0, copied_bytes=80)
    assert fused.time_s(topology, RATE) == pytest.approx(2.36)
    assert fused.sent_bytes == stock.sent_bytes == 120


def test_two_nodes_by_hand() -> None:
    """4 ranks on 2 nodes, 2 shards each, 8 rows: the fused schedule crosses twice as often.

    Megatron: 2 rows to the other rank of the node, 4 to the other node (2 + 4 s), then 8 to the
    other shard (1 + 0.8 s). Fused: 4 + 2 rows near, 8 rows far (2 + 8 s), 8 rows copied (0.16 s).
    """
    topology = _topology(0, 0, 1, 1)
    stock = token_trip(8, topology, SHAPE, fused=False)
    assert stock == TokenTrip(near_bytes=20, far_bytes=40, shared_bytes=80)
    assert stock.time_s(topology, RATE) == pytest.approx(7.8)
    fused = token_trip(8, topology, SHAPE, fused=True)
    assert fused == TokenTrip(near_bytes=60, far_bytes=80, copied_bytes=80)
    assert fused.time_s(topology, RATE) == pytest.approx(10.16)
    assert fused.sent_bytes == stock.sent_bytes == 140


@pytest.mark.parametrize(("nodes", "rows", "is_fused"), [
    ((0, 0), 8, True),
    # One message less is worth 1 s, copies cost 2 x 10 bytes / 1000 bytes/s a row: equal at 50.
    ((0, 0), 49, True),
    ((0, 0), 51, False),
    # Twice the rows between nodes: 10 bytes a row at 10 bytes/s.
    ((0, 1), 1, True),
    ((0, 1), 8, False),
])  # fmt: skip
def test_the_choice_turns_where_the_numbers_say(
    nodes: tuple[int, ...], rows: int, is_fused: bool
) -> None:
    topology = _topology(*nodes)
    times = [
        token_trip(rows, topology, SHAPE, fused=fused).time_s(topology, RATE)
        for fused in (True, False)
    ]
    assert (times[0] < times[1]) == is_fused


def test_whole_experts_have_one_schedule() -> None:
    shape = LayerShape(hidden_size=5, ffn_size=4)
    topology = _topology(0, 0, 1, 1)
    fused, stock = (token_trip(8, topology, shape, fused=fused) for fused in (True, False))
    assert fused == stock == TokenTrip(near_bytes=20, far_bytes=40)

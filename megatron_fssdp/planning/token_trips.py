# SPDX-License-Identifier: Apache-2.0

"""How tokens reach the shards of an expert: bytes and seconds of two schedules.

With expert tensor parallelism every shard of an expert computes all of its tokens. Megatron sends a
token to one of them, and they share it (all-gather); on the way back they add their partial results
up (reduce-scatter), and one of them returns the sum. The fused schedule (Parm, arXiv 2407.00599)
sends a token to all shards at once, and adds the partial results up where the token came from.

Every byte that arrives is counted once in either: the same number, on other links. Megatron's takes
one more message; the fused one crosses between nodes once for each shard, and reads and writes
copies in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_fssdp.planning.cost import ComputeRate, LayerShape
from megatron_fssdp.planning.topology import Topology

# A copy is read and written.
COPY_PASSES = 2


@dataclass(frozen=True, kw_only=True)
class TokenTrip:
    """What a rank sends in one dispatch, or one combine: the rank that sends most.

    Attributes:
        near_bytes: in the all-to-all, inside its node.
        far_bytes: in the all-to-all, to other nodes.
        shared_bytes: what the shards send each other besides, inside the node.
        copied_bytes: additional copies, in memory.
    """

    near_bytes: float
    far_bytes: float
    shared_bytes: float = 0.0
    copied_bytes: float = 0.0

    @property
    def sent_bytes(self) -> float:
        """All that the rank sends."""
        return self.near_bytes + self.far_bytes + self.shared_bytes

    def time_s(self, topology: Topology, rate: ComputeRate) -> float:
        """Seconds: both classes of links at once, then what is shared, then copies."""
        seconds = 0.0
        links = ((self.near_bytes, topology.intra_node), (self.far_bytes, topology.inter_node))
        for num_bytes, link in links:
            if num_bytes:
                seconds = max(seconds, link.time_s(num_bytes))
        if self.shared_bytes:
            seconds += topology.intra_node.time_s(self.shared_bytes)
        return seconds + COPY_PASSES * self.copied_bytes / rate.memory_bytes_per_s


def token_trip(rows: int, topology: Topology, shape: LayerShape, *, fused: bool) -> TokenTrip:
    """Count the bytes of a trip of tokens that are spread evenly over the ranks.

    Args:
        rows: what a rank sends: its tokens times the experts of each.
        topology: the expert-parallel ranks; the shards of each are on its node.
        shape: sizes of the layer, with its shards.
        fused: the fused schedule, else Megatron's.

    Example: 2 ranks on one node, 2 shards each, 8 rows. Megatron: 4 rows leave the rank in the
    all-to-all, and its shard sends all 8 that it received to the other: 12. Fused: of 2 x 8 rows
    the own 4 stay: 12.
    """
    num_bytes, num_ranks = rows * shape.row_bytes, topology.num_ranks
    others = shape.num_shards - 1
    smallest_node = int(np.bincount(topology.node_R).min())
    far = num_bytes * (num_ranks - smallest_node) / num_ranks
    # Ranks of larger nodes send more inside, fewer bytes between: one rank stands for all.
    near = num_bytes * (smallest_node - 1) / num_ranks
    if not fused:
        return TokenTrip(near_bytes=near, far_bytes=far, shared_bytes=others * num_bytes)
    own = num_bytes / num_ranks
    return TokenTrip(
        near_bytes=shape.num_shards * near + others * own,
        far_bytes=shape.num_shards * far,
        copied_bytes=others * num_bytes,
    )

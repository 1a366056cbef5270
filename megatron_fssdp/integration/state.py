# SPDX-License-Identifier: Apache-2.0

"""What the runtime keeps of each MoE layer, and of each expert-parallel group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from megatron_fssdp.experts.materialize import Materializer
from megatron_fssdp.experts.replicas import ReplicaPool, Transport
from megatron_fssdp.integration.ownership import Ownership
from megatron_fssdp.integration.records import Calibration, Traffic
from megatron_fssdp.integration.step import LayerStep
from megatron_fssdp.planning.cost import ComputeRate, LayerShape
from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.topology import Topology


@dataclass(eq=False)
class GroupState:
    """What the layers of one expert-parallel group share."""

    topology: Topology
    rate: ComputeRate
    copy_group: dist.ProcessGroup | None = None
    transport: Transport | None = None
    # With --fssdp-rematerialize only.
    pools: dict[LayerShape, ReplicaPool] = field(default_factory=dict)
    # With expert tensor parallelism: whether layers dispatch by the fused schedule, once known.
    is_fused: dict[LayerShape, bool] = field(default_factory=dict)


@dataclass(eq=False)
class LayerState:
    """One MoE layer of this process."""

    name: str
    num_experts: int
    group: dist.ProcessGroup
    # The expert-parallel and expert-tensor-parallel ranks: those that need the same plans.
    tp_ep_group: dist.ProcessGroup
    shared: GroupState
    shape: LayerShape | None
    # The layer's number in the model, from 1; 0 until it is told.
    number: int = 0
    # Both where quotas are made, on the host or the device; read once an iteration.
    counts_RE: torch.Tensor | None = None
    loads_R: torch.Tensor | None = None
    num_forwards: int = 0
    # (E,) int64, the loads that the latest plan was made for.
    predicted_E: Int64Array | None = None
    step: LayerStep | None = None
    # Where the layer's experts live, and which of its layers this is; None: only watched.
    ownership: Ownership | None = None
    position: int = 0
    resize: Callable[[int], None] | None = None
    materializer: Materializer | None = None
    calibrations: list[Calibration] = field(default_factory=list)

    @property
    def num_shards(self) -> int:
        """Ranks that share an expert (expert tensor parallelism)."""
        return self.tp_ep_group.size() // self.group.size()


def read_traffic(layer: LayerState) -> tuple[Traffic, Traffic]:
    """Read a layer's accounts, and start them anew."""
    each = layer.materializer
    if each is None:
        return Traffic(), Traffic()
    # Every shard's ranks send their own.
    of = partial(
        Traffic.of,
        node_of_rank=layer.shared.topology.node_of_rank,
        num_senders=layer.num_shards,
    )
    result = of(each.gathers, each.gather_meter), of(each.reductions, each.reduce_meter)
    each.gathers.clear()
    each.reductions.clear()
    return result


def replica_bytes(layers: Iterable[LayerState], groups: Iterable[GroupState]) -> int:
    """Memory of all pools and buffers."""
    materializers = [layer.materializer for layer in layers if layer.materializer]
    pools = {id(each.pool): each.pool for each in materializers}
    transports = [group.transport for group in groups if group.transport]
    pool_bytes = sum(pool.num_bytes for pool in pools.values())
    return pool_bytes + sum(transport.num_bytes for transport in transports)


def read_counts(layers: Sequence[LayerState]) -> tuple[list[Int64Array], list[Int64Array]]:
    """Copy all layers' counts and loads: from the device, if they are there, in one copy."""
    tensors = [layer.counts_RE for layer in layers] + [layer.loads_R for layer in layers]
    present = [tensor for tensor in tensors if tensor is not None]
    flat = torch.cat([tensor.reshape(-1) for tensor in present]).cpu()
    parts = flat.split([tensor.numel() for tensor in present])
    arrays = [part.view(of.shape).numpy() for part, of in zip(parts, present, strict=True)]
    return arrays[: len(layers)], arrays[len(layers) :]

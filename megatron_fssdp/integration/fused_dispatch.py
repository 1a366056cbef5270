# SPDX-License-Identifier: Apache-2.0

"""One all-to-all over EP x ETP: Parm's fused schedule, out of Megatron's own dispatcher.

With expert tensor parallelism Megatron sends a token over EP and gathers it over ETP, and the
reverse. If the dispatcher takes each shard of an expert for an expert of its own, on a rank of its
own, and every token for one that chose all shards, then its all-to-all goes over EP x ETP, and
its last step, which adds a token's results up, adds the shards' partial results up as well.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fssdp.integration.state import LayerState
from megatron_fssdp.planning.token_trips import token_trip


class FusedAlltoAllDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher, over expert and expert tensor parallelism at once."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Take what the stock dispatcher takes, and give it groups in which shards count."""
        self.num_shards = pg_collection.expt_tp.size()
        groups = ProcessGroupCollection()
        groups.ep = groups.tp_ep = pg_collection.tp_ep
        groups.expt_tp = None
        config = copy.copy(config)
        config.num_moe_experts *= self.num_shards
        config.moe_router_topk *= self.num_shards
        first = groups.ep.rank() * num_local_experts
        indices = list(range(first, first + num_local_experts))
        super().__init__(num_local_experts, indices, config=config, pg_collection=groups)

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> Any:
        """Route each token to all shards of its experts, then prepare as stock does."""
        routing_map, probs = self._to_shards(routing_map), self._to_shards(probs)
        return super().dispatch_preprocess(hidden_states, routing_map, probs)

    def _to_shards(self, values: torch.Tensor) -> torch.Tensor:
        """(tokens, ranks * slots) to (tokens, ranks * shards * slots); backward adds shards up."""
        by_rank = values.view(len(values), -1, 1, self.num_local_experts)
        return by_rank.expand(-1, -1, self.num_shards, -1).reshape(len(values), -1)


def choose_fused(layer: LayerState, num_rows: int, device: torch.device) -> bool:
    """Choose a layer's schedule by the cost model, at its first forward. Collective over EP x ETP.

    The first layer of a shape chooses for all: it is asked once, and waits for the device.

    Args:
        layer: which.
        num_rows: tokens of this rank, times the experts of each; the largest of all ranks counts.
        device: where the layer computes.
    """
    shape, shared = layer.shape, layer.shared
    assert shape is not None, "a layer that is only watched dispatches nothing"
    if shape in shared.is_fused:
        return shared.is_fused[shape]
    most = torch.tensor([num_rows], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=layer.tp_ep_group)
    fused_s, stock_s = (
        token_trip(int(most.item()), shared.topology, shape, fused=fused).time_s(
            shared.topology, shared.rate
        )
        for fused in (True, False)
    )
    shared.is_fused[shape] = fused_s < stock_s
    is_first = parallel_state.get_expert_data_parallel_rank() == 0
    if is_first and layer.tp_ep_group.rank() == 0:
        chosen = "fused" if shared.is_fused[shape] else "megatron"
        print(
            f" fssdp: {layer.name} and its like dispatch by --fssdp-etp-schedule {chosen}: "
            f"modelled {1e3 * stock_s:.3f} ms one way with megatron, {1e3 * fused_s:.3f} ms fused",
            flush=True,
        )
    return shared.is_fused[shape]

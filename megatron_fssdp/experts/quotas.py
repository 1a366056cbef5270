"""Quotas on the device: `planning.quotas` in torch operations, equal to the token.

Static shapes, no host synchronisation: nothing here asks the device for a number. Whole-number
sums only, so the order in which a device adds does not matter, and every rank gets the same.

Shape letters as in `planning.quota_tables`: R ranks, E experts, I instances of an expert, X
replicated experts, N their instances in one list, V nodes of the graph of ranks and experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_fssdp.planning.equalize import PASSES, SPREADS
from megatron_fssdp.planning.plan import LayerPlan
from megatron_fssdp.planning.quota_tables import Forest, quota_tables
from megatron_fssdp.planning.quotas import GOOD_ENOUGH_SHIFT

# Turns of every forest: with drift of up to 10 % between plan and counts this is within 0.4 % of
# the optimum on average. Equal to `balance(..., turns=DEVICE_TURNS)`.
DEVICE_TURNS = 2

_divide = partial(torch.div, rounding_mode="floor")


@dataclass(frozen=True, eq=False)
class DeviceForest:
    """A `quota_tables.Forest` on the device, with two constants of its walk."""

    preorder_R: Tensor
    from_N: Tensor
    to_N: Tensor
    sign_N: Tensor
    parent_V: Tensor
    parent_edge_V: Tensor
    node_V: Tensor
    position_R: Tensor
    doublings: int


@dataclass(frozen=True, eq=False)
class DeviceQuotas:
    """A layer's plan as device tables for `split_tokens`. Build one per plan and layer.

    Attributes are those of `QuotaTables`, on the device, and:
        column_X1: (X, I) flat index into (E, I) of each instance would be ragged; instead
            `flat_N`: (N,) the flat index of each instance in an (E, I) tensor.
        by_node: ranks in the order of their nodes, and where each node begins, on the host.
    """

    num_ranks: int
    num_experts: int
    num_instances: int
    num_nodes: int
    node_of_rank: tuple[int, ...]
    by_node: tuple[int, ...]
    owner_E: Tensor
    single_E: Tensor
    expert_X: Tensor
    rank_N: Tensor
    expert_N: Tensor
    column_N: Tensor
    first_X: Tensor
    count_X: Tensor
    busy_N: Tensor
    node_R: Tensor
    node_N: Tensor
    peers_N: Tensor
    by_node_N: Tensor
    place_N: Tensor
    group_start_N: Tensor
    by_node_R: Tensor
    number_N: Tensor
    flat_N: Tensor
    forests: tuple[DeviceForest, ...]

    @classmethod
    def build(
        cls, plan: LayerPlan, node_of_rank: Sequence[int], device: torch.device | str
    ) -> DeviceQuotas:
        """Copy a plan's tables to the device, without waiting for it."""
        tables = quota_tables(plan, node_of_rank)
        send = partial(_send, device=torch.device(device))
        num_slots = len(tables.rank_N)
        place_N = np.empty(num_slots, dtype=np.int64)
        place_N[tables.by_node_N] = np.arange(num_slots)
        width = plan.instance_rank_EI.shape[1]
        flat_N = tables.expert_X[tables.expert_N] * width + tables.column_N
        names = {field.name for field in fields(cls)} & {field.name for field in fields(tables)}
        shared = {
            name: send(getattr(tables, name))
            for name in names
            if isinstance(getattr(tables, name), np.ndarray)
        }
        return cls(
            num_ranks=plan.num_ranks,
            num_experts=plan.num_experts,
            num_instances=width,
            num_nodes=int(tables.node_R.max()) + 1,
            node_of_rank=tuple(node_of_rank),
            by_node=tuple(tables.by_node_R.tolist()),
            place_N=send(place_N),
            number_N=send(np.arange(num_slots)),
            flat_N=send(flat_N),
            forests=tuple(_send_forest(forest, send) for forest in tables.forests),
            **shared,
        )

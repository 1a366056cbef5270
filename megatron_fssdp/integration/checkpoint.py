# SPDX-License-Identifier: Apache-2.0

"""Checkpoints that know nothing of owners: every expert under its own key and offset.

Megatron describes each parameter of a rank by a key and an offset in the global tensor, as plain
expert parallelism places experts. A home may hold another expert, of another layer: its entry then
takes that expert's description, and keeps its own name, tensor and replica. The optimizer finds a
parameter's description by the parameter, so its state follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_fssdp.integration.ownership import Ownership

Entry = Any  # a ShardedTensor, or a ShardedTensorFactory that builds some


def describe_experts(state: dict[str, Any], ownerships: Sequence[Ownership]) -> dict[str, Any]:
    """Correct a model chunk's sharded state for where experts are.

    Args:
        state: as Megatron's `sharded_state_dict` returned it; changed in place.
        ownerships: of the chunk's layers.

    Raises:
        RuntimeError: a parameter of an expert is not in the state.
    """
    name_of = {
        id(entry.data): name
        for name, entry in state.items()
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
    for ownership in ownerships:
        _describe(state, name_of, ownership)
    return state


def _describe(state: dict[str, Any], name_of: dict[int, str], ownership: Ownership) -> None:
    per_layer = ownership.homes_per_layer
    first = ownership.rank * per_layer
    found = [
        [_find(name_of, weight) for weight in ownership.weights(home)]
        for home in range(ownership.num_homes)
    ]
    stock: dict[str, Entry] = {name: state[name] for names in found for name in names}
    for home, (layer, expert) in enumerate(ownership.homes.expert_of(ownership.rank).tolist()):
        if (layer, expert) == (home // per_layer, first + home % per_layer):
            continue
        # The layer's own first home shows how its experts are described; its expert is `first`.
        for mine, its in zip(found[home], found[layer * per_layer], strict=True):
            state[mine] = _redirect(stock[its], stock[mine], first, expert)


def _find(name_of: dict[int, str], weight: torch.nn.Parameter) -> str:
    if id(weight) not in name_of:
        raise RuntimeError(
            "a checkpoint of a model with moved experts misses a parameter of an expert: this "
            "version of megatron-core describes parameters in another way; save with "
            "--fssdp-reshard-interval 0"
        )
    return name_of[id(weight)]


def _redirect(like: Entry, mine: Entry, shown: int, expert: int) -> Entry:
    """Return the description of `expert`, made from that of expert `shown`, for my tensor."""
    key = like.key.replace(f".experts.{shown}.", f".experts.{expert}.")
    by_offset = key == like.key
    if isinstance(like, ShardedTensor):
        moved = _shift(like, expert - shown) if by_offset else like
        return replace(moved, key=key, data=mine.data, replica_id=mine.replica_id)
    stock_build = like.build_fn

    def build(name: str, tensor: Any, replica_id: Any, flattened_range: Any) -> Any:
        parts = stock_build(name, tensor, replica_id, flattened_range)
        return [_shift(part, expert - shown) for part in parts] if by_offset else parts

    return replace(like, key=key, data=mine.data, replica_id=mine.replica_id, build_fn=build)


def _shift(tensor: ShardedTensor, experts: int) -> ShardedTensor:
    """Move a description along the axis of experts: the last that Megatron prepended."""
    offset = list(tensor.global_offset)
    offset[tensor.prepend_axis_num - 1] += experts
    return replace(tensor, global_offset=tuple(offset))

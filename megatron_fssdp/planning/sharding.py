"""Sharding: which rank owns each expert's parameters and optimizer state."""

from __future__ import annotations

import numpy as np

from megatron_fssdp.planning.plan import Int64Array


def shard_evenly(num_layers: int, num_experts: int, num_ranks: int) -> Int64Array:
    """Return Megatron's own layout: expert e is owned by rank e // (E / R), in every layer.

    Returns:
        (L, E) int64. `shard_evenly(1, 4, 2)` is `[[0, 0, 1, 1]]`.

    Raises:
        ValueError: if E is not a multiple of R.
    """
    if num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(
            f"{num_experts} experts cannot be owned evenly by {num_ranks} ranks: "
            "choose an expert-parallel size that divides the number of experts"
        )
    owner_E = np.arange(num_experts, dtype=np.int64) // (num_experts // num_ranks or 1)
    return np.tile(owner_E, (num_layers, 1))

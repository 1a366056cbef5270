# SPDX-License-Identifier: Apache-2.0

"""Which parameters hold which expert: homes, and who lives there.

[Note: Contents move, parameters stay] All experts of a model chunk have the same shapes, and every
rank owns the same number of them in total. So a rank's parameters are homes: each may hold any
expert of any layer. Re-sharding moves contents between homes. Parameter objects, their names, DDP's
buckets and the optimizer's buffers never change; only this table does, and a checkpoint is written
by it (see `checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_fssdp.planning.moves import Homes
from megatron_fssdp.planning.plan import Int64Array


@dataclass(frozen=True, eq=False)
class LayerHomes:
    """The homes that one layer's stock experts module has.

    Attributes:
        experts: the module.
        weights: the W parameters of its home of a number, as they are now.
    """

    experts: torch.nn.Module
    weights: Callable[[int], list[torch.nn.Parameter]]


@dataclass(eq=False)
class Ownership:
    """The homes of this rank in L layers, and the experts in them.

    Attributes:
        homes: who lives where, on all ranks.
        rank: this rank, in the expert-parallel group.
        layers: the homes of each layer's module, E / R each, numbered layer by layer.
        is_due: whether it is time to look at the owners again.
        start_LE: (L, E) int64 owners to take before the first forward, whatever they save.
    """

    homes: Homes
    rank: int
    layers: list[LayerHomes]
    is_due: bool = False
    start_LE: Int64Array | None = None

    @property
    def owner_LE(self) -> Int64Array:
        """(L, E) int64, the owner of each expert."""
        return self.homes.owner_LE

    @property
    def homes_per_layer(self) -> int:
        """E / R."""
        return self.homes.owner_LE.size // self.homes.num_ranks // len(self.layers)

    @property
    def num_homes(self) -> int:
        """H, homes of a rank."""
        return self.homes_per_layer * len(self.layers)

    def weights(self, home: int) -> list[torch.nn.Parameter]:
        """Return the W parameters of a home, as they are now."""
        position, index = divmod(home, self.homes_per_layer)
        return self.layers[position].weights(index)

    def owned_weights(self, position: int) -> list[list[torch.nn.Parameter]]:
        """Return the parameters of a layer's experts that live here, experts ascending."""
        return [self.weights(home) for _, home in self.homes.owned(position, self.rank)]

    def hosts(self, position: int) -> Iterable[torch.nn.Module]:
        """Return the experts modules whose parameters hold a layer's experts."""
        homes = [home for _, home in self.homes.owned(position, self.rank)]
        return [self.layers[p].experts for p in sorted({h // self.homes_per_layer for h in homes})]

    def most_owned(self, position: int) -> int:
        """The most experts of a layer that one rank owns."""
        return int(np.bincount(self.homes.owner_LE[position]).max())

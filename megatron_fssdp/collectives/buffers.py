# SPDX-License-Identifier: Apache-2.0

"""Memory that is taken once and used in every iteration."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class RowBuffer:
    """Rows of one size, one expert each, that grow to the most that was ever asked for."""

    def __init__(self) -> None:
        self._rows: torch.Tensor | None = None

    def rows(
        self, count: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        """Return `count` rows of `size` elements. They hold what the last use left there."""
        held = self._rows
        fits = held is not None and (held.shape[1], held.dtype, held.device) == (
            size,
            dtype,
            device,
        )
        if held is None or not fits or len(held) < count:
            self._rows = held = torch.empty(count, size, dtype=dtype, device=device)
        # .data: views without a common version counter. A view that autograd has saved must not
        # be found stale because a later iteration, or another layer, has written to the memory:
        # the owner of the buffer sees to it that the right values are back before they are read.
        return [row.data for row in held[:count].unbind(0)]

    def rows_like(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return as many rows as these, like them."""
        if not rows:
            return []
        first = rows[0]
        return self.rows(len(rows), first.numel(), first.dtype, first.device)

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return 0 if self._rows is None else self._rows.numel() * self._rows.element_size()

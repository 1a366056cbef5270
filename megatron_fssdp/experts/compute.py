# SPDX-License-Identifier: Apache-2.0

"""A linear layer over slot weights, for rows grouped by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class RowGroups:
    """How rows are grouped by slot: slot 0's rows first, then slot 1's, and so on.

    Attributes:
        counts_S: (S,) int64 on the host, rows of each slot, as Megatron's dispatchers return them.
        device: where the rows are.
    """

    counts_S: torch.Tensor
    device: torch.device

    @cached_property
    def offsets_S(self) -> torch.Tensor:
        """(S,) int32 on the device, the end of each slot's rows."""
        return self.counts_S.cumsum(0).to(torch.int32).to(self.device, non_blocking=True)

    @cached_property
    def counts_on_device_S(self) -> torch.Tensor:
        """(S,) int64 on the device."""
        return self.counts_S.to(self.device, non_blocking=True)

    def spread(self, values_SN: torch.Tensor) -> torch.Tensor:
        """Give each row its slot's vector: (S, N) to (M, N)."""
        num_rows = int(self.counts_S.sum())
        return values_SN.repeat_interleave(self.counts_on_device_S, dim=0, output_size=num_rows)


def grouped_linear(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], groups: RowGroups
) -> torch.Tensor:
    """Multiply each slot's rows with its weight: row @ weight.T.

    On CUDA in bf16 this is one grouped GEMM, elsewhere a loop over the slots: on CPUs torch's
    grouped GEMM is that very loop, bit for bit, and would need a stacked copy of the weights.
    Slots without rows are fine, forward and backward; their weight gradients are zero.

    Args:
        rows: (M, K), grouped by slot; no row beyond the last slot.
        weights: S tensors (N, K).
        groups: the rows' grouping.

    Returns:
        (M, N).
    """
    if rows.shape[0] and has_grouped_gemm(rows, weights[0]):
        output: torch.Tensor = _GroupedLinear.apply(groups, rows, *weights)
        return output
    if len(weights) == 1:
        return rows @ weights[0].t()
    parts = rows.split(groups.counts_S.tolist())
    return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])


class _GroupedLinear(torch.autograd.Function):
    """The grouped GEMM. Keeps the slots' weights for the backward, not the stack made of them."""

    @staticmethod
    def forward(
        ctx: Any, groups: RowGroups, rows: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.groups = groups
        ctx.save_for_backward(rows, *weights)
        stack_SKN = torch.stack(weights).transpose(1, 2)
        return torch.nn.functional.grouped_mm(rows, stack_SKN, offs=groups.offsets_S)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad, offsets_S = grads[0].contiguous(), ctx.groups.offsets_S
        rows, *weights = ctx.saved_tensors
        grouped_mm = torch.nn.functional.grouped_mm
        grad_rows = grouped_mm(grad, torch.stack(weights), offs=offsets_S)
        grad_SKN = grouped_mm(rows.t(), grad, offs=offsets_S)
        return None, grad_rows, *grad_SKN.transpose(1, 2).unbind(0)


def has_grouped_gemm(rows: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    """Whether a grouped GEMM pays for these tensors, and takes them: rows of whole 16 bytes."""
    aligned = all(length * rows.element_size() % 16 == 0 for length in weight_NK.shape)
    is_bf16 = rows.dtype == weight_NK.dtype == torch.bfloat16
    return rows.device.type == "cuda" and is_bf16 and aligned

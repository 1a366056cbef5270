"""A linear layer over stacked slot weights, for rows grouped by slot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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


def grouped_linear(rows: torch.Tensor, weight_SNK: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """Multiply each slot's rows with its weight: row @ weight.T.

    One grouped GEMM where torch has one for these tensors, else a loop over the slots; on CPUs
    both give the same bits. Slots without rows are fine, forward and backward; their weight
    gradients are zero.

    Args:
        rows: (M, K), grouped by slot; no row beyond the last slot.
        weight_SNK: (S, N, K).
        groups: the rows' grouping.

    Returns:
        (M, N).
    """
    if rows.shape[0] and _has_grouped_gemm(rows, weight_SNK):
        return torch.nn.functional.grouped_mm(
            rows, weight_SNK.transpose(1, 2), offs=groups.offsets_S
        )
    parts = rows.split(groups.counts_S.tolist())
    weights = weight_SNK.unbind(0)
    return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])


def _has_grouped_gemm(rows: torch.Tensor, weight_SNK: torch.Tensor) -> bool:
    """Whether `grouped_mm` takes these: its dtypes, and strides of whole 16 bytes."""
    dtypes = [torch.bfloat16]
    if rows.device.type == "cpu":
        dtypes += [torch.float32, torch.float16]
    if rows.dtype not in dtypes or weight_SNK.dtype != rows.dtype:
        return False
    lengths = (*rows.shape[1:], *weight_SNK.shape[1:], weight_SNK.stride(0))
    aligned = all(length * rows.element_size() % 16 == 0 for length in lengths)
    return aligned and weight_SNK.data_ptr() % 16 == 0

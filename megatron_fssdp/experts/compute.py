"""A linear layer over stacked slot weights, for rows grouped by slot."""

from __future__ import annotations

import torch


def grouped_linear(
    rows: torch.Tensor,
    weight_SNK: torch.Tensor,
    offsets_S: torch.Tensor,
) -> torch.Tensor:
    """Multiply each slot's rows with its weight: row @ weight.T.

    Slots without rows are fine, forward and backward; their weight gradients are zero.

    Args:
        rows: (M, K), rows of slot 0 first, then of slot 1, and so on; no row beyond the last slot.
        weight_SNK: (S, N, K), row strides multiples of 16 bytes.
        offsets_S: (S,) int32 on the rows' device, the end of each slot's rows.

    Returns:
        (M, N).
    """
    if rows.shape[0] == 0:
        # Keep the graph (every rank runs the same backward) without calling kernels on nothing.
        return rows @ weight_SNK[0].t() + 0 * weight_SNK.sum()
    return torch.nn.functional.grouped_mm(rows, weight_SNK.transpose(1, 2), offs=offsets_S)

# SPDX-License-Identifier: Apache-2.0

"""An expert's weights as one row of bytes: a copy is one message, whatever they are made of.

[Note: Quantized weights travel quantized] Transformer Engine's fp8 parameters are tensors in name:
behind them are the quantized data and their scales. Those travel, so that a replica has the bits of
its owner; a second quantization of what the first made has not. Data that TE derives from others
(a transpose) stays at home. The tensors of a row are views of it, rebuilt by the class of the
weight that they are like.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

# Bytes; what the kernels that read weights ask for.
_ALIGNMENT = 16
# What TE makes of the other data, where and when it needs it.
_TRANSPOSE = ("data_transpose",)


def is_quantized(weight: torch.Tensor) -> bool:
    """Whether a weight is one of TE's quantized tensors."""
    return hasattr(weight, "get_metadata")


def packed_bytes(weights: Sequence[torch.Tensor]) -> int:
    """Return the bytes of an expert's row."""
    return sum(_padded_bytes(piece) for weight in weights for _, piece in _pieces(weight))


def pack(row: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """Lay an expert's weights end to end in a row of `packed_bytes` uint8."""
    pieces = [piece for weight in weights for _, piece in _pieces(weight)]
    for place, piece in zip(_places(row, weights), pieces, strict=True):
        place.copy_(piece)


def unpack(row: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors like these on the memory of a row that `pack` filled, or will fill."""
    places = _places(row, like)
    return [_rebuild(weight, [next(places) for _ in _pieces(weight)]) for weight in like]


def _pieces(weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Name the tensors that a weight is made of, without those that are derived."""
    if not is_quantized(weight):
        return [("", weight.detach())]
    metadata = _metadata(weight)
    # Blocks of 128 x 128 are scaled as one in both directions.
    derived = (*_TRANSPOSE, "columnwise_") if metadata.get("is_2D_scaled") else _TRANSPOSE
    return [
        (name, value)
        for name, value in metadata.items()
        if isinstance(value, torch.Tensor) and not name.startswith(derived)
    ]


def _padded_bytes(piece: torch.Tensor) -> int:
    return -(-piece.numel() * piece.element_size() // _ALIGNMENT) * _ALIGNMENT


def _places(row: torch.Tensor, weights: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """View a row as the pieces of weights like these."""
    start = 0
    for weight in weights:
        for _, piece in _pieces(weight):
            end = start + piece.numel() * piece.element_size()
            yield row[start:end].view(piece.dtype).view(piece.shape)
            start += _padded_bytes(piece)


def _rebuild(weight: torch.Tensor, pieces: list[torch.Tensor]) -> torch.Tensor:
    if not is_quantized(weight):
        return pieces[0]
    metadata = _metadata(weight)
    arguments = {
        name: None if isinstance(value, torch.Tensor) else value for name, value in metadata.items()
    }
    arguments.update(zip((name for name, _ in _pieces(weight)), pieces, strict=True))
    kind: Any = type(weight.data)
    made: torch.Tensor = kind(
        shape=weight.shape, dtype=weight.dtype, device=weight.device, **arguments
    )
    return made


def _metadata(weight: Any) -> dict[str, Any]:
    """Return what TE would construct a quantized tensor from."""
    return dict(weight.get_metadata())

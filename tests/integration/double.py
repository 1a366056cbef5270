"""Megatron in fp64: what it calls fp32 is double here, so that only faults are larger than 1e-12.

Megatron computes the loss, the router's softmax, gradient buffers and norms in fp32 by name
(`torch.float32`, `.float()`). Within `in_double` those names mean float64, in this process alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def in_double() -> Iterator[None]:
    """Let fp32 mean fp64. Tensors that leave must be pickled after it ends."""
    names = ("float32", "float")
    stock = {name: getattr(torch, name) for name in names}
    stock_float, stock_type = torch.Tensor.float, torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = stock_type(self, *args, **options)
        # Megatron's optimizers sort parameters by comparing this string.
        return found.replace("Double", "Float") if isinstance(found, str) else found

    for name in names:
        setattr(torch, name, torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.Tensor.type = tensor_type  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        for name, dtype in stock.items():
            setattr(torch, name, dtype)
        torch.Tensor.float, torch.Tensor.type = stock_float, stock_type  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float32)

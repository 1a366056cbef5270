"""Stands in for Transformer Engine's compiled module; TE's own Python runs above it, on a CPU.

Real here: the enums whose members TE compares with its own at import, the grouped matrix product
that `GroupedLinear` calls, its fp8 formats (`fp8.py`), and the plain product that the router calls.
Every other name of the module is answered with an absent class: TE mentions some two hundred while
it is imported (in type hints, in tables of kernels), and a call of one fails with its name.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from tests.te_stub.fp8 import (
    bgrad_quantize,
    dequantize,
    fp8_transpose,
    fused_multi_row_padding,
    fused_multi_row_unpadding,
    is_quantized,
    quantize,
    split_quantize,
)

# `from transformer_engine_torch import *` must not ask for absent names.
__all__ = [
    "DType",
    "bgrad_quantize",
    "fp8_transpose",
    "fused_multi_row_padding",
    "fused_multi_row_unpadding",
    "generic_gemm",
    "get_num_cublas_streams",
    "quantize",
    "split_quantize",
    "te_general_grouped_gemm",
]


class DType(enum.IntEnum):
    """TE asserts that its own DType has the same members."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_TORCH_DTYPE = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


class NVTE_Fused_Attn_Backend(enum.IntEnum):  # noqa: N801
    """TE asserts that its own list of attention backends has the same members."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class _Absent(type):
    """A name that may be mentioned (its members too), but not called.

    A class, because TE writes some into type hints; `int`, because it copies enums by value.
    """

    def __getattr__(cls, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{cls.__name__}.{name}", (), {})

    def __int__(cls) -> int:
        return 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the stub of Transformer Engine has no {cls.__name__}")


def __getattr__(name: str) -> _Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name, (), {})


def get_num_cublas_streams() -> int:
    """Return how many workspaces TE shall keep for the grouped product."""
    return 1


def _product(A: torch.Tensor, transa: bool, B: torch.Tensor, transb: bool) -> torch.Tensor:
    """Return op(B) @ op(A): cuBLAS counts columns first. No row in common: zeros."""
    return (B.t() if transb else B) @ (A.t() if transa else A)


def generic_gemm(
    A: torch.Tensor,
    transa: bool,
    B: torch.Tensor,
    transb: bool,
    D: torch.Tensor | None,
    quantizer: None,
    out_dtype: DType,
    bias: torch.Tensor | None,
    *options: Any,
    **more_options: Any,
) -> tuple[torch.Tensor, None, None, None]:
    """Compute one product in `out_dtype`: the router's logits, and their gradients."""
    if D is not None or quantizer is not None:
        raise NotImplementedError("the stub's plain product has no given output and no quantizer")
    dtype = _TORCH_DTYPE[out_dtype]
    product = _product(A.to(dtype), transa, B.to(dtype), transb)
    return product if bias is None else product + bias, None, None, None


def te_general_grouped_gemm(
    A: list[torch.Tensor],
    transa: bool,
    B: list[torch.Tensor],
    transb: bool,
    D: list[torch.Tensor],
    D_type: int,
    m_splits: list[int],
    bias: list[torch.Tensor],
    bias_type: int,
    single_output: bool,
    pre_gelu_out: list[torch.Tensor],
    grad: bool,
    workspace: list[torch.Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[torch.Tensor]:
    """Compute D[i] = op(B[i]) @ op(A[i]) for each group, as the compiled function does.

    Forward (TN): A weights, B rows. Gradient of the rows (NN): A weights, B the rows' gradients.
    Gradient of the weights (NT): A rows, B the rows' gradients, and `bias` is an output. A group
    without rows gets zeros. With `single_output`, D is one tensor that holds all groups' rows.
    """
    if any(tensor.numel() for tensor in pre_gelu_out):
        raise NotImplementedError("the stub's grouped product has no GELU")
    outputs = D[0].split(m_splits) if single_output else D
    for a, b, out, group_bias in zip(A, B, outputs, bias, strict=True):
        if is_quantized(a) != is_quantized(b):
            raise TypeError(f"a product of {type(a).__name__} and {type(b).__name__}")
        # Of a quantized operand cuBLAS reads what is scaled along the dimension that is summed.
        a, b = dequantize(a, columnwise=not transa), dequantize(b, columnwise=transb)
        product = _product(a, transa, b, transb)
        if group_bias.numel() and grad:
            group_bias.copy_(b.sum(0))
        elif group_bias.numel():
            product += group_bias
        if accumulate:
            out.add_(product)
        else:
            out.copy_(product)
    return bias

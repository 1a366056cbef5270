"""Quantization on a CPU, for Transformer Engine's own fp8 tensors: real bytes, real rounding.

Tensorwise (current scaling), blockwise and MXFP8. TE's quantizers say which buffers a tensor has
and of which shapes; here they are filled, and read for a product. Scales are padded as on a GPU,
but not swizzled. A scale serves a block of the matrix:

              rows        columns     stored
    tensorwise  all         all         fp32
    blockwise   1 x 128     128 x 1     fp32; weights 128 x 128
    MXFP8       1 x 32      32 x 1      exponents
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch

_TORCH_FP8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
# cuBLAS wants fp8 matrices whose sides are multiples of 16, MXFP8 ones of its blocks.
_ALIGNMENT = {"Float8": 16, "Float8Block": 16, "MXFP8": 32}


def _fp8(dtype: Any) -> torch.dtype:
    return _TORCH_FP8[dtype.name]


def _family(thing: Any) -> str:
    """The format of a quantizer or of a quantized tensor."""
    name = type(thing).__name__
    if name.startswith("MXFP8"):
        return "MXFP8"
    if name.startswith("Float8Block"):
        return "Float8Block"
    if name in ("Float8CurrentScalingQuantizer", "Float8Tensor", "Float8TensorStorage"):
        return "Float8"
    raise NotImplementedError(f"the stub of Transformer Engine does not quantize by {name}")


def _block(family: str, shape: torch.Size, *, columnwise: bool, is_2d: bool) -> tuple[int, int]:
    """How many rows and columns share a scale."""
    if family == "Float8":
        return max(shape[0], 1), shape[1]
    side = 32 if family == "MXFP8" else 128
    if is_2d:
        return side, side
    return (side, 1) if columnwise else (1, side)


def _spread(scale: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Give each element of a matrix the scale of its block."""
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def _scale_inv(
    matrix: torch.Tensor, block: tuple[int, int], limit: float, *, power_of_2: bool
) -> torch.Tensor:
    """Return what each block's quantized values are multiplied with: largest element / limit."""
    rows, columns = (math.ceil(n / b) for n, b in zip(matrix.shape, block, strict=True))
    padded = matrix.new_zeros(rows * block[0], columns * block[1])
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix.abs()
    amax = padded.view(rows, block[0], columns, block[1]).amax(dim=(1, 3))
    scale_inv = torch.where(amax > 0, amax / limit, 1.0)
    return torch.exp2(torch.ceil(torch.log2(scale_inv))) if power_of_2 else scale_inv


def _is_transposed(family: str, *, columnwise: bool, is_2d: bool) -> bool:
    """Whether scales are stored as (columns, rows)."""
    return family == "Float8Block" and columnwise == is_2d


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """Return the quantized tensor that a quantizer of TE makes of an ordinary one.

    Written to `output` if there is one.
    """
    if noop is not None:
        raise NotImplementedError("the stub always quantizes")
    if tensor.dim() != 2:
        raise NotImplementedError("the stub quantizes matrices only")
    family, dtype = _family(quantizer), _fp8(quantizer.dtype)
    align = _ALIGNMENT[family]
    if any(side % align for side in tensor.shape):
        raise ValueError(
            f"{family}: the sides of {tuple(tensor.shape)} are no multiples of {align}"
        )
    is_2d = getattr(quantizer, "block_scaling_dim", 1) == 2
    power_of_2 = family == "MXFP8" or quantizer.force_pow_2_scales
    limit, matrix = torch.finfo(dtype).max, tensor.detach().float()
    buffers: dict[str, torch.Tensor] = {}
    for name, (shape, kind) in quantizer.inner_tensor_specs(tuple(tensor.shape)).items():
        columnwise = name in ("_transpose", "_columnwise_data", "_columnwise_scale_inv")
        block = _block(family, tensor.shape, columnwise=columnwise, is_2d=is_2d)
        scale_inv = _scale_inv(matrix, block, limit, power_of_2=power_of_2)
        if "scale_inv" in name:
            if _is_transposed(family, columnwise=columnwise, is_2d=is_2d):
                scale_inv = scale_inv.t()
            if kind == torch.uint8:
                scale_inv = torch.log2(scale_inv) + 127
            stored = torch.zeros(shape, dtype=kind)
            if family == "Float8":
                stored.fill_(scale_inv.item() if scale_inv.numel() else 1.0)
            else:
                stored[: scale_inv.shape[0], : scale_inv.shape[1]] = scale_inv.to(kind)
        else:
            scaled = matrix / _spread(scale_inv, block, tensor.shape)
            stored = scaled.clamp(-limit, limit).to(dtype).view(torch.uint8)
            if name == "_transpose" or (family == "Float8Block" and columnwise):
                stored = stored.t().contiguous()
        assert stored.shape == torch.Size(shape), "TE's quantizer wants another shape"
        buffers[name] = stored
    made = _assemble(tensor, quantizer, buffers)
    if output is None:
        return made
    output.copy_from_storage(made)
    return output


def _assemble(tensor: torch.Tensor, quantizer: Any, buffers: dict[str, torch.Tensor]) -> Any:
    """Make TE's tensor of its buffers."""
    metadata = quantizer.storage_metadata(tensor.dtype)
    names = {"_data": "data", "_transpose": "data_transpose", "_scale_inv": "fp8_scale_inv"}
    arguments = {names.get(name, name[1:]): value for name, value in buffers.items()}
    for missing in _constructor_buffers(_family(quantizer)):
        arguments.setdefault(missing, None)
    if not quantizer.internal:
        arguments.update(shape=tensor.shape, dtype=tensor.dtype, device=tensor.device)
        metadata["nontensor_kwargs"].pop("fake_dtype")
    return metadata["cls"](**arguments, **metadata["nontensor_kwargs"])


def _constructor_buffers(family: str) -> tuple[str, ...]:
    if family == "Float8":
        return ("data", "data_transpose")
    return (
        *("rowwise_data", "rowwise_scale_inv"),
        *("columnwise_data", "columnwise_scale_inv"),
    )


def is_quantized(operand: Any) -> bool:
    """Whether an operand of a product is a quantized tensor."""
    return type(operand) not in (torch.Tensor, torch.nn.Parameter)


def dequantize(operand: Any, *, columnwise: bool) -> torch.Tensor:
    """Return an operand of a product as an ordinary matrix; ordinary ones as they are."""
    if not is_quantized(operand):
        return operand
    family = _family(operand)
    if family == "Float8":
        # Since Blackwell one buffer serves both ways.
        is_transposed = operand._data is None
        data = operand._transpose if is_transposed else operand._data
        matrix = data.view(_fp8(operand._fp8_dtype)).float() * operand._scale_inv
        return matrix.t() if is_transposed else matrix
    is_2d = getattr(operand, "_is_2D_scaled", False)
    data, scale_inv = operand._rowwise_data, operand._rowwise_scale_inv
    if columnwise:
        data, scale_inv = operand._columnwise_data, operand._columnwise_scale_inv
    matrix = data.view(_fp8(operand._fp8_dtype)).float()
    if family == "Float8Block" and columnwise:
        matrix = matrix.t()
    if scale_inv.dtype == torch.uint8:
        scale_inv = torch.exp2(scale_inv.float() - 127)
    if _is_transposed(family, columnwise=columnwise, is_2d=is_2d):
        scale_inv = scale_inv.t()
    block = _block(family, matrix.shape, columnwise=columnwise, is_2d=is_2d)
    return matrix * _spread(scale_inv, block, matrix.shape)


def fp8_transpose(
    data: torch.Tensor, dtype: Any, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return quantized data transposed."""
    transposed = data.t().contiguous()
    return transposed if out is None else out.copy_(transposed)


def split_quantize(
    tensor: torch.Tensor, sizes: list[int], quantizers: list[Any], **unused: Any
) -> list[Any]:
    """Quantize each group of rows by its own quantizer."""
    return [
        quantize(part, quantizer)
        for part, quantizer in zip(tensor.split(sizes), quantizers, strict=True)
    ]


def bgrad_quantize(tensor: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    """Return a bias's gradient, and the rows quantized."""
    return tensor.sum(0), quantize(tensor, quantizer)


def fused_multi_row_padding(
    rows: torch.Tensor, padded: torch.Tensor, sizes: list[int], padded_sizes: list[int]
) -> None:
    """Copy groups of rows, each followed by zeros up to its padded size."""
    padded.zero_()
    for part, out in zip(rows.split(sizes), padded.split(padded_sizes), strict=True):
        out[: len(part)] = part


def fused_multi_row_unpadding(
    padded: torch.Tensor, rows: torch.Tensor, padded_sizes: list[int], sizes: list[int]
) -> None:
    """Copy groups of rows without what pads them."""
    for part, out in zip(padded.split(padded_sizes), rows.split(sizes), strict=True):
        out.copy_(part[: len(out)])


def make_available() -> None:
    """Let TE believe in a GPU that has all the formats; TE asks once, and keeps the answer."""
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    for name in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):
        if getattr(quantization, name) is not None:
            raise RuntimeError(f"TE has asked for {name} already")
        setattr(quantization, name, (True, ""))
    # It moves MXFP8 to a CUDA device before it reads its values.
    storage = importlib.import_module("transformer_engine.pytorch.tensor.storage")
    from_mxfp8 = storage.mxfp8_tensor_storage._FromMXFP8Func
    from_mxfp8.forward = staticmethod(
        lambda unused, tensor, dtype: dequantize(tensor, columnwise=False).to(dtype)
    )

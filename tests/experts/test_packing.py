"""Rows of bytes. Quantized tensors: tests/integration/test_te_fp8.py, where TE's are in sight."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fssdp.experts.packing import pack, packed_bytes, unpack

SHAPES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=4)


@given(SHAPES, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_weights_arrive_bit_for_bit(shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """Also where sizes are no multiple of the alignment; views are made before the bytes come."""
    weights = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    size = packed_bytes(weights)
    assert size % 16 == 0
    # Neither the row before nor the row behind is written.
    rows = torch.full((3, size), 7, dtype=torch.uint8)
    views = unpack(rows[1], weights)
    pack(rows[1], weights)
    for view, weight in zip(views, weights, strict=True):
        assert (view.shape, view.dtype) == (weight.shape, weight.dtype)
        assert torch.equal(view, weight)
        assert not view.requires_grad
    assert bool((rows[[0, 2]] == 7).all())

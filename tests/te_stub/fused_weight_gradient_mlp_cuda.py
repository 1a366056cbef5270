"""Stands in for the kernel of NVIDIA Apex that Megatron's own linear layers add gradients with.

A model with --gradient-accumulation-fusion has such layers beside Transformer Engine's experts.
"""

from __future__ import annotations

import torch


def wgrad_gemm_accum_fp32(
    rows: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Add a weight's gradient to `main_grad`."""
    main_grad.add_(grad_output.t() @ rows)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32

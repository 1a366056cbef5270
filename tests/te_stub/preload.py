"""Import this before Megatron, and Megatron finds Transformer Engine on a CPU.

TE's Python part is the real one, from `te` in the virtual environment (scripts/setup_venv.sh puts
it there, off the ordinary path: with TE in sight Megatron would use it everywhere). Only its
compiled module is a stub, and nothing but the grouped linear layers of MoE experts computes.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.te_stub.fp8 import make_available

FOLDER = Path(sys.prefix) / "te"
PATHS = [str(Path(__file__).parent), str(FOLDER)]


def _make_importable() -> None:
    sys.path[:0] = [path for path in PATHS if path not in sys.path]
    # The first stops `transformer_engine.common` from loading CUDA libraries. The second says
    # that no framework is wanted yet, so that the missing compiled module is no warning.
    os.environ.update(NVTE_PROJECT_BUILDING="1", NVTE_FRAMEWORK="none")
    stub = importlib.import_module("transformer_engine_torch")
    # TE's ONNX export needs onnxscript and its attention einops. Neither is a requirement of ours,
    # and nobody calls them here.
    absent = ["transformer_engine.pytorch.onnx_extensions"]
    if importlib.util.find_spec("einops") is None:
        absent.append("einops")
    for name in absent:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__getattr__ = stub.__getattr__  # type: ignore[method-assign]
    common = importlib.import_module("transformer_engine.common")
    # It would load the compiled module from a file; `import transformer_engine_torch` finds ours.
    common.load_framework_extension = lambda framework: None
    importlib.import_module("transformer_engine.pytorch")
    if "einops" in absent:
        del sys.modules["einops"]  # Megatron asks too
    # TE's optimizers are kernels. Without them Megatron falls back to torch's, and to its own
    # norms; `transformer_engine.pytorch.optimizers` stays an attribute.
    sys.modules["transformer_engine.pytorch.optimizers"] = None  # type: ignore[assignment]


class _CudaTensor(torch.Tensor):
    """An ordinary tensor that says it is on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _answer_cuda_calls() -> None:
    """Answer what TE asks beyond what `cpu_platform` answers for Megatron."""
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    gemm.get_sm_count = lambda: 1
    base = TransformerEngineBaseModule
    stock_init, stock_prepare_forward = base.__init__, base.prepare_forward

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # It refuses to be built without a CUDA device.
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            stock_init(self, *args, **kwargs)

    def prepare_forward(self: Any, inp: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # It refuses rows that are not on a CUDA device.
        rows = stock_prepare_forward(self, inp.as_subclass(_CudaTensor), *args, **kwargs)
        return rows.as_subclass(torch.Tensor)

    base.__init__, base.prepare_forward = init, prepare_forward

    # Its recomputation, which Megatron takes in fp8, keeps the device's random state.
    distributed = importlib.import_module("transformer_engine.pytorch.distributed")
    distributed._get_cuda_rng_state = lambda **unused: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, **unused: torch.set_rng_state(state)


_make_importable()
make_available()
_answer_cuda_calls()

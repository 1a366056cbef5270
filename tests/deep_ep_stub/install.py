"""Let Megatron find the stand-in for `deep_ep`, also where it was imported before."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def install() -> None:
    """Load Megatron's wrappers of the kernels anew, with the stand-in in sight."""
    folder = str(Path(__file__).parent)
    if folder in sys.path:
        return
    sys.path.insert(0, folder)
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    importlib.reload(fused_a2a)
    names = [name for name in vars(token_dispatcher) if name in vars(fused_a2a)]
    for name in names:
        if getattr(fused_a2a, name).__class__.__name__ == "function":
            setattr(token_dispatcher, name, getattr(fused_a2a, name))

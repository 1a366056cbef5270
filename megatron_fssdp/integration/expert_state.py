# SPDX-License-Identifier: Apache-2.0

"""What Megatron's optimizers keep of a parameter on this rank: tensors, and which part of it.

Without the distributed optimizer a rank keeps all of a parameter's state. With it the parameters
of a rank lie in flat buffers that are cut into one shard a rank of the expert-data-parallel group:
a parameter's state may lie on one of them, or be cut at any place over several.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@dataclass(frozen=True, eq=False)
class StatePiece:
    """The part [start, stop) of a flattened parameter, as the optimizer keeps it here.

    Attributes:
        start, stop: elements of the parameter.
        names: of the tensors: "param" is the fp32 copy, if there is one; then Adam's moments, or
            whatever the optimizer has one of an element.
        tensors: flat views, stop - start elements each, by name; writing to them changes the state.
    """

    start: int
    stop: int
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]


NOTHING = StatePiece(0, 0, (), ())


def read_state(optimizer: Any, parameter: torch.nn.Parameter) -> StatePiece:
    """Return what an optimizer of Megatron's keeps of a parameter on this rank.

    Args:
        optimizer: as Megatron built it; optimizers may be chained.
        parameter: of the model.
    """
    main = getattr(parameter, "main_param", None)
    tensors = {} if main is None else {"param": main}
    for each in _unchained(optimizer):
        if isinstance(each, DistributedOptimizer):
            if parameter in each.model_param_gbuf_map:
                span = each._get_model_param_range_map(parameter)["param"]
                shard = each._get_main_param_and_optimizer_states(parameter)
                return _piece(span.start, span.end, shard)
        else:
            tensors.update(each.optimizer.state.get(parameter if main is None else main, {}))
    # SGD without momentum keeps nothing but the fp32 copy.
    return _piece(0, parameter.numel(), tensors) if tensors else NOTHING


def _unchained(optimizer: Any) -> Iterator[Any]:
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        # A stub, where a rank has nothing to train, holds none.
        if getattr(each, "optimizer", None) is not None:
            yield each


def _piece(start: int, stop: int, tensors: dict[str, Any]) -> StatePiece:
    # Whatever has no element for each of the parameter's (the step) is alike in all experts.
    flat = {
        name: tensor.detach().view(-1)
        for name, tensor in sorted(tensors.items())
        if isinstance(tensor, torch.Tensor) and tensor.numel() == stop - start and tensor.dim()
    }
    return StatePiece(start, stop, tuple(flat), tuple(flat.values()))

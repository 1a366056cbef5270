"""Tensor-parallel parameters by name: which shard a rank has, cutting one out, and joining them.

A shard's name ends in " [rank/size dim stride]": the tensor is cut along `dim` into size * stride
parts, and the shard has every size-th of them (a gated fc1 has stride 2: its gate, its values).
"""

from __future__ import annotations

import re

import torch

_SHARD = re.compile(r" \[(\d+)/(\d+) (\d+) (\d+)\]")


def shard_name(name: str, parameter: torch.nn.Parameter) -> str:
    """Add to a parameter's name which shard of it this rank has, if it has not all."""
    from megatron.core import parallel_state

    if not getattr(parameter, "tensor_model_parallel", False):
        return name
    # Megatron's mark of an expert's parameter.
    if getattr(parameter, "allreduce", True):
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
    else:
        rank = parallel_state.get_expert_tensor_parallel_rank()
        size = parallel_state.get_expert_tensor_parallel_world_size()
    if size == 1:
        return name
    return f"{name} [{rank}/{size} {parameter.partition_dim} {parameter.partition_stride}]"


def plain_name(name: str) -> str:
    """The name without the shard."""
    return _SHARD.sub("", name)


def whole_shape(name: str, shape: torch.Size) -> list[int]:
    """The shape of the tensor that a shard is cut from."""
    whole = list(shape)
    if found := _SHARD.search(name):
        _, size, dim, _ = map(int, found.groups())
        whole[dim] *= size
    return whole


def cut(name: str, whole: torch.Tensor) -> torch.Tensor:
    """Cut the shard that a name tells of out of the whole."""
    found = _SHARD.search(name)
    if not found:
        return whole
    rank, size, dim, stride = map(int, found.groups())
    return torch.cat(whole.chunk(size * stride, dim)[rank::size], dim)


def join(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put shards together, by plain name."""
    joined: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        found = _SHARD.search(name)
        if not found:
            joined[name] = tensor
            continue
        _, size, dim, stride = map(int, found.groups())
        start, end = found.span()
        names = [f"{name[:start]} [{r}/{size} {dim} {stride}]{name[end:]}" for r in range(size)]
        parts = [tensors[each].chunk(stride, dim) for each in names]
        joined[plain_name(name)] = torch.cat(
            [parts[rank][piece] for piece in range(stride) for rank in range(size)], dim
        )
    return joined

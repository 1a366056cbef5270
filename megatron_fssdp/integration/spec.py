# SPDX-License-Identifier: Apache-2.0

"""Put FSSDP's MoE layer where Megatron builds its own.

Megatron's spec functions (GPT, hybrid and MTP blocks alike) name `MoELayer` through the module
`megatron.core.models.gpt.moe_module_specs` and wrap it in a `functools.partial`. Registering
replaces that one name, in that one module, by our subclass, bound to its runtime. `unregister`
undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import wraps
from typing import Any

import torch
from megatron.core.models.gpt import moe_module_specs
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.integration import compat
from megatron_fssdp.integration.checkpoint import describe_experts
from megatron_fssdp.integration.layer import FSSDPMoELayer
from megatron_fssdp.integration.ownership import Ownership
from megatron_fssdp.integration.runtime import FSSDPRuntime


def register(config: FSSDPConfig) -> FSSDPRuntime:
    """Make every MoE layer that is built from now on an FSSDP layer.

    Args:
        config: the `--fssdp-*` settings.

    Returns:
        The runtime that the layers share.

    Raises:
        RuntimeError: if this Megatron no longer names its layer where we replace it.
    """
    unregister()
    if getattr(moe_module_specs, "MoELayer", None) is not MoELayer:
        raise RuntimeError(
            "megatron.core.models.gpt.moe_module_specs no longer builds MoE layers through the "
            "name MoELayer; this version of megatron-core is not supported by megatron-fssdp"
        )
    runtime = FSSDPRuntime(config)
    moe_module_specs.MoELayer = compat.bind_layer(FSSDPMoELayer, runtime)
    return runtime


def unregister() -> None:
    """Give Megatron its own layer back; models that are built already stay as they are."""
    if compat.is_bound(moe_module_specs.MoELayer, FSSDPMoELayer):
        moe_module_specs.MoELayer = MoELayer


def prepare(model: Iterable[torch.nn.Module], runtime: FSSDPRuntime) -> None:
    """Check the model that Megatron built, and let its layers fetch replicas early.

    Collective over the world, also for ranks whose chunks have no MoE layer.

    A transformer layer whose MLP is an FSSDP layer starts the fetch before its attention; backward,
    each layer starts the fetch of the one before it in its chunk.

    Args:
        model: the model chunks that Megatron built on this rank.
        runtime: as `register` returned it.

    Raises:
        RuntimeError: see `assert_fssdp_layers`.
    """
    assert_fssdp_layers(model)
    runtime.make_copy_groups()
    for chunk in model:
        previous: FSSDPMoELayer | None = None
        alike: dict[Hashable, list[FSSDPMoELayer]] = {}
        for module in chunk.modules():
            layer = getattr(module, "mlp", None)
            if not isinstance(layer, FSSDPMoELayer):
                continue
            module.register_forward_pre_hook(_starting(layer))
            if previous is not None:
                layer.follow(previous)
            previous = layer
            alike.setdefault(_kind(layer), []).append(layer)
        ownerships = [layers[0].share_homes(layers) for layers in alike.values()]
        _describe_by_expert(chunk, ownerships)


def _describe_by_expert(chunk: torch.nn.Module, ownerships: list[Ownership]) -> None:
    """Let a chunk's sharded state describe experts where they are, whatever wraps the model."""
    # The decoder's owner: Megatron takes the sharded state of the unwrapped model.
    model = next((m for m in chunk.modules() if hasattr(m, "decoder")), chunk)
    stock: Callable[..., dict[str, Any]] = getattr(model, "sharded_state_dict", dict)

    @wraps(stock)
    def sharded_state_dict(*args: Any, **options: Any) -> dict[str, Any]:
        return describe_experts(stock(*args, **options), ownerships)

    model.sharded_state_dict = sharded_state_dict  # type: ignore[assignment]


def _kind(layer: FSSDPMoELayer) -> Hashable:
    """Layers of one kind may hold each other's experts: equal in all that a parameter has."""
    weights = [
        (name, tuple(weight.shape), weight.dtype, weight.requires_grad)
        for name, weight in layer.experts.named_parameters()
    ]
    return (type(layer.experts), id(layer.ep_group), tuple(weights))


def _starting(layer: FSSDPMoELayer) -> Callable[..., None]:
    def start(*unused: Any) -> None:
        layer.start_replicas()

    return start


def assert_fssdp_layers(model: Iterable[torch.nn.Module]) -> None:
    """Stop a run whose MoE layers are not ours: it would silently train plain EP.

    Args:
        model: the model chunks that Megatron built on this rank.

    Raises:
        RuntimeError: if a chunk has a stock MoE layer.
    """
    for chunk in model:
        for name, module in chunk.named_modules():
            if isinstance(module, MoELayer) and not isinstance(module, FSSDPMoELayer):
                raise RuntimeError(
                    f"--moe-parallel fssdp: layer {name} is {type(module).__name__}, not an FSSDP "
                    "layer. A --spec or a model builder that makes its own MoE layers is not "
                    "supported; build them with megatron.core's get_moe_module_spec, or use "
                    "--moe-parallel ep"
                )

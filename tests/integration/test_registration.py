from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from megatron.core.models.gpt import moe_module_specs
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training import arguments, training, yaml_arguments

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.integration import agreement, metrics, registration, spec

HOOKED = (
    (arguments, "add_megatron_arguments"),
    (arguments, "validate_args"),
    (yaml_arguments, "load_yaml"),
    (training, "setup_model_and_optimizer"),
)


class StockLayer(MoELayer):
    """A MoE layer that is not ours; building a real one needs process groups."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module, name in HOOKED:
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(registration, "_registered", False)
    yield
    spec.unregister()


def settings(**changes: object) -> Namespace:
    """What our checks read from Megatron's arguments."""
    values = {
        **{field.name: field.default for field in fields(FSSDPConfig)},
        "num_experts": 4, "expert_model_parallel_size": 2, "optimizer": "adam",
        "moe_token_dispatcher_type": "alltoall",
    }  # fmt: skip
    return Namespace(**{**values, **changes})


def register_with(monkeypatch: pytest.MonkeyPatch, *models: torch.nn.Module) -> None:
    """Register over stand-ins of the two functions that need a whole job."""
    monkeypatch.setattr(arguments, "validate_args", lambda args, defaults=None: args)
    monkeypatch.setattr(
        training, "setup_model_and_optimizer", lambda *rest, **options: (list(models), "opt", None)
    )
    monkeypatch.setattr("megatron.training.get_args", lambda: Namespace(iteration=7, rank=1))
    # There is one process, and no group.
    monkeypatch.setattr(agreement, "make_groups", lambda wanted, purpose: {})
    registration.register()


def test_their_provider_and_our_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def provider(parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--theirs", type=int)
        return parser

    registration.register()
    registration.register()
    monkeypatch.setattr(sys, "argv", ["x.py", "--theirs", "3", "--moe-parallel", "fssdp"])
    args = arguments.parse_args(extra_args_provider=provider)
    assert (args.theirs, args.moe_parallel, args.fssdp_num_replica_slots) == (3, "fssdp", 2)


def test_plain_ep_changes_nothing_but_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    register_with(monkeypatch)
    stock = training.setup_model_and_optimizer
    args = settings()
    assert arguments.validate_args(args, {}) is args
    assert training.setup_model_and_optimizer is stock
    assert moe_module_specs.MoELayer is MoELayer


def test_fssdp_builds_our_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    register_with(monkeypatch, torch.nn.Linear(1, 1))
    arguments.validate_args(settings(moe_parallel="fssdp", fssdp_reshard_interval=0), {})
    assert moe_module_specs.MoELayer is not MoELayer
    assert training.setup_model_and_optimizer("any")[1:] == ("opt", None)
    # A resumed run goes on counting where Megatron does.
    assert registration._runtimes[-1].iteration == 7


def test_a_second_validation_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """An in-process restart validates again: two runtimes would count everything twice."""
    register_with(monkeypatch, torch.nn.Linear(1, 1))
    arguments.validate_args(settings(moe_parallel="fssdp"), {})
    wrapped, first = training.setup_model_and_optimizer, registration._runtimes[-1]
    arguments.validate_args(settings(moe_parallel="fssdp"), {})
    assert training.setup_model_and_optimizer is wrapped
    assert len(registration._runtimes) == 1
    assert registration._runtimes[-1] is not first


def test_fssdp_stops_on_a_stock_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this check a spec that builds its own layers would silently train plain EP."""
    register_with(monkeypatch, torch.nn.Sequential(StockLayer()))
    arguments.validate_args(settings(moe_parallel="fssdp"), {})
    with pytest.raises(RuntimeError, match="layer 0 is StockLayer, not an FSSDP layer"):
        training.setup_model_and_optimizer()


def test_bad_settings_stop_before_anything_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    register_with(monkeypatch)
    with pytest.raises(ValueError, match="nothing to balance"):
        arguments.validate_args(settings(moe_parallel="fssdp", expert_model_parallel_size=1))
    assert moe_module_specs.MoELayer is MoELayer


def test_trace_watches_plain_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = []
    monkeypatch.setattr(metrics, "watch_routers", lambda model, runtime: watched.append(model))
    monkeypatch.setattr(metrics, "attach", lambda runtime, config: None)
    model = torch.nn.Linear(1, 1)
    register_with(monkeypatch, model)
    arguments.validate_args(settings(fssdp_record_trace="runs/x"))
    training.setup_model_and_optimizer()
    assert watched == [[model]]
    assert moe_module_specs.MoELayer is MoELayer


@pytest.mark.parametrize(
    ("argv", "loaded"),
    [(["--moe-parallel", "fssdp"], {}), ([], {"moe_parallel": "fssdp"})],
)
def test_yaml_configuration_is_refused(
    argv: list[str], loaded: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--yaml-cfg replaces all parsed flags: --moe-parallel fssdp would train plain EP."""
    monkeypatch.setattr(yaml_arguments, "load_yaml", lambda path: Namespace(**loaded))
    registration.register()
    monkeypatch.setattr(sys, "argv", ["x.py", *argv])
    with pytest.raises(ValueError, match="does not work with --yaml-cfg"):
        yaml_arguments.load_yaml("a.yaml")


def test_yaml_configuration_of_plain_ep_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_arguments, "load_yaml", lambda path: Namespace(a=1))
    registration.register()
    monkeypatch.setattr(sys, "argv", ["x.py", "--yaml-cfg", "a.yaml"])
    assert yaml_arguments.load_yaml("a.yaml") == Namespace(a=1)

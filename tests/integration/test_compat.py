"""The branches of compat.py that the installed version does not take.

`make test-compat` runs them on the versions that do.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training import arguments, initialize

from megatron_fssdp.integration import compat, versions

RELEASES = [(0, 17), (0, 18), (0, 19)]


class Layer(MoELayer):
    """A layer that remembers what it is built with."""

    def __init__(self, config: Any, *, runtime: Any, **options: Any) -> None:
        self.__dict__["built_with"] = (config, runtime, options)


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    monkeypatch.setattr(versions, "core_release", lambda: request.param)
    return request.param


def test_a_bound_layer_builds_with_its_runtime(release: tuple[int, int]) -> None:
    bound = compat.bind_layer(Layer, "the runtime")
    layer = bound("a config", name="mlp")
    assert isinstance(layer, Layer)
    assert layer.__dict__["built_with"] == ("a config", "the runtime", {"name": "mlp"})
    assert compat.is_bound(bound, Layer)
    assert not compat.is_bound(MoELayer, Layer)


def test_0_17_takes_a_bound_layer_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transformer layer passes groups if `module in (MoELayer, ...)`, the MTP mark if equal.

    And its build_module calls classes only.
    """
    monkeypatch.setattr(versions, "core_release", lambda: (0, 17))
    bound = compat.bind_layer(Layer, "the runtime")
    assert isinstance(bound, type)
    assert bound in (dict, MoELayer)
    assert bound == MoELayer
    assert bound != Layer
    assert {bound: 1}[bound] == 1


def test_flags_are_checked_where_they_are_parsed(release: tuple[int, int]) -> None:
    expected = [arguments, initialize] if release == (0, 17) else [arguments]
    assert compat.modules_that_validate() == expected


def test_legacy_models_are_refused() -> None:
    args = Namespace(moe_parallel="fssdp", use_legacy_models=True)
    with pytest.raises(ValueError, match="does not work with --use-legacy-models"):
        compat.check_flags(args)
    args.moe_parallel = "ep"
    compat.check_flags(args)


def test_our_script_refuses_models_that_it_cannot_build(release: tuple[int, int]) -> None:
    compat._check_buildable(Namespace(spec=None, mtp_num_layers=None))
    with pytest.raises(ValueError, match=r"--mtp-num-layers needs megatron-core 0\.19 or newer"):
        compat._check_buildable(Namespace(mtp_num_layers=1))

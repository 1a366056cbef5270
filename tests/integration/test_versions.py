from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_fssdp.integration import versions


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages can be put into, first on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


def add_package(site: Path, name: str, text: str = "") -> None:
    folder = site / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(text)
    importlib.invalidate_caches()


def test_this_megatron_is_supported() -> None:
    versions.check_core()
    found = versions.find_versions()
    assert found.is_core_supported
    assert found.megatron_core is not None
    assert found.megatron_core.startswith("0.")


@pytest.mark.parametrize("found", ["0.16.1", "0.21.0", "1.0.0", None])
def test_other_megatrons_are_refused(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "core_version", lambda: found)
    message = f"supports megatron-core >= 0.17, < 0.21 and found {found or 'none'}"
    with pytest.raises(RuntimeError, match=message):
        versions.check_core()


def test_pypis_apex_is_not_nvidias(site: Path) -> None:
    add_package(site, "apex")
    assert versions.find_versions().apex is None


def test_a_broken_apex_is_not_nvidias(site: Path) -> None:
    add_package(site, "apex", "raise ImportError('built for another torch')")
    assert versions.find_versions().apex is None


def test_nvidias_apex_is_found(site: Path) -> None:
    add_package(site, "apex")
    add_package(site / "apex", "multi_tensor_apply")
    assert versions.find_versions().apex == "installed"

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from megatron_fssdp import __version__
from megatron_fssdp.cli import app
from megatron_fssdp.integration import versions


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output.strip()) == (0, __version__)


def test_doctor() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for name in ("torch", "CUDA", "megatron-core", "Transformer Engine", "NVIDIA Apex"):
        assert name in result.output
    assert "Supported: megatron-core >= 0.17, < 0.21." in result.output


def test_doctor_reports_an_unsupported_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "core_version", lambda: "0.16.1")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "Not supported: this plugin needs megatron-core >= 0.17, < 0.21." in result.output

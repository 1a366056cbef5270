"""The package's layers import downwards only, and the light ones stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megatron_fssdp"

# Who may import whom, within the package.
ALLOWED = {
    "version": set(),
    "config": set(),
    "planning": set(),
    "presets": {"planning", "config"},
    "simulation": {"planning", "presets", "version"},
    "collectives": {"planning"},
    "experts": {"planning", "collectives"},
    "integration": {
        "planning",
        "presets",
        "simulation",
        "collectives",
        "experts",
        "config",
        "version",
    },
    "tools": {"planning", "presets", "simulation", "collectives", "experts"},
    "launch": {"integration"},
    "cli": {"planning", "presets", "simulation", "integration", "tools", "config", "version"},
    "__init__": {"version"},
}

# Who may import which heavy package.
HEAVY = {
    "torch": {"collectives", "experts", "integration", "tools"},
    "megatron": {"integration"},
    "transformer_engine": {"integration"},
    "matplotlib": {"simulation"},
}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            # "from megatron_fssdp import cli" names the module in its list.
            if node.module == "megatron_fssdp":
                found.update(f"megatron_fssdp.{alias.name}" for alias in node.names)
    return found


def _layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    layer = _layer(path)
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "megatron_fssdp" and len(parts) > 1:
            target = parts[1]
            assert target in {layer, *ALLOWED[layer]} or target.startswith("__"), (
                f"{path.relative_to(PACKAGE)} ({layer}) imports {name}"
            )
        if parts[0] in HEAVY:
            assert layer in HEAVY[parts[0]], f"{path.relative_to(PACKAGE)} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii(), "ASCII only"
    assert len(text.splitlines()) <= 400, "split the file"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            body = node.body[1:] if isinstance(first, ast.Expr) and node.body[1:] else node.body
            length = (body[-1].end_lineno or 0) - body[0].lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"


def test_planning_and_simulation_need_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, megatron_fssdp, megatron_fssdp.planning.planner, megatron_fssdp.config;"
        "import megatron_fssdp.simulation.traces, megatron_fssdp.presets.command;"
        "print(sorted({'torch', 'megatron'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"

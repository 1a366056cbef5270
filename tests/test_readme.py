"""What the README says is so: flags, files, commands."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fssdp import config as config_module
from megatron_fssdp.config import FSSDPConfig, flag_of

ROOT = Path(__file__).parent.parent
# A line of one word in capitals.
PLACEHOLDER = re.compile(r"^\s*[A-Z][A-Z0-9_-]+[.:]?\s*$", re.M)
README = (ROOT / "README.md").read_text(encoding="utf-8")


def flags_table() -> str:
    """Build the README's flags table from the settings and their help."""
    tree = ast.parse(Path(config_module.__file__).read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    helps = {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
    lines = ["| flag | default | |", "| --- | --- | --- |"]
    for field in dataclasses.fields(FSSDPConfig):
        default = "none" if field.default is None else field.default
        lines.append(f"| `{flag_of(field.name)}` | {default} | {helps[field.name]} |")
    return "\n".join(lines)


def test_flags_table_is_current() -> None:
    assert flags_table() in README, f"the README's flags table should be\n\n{flags_table()}\n"


def test_linked_and_named_files_exist() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    layers = "planning|collectives|experts|integration"
    modules = re.findall(rf"`((?:{layers})/\w+\.py)`", README)
    targets += [f"megatron_fssdp/{name}" for name in modules]
    targets += re.findall(r"`(scripts/\w+\.py|docs/\w+\.md)`", README)
    assert len(targets) > 10
    for target in targets:
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("command", re.findall(r"^    make ([a-z-]+)", README, re.M))
def test_make_targets_exist(command: str) -> None:
    assert f"\n{command}: setup" in (ROOT / "Makefile").read_text()


def test_readme_speaks_of_the_project_alone() -> None:
    """No placeholder, no machine path, in any document."""
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("patches/*.md")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"@[A-Z_]+@|TODO|/root/|/work/|/tmp/", text), path
        # A word that something was to be put in the place of.
        assert not (found := PLACEHOLDER.search(text)), f"{path}: {found}"


def test_a_placeholder_is_found() -> None:
    for line in ("MEASURED", "RESULTS_TABLE", "  FIGURE-1", "TABLE:", "XXX."):
        assert PLACEHOLDER.search(f"Text.\n\n{line}\nMore.\n"), line
    for line in ("NCCL and MPI", "A", "| A |", "## FAQ", "DRY_RUN=1 sbatch x", "Mixed"):
        assert not PLACEHOLDER.search(f"Text.\n\n{line}\nMore.\n"), line


def test_cpu_example_trains() -> None:
    """The README's own lines, as they stand."""
    start = README.index("    flags=$(python -c")
    block = README[start : README.index("--fssdp-log-plan 1", start)] + "--fssdp-log-plan 1"
    answer = subprocess.run(
        ["bash", "-ec", block],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-2000:]
    assert "fssdp iteration        5 | fullest rank / mean tokens" in answer.stdout

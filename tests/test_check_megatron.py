"""scripts/check_megatron.py on a small stand-in for a Megatron-LM checkout.

The stand-in has the installed megatron-core, and a script with the lines that our patch looks for.
Real checkouts are what the script is for: patches/README.md says which were checked.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ALL

ROOT = Path(__file__).resolve().parent.parent

# Around our lines as in core_v0.19.0. The rest is this repository's script, without its main().
SCRIPT = f'''\
import runpy
import time
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from model_provider import model_provider

try:
    from megatron.post_training.arguments import add_modelopt_args
    from megatron.post_training.loss_func import loss_func as loss_func_modelopt
except ImportError:
    pass

ours = runpy.run_path("{ROOT}/pretrain_gpt.py", run_name="ours")


if __name__ == "__main__":
    # Timestamp right after entering __main__ block (after all imports/library setup)
    _MAIN_ENTRY_TIME = time.time()

    ours["compat"].pretrain_gpt(
        ours["datasets_provider"], ours["forward_step"], ours["refuse_unsupported"]
    )
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like Megatron-LM at core_v0.19.0."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = tmp_path / "Megatron-LM"
    folder.mkdir()
    (folder / "megatron").symlink_to(next(iter(spec.submodule_search_locations)))
    (folder / "model_provider.py").write_text("model_provider = None\n")
    (folder / "pretrain_gpt.py").write_text(SCRIPT)
    return folder


def check(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the script as a user does."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/check_megatron.py"), *map(str, words)],
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module of this process, which has torch already."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("check_megatron")


@pytest.fixture
def check_here(script: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Its main(), which returns the exit status."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["check_megatron.py", *map(str, words)])
        return int(script.main())

    return run


def result_of(name: str, printed: str) -> str:
    """The words of a line of the table."""
    (line,) = [line for line in printed.splitlines() if line.startswith(f"│ {name}")]
    return " ".join(cell.strip() for cell in line.strip("│").split("│"))


def test_a_patched_script_parses_our_flags(checkout: Path) -> None:
    done = check(checkout, "--steps", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_of("patch", done.stdout) == "patch good core_v0.19.0.patch"
    assert result_of("imports", done.stdout).startswith("imports and parses good")
    assert (checkout / "pretrain_gpt.py").read_text() == SCRIPT


@pytest.mark.skipif(not ALL, reason="three training runs: FSSDP_ALL=1")
def test_it_trains_with_patch_and_launcher(checkout: Path) -> None:
    done = check(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("trains with ep", "trains with fssdp, patched", "trains with fssdp, launcher"):
        assert result_of(name, done.stdout).startswith(f"{name} good")
    assert "0 replicas" not in done.stdout


def test_a_changed_script_fails(
    checkout: Path, check_here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    """An upstream that moved our places: a table that says so, and exit status 1."""
    (checkout / "pretrain_gpt.py").write_text(SCRIPT.replace("from model_provider", "from models"))
    assert check_here(checkout) == 1
    printed = capfd.readouterr()
    assert result_of("patch", printed.out) == "patch FAILED none applies"
    assert "patch does not apply" in printed.err


def lines(*steps: tuple[float, float], replicas: int = 2) -> str:
    """What Megatron and our log print in a run."""
    return "".join(
        f" iteration {number:8d}/       2 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: "
        f"{norm:.3f} |\n fssdp iteration {number:8d} | replicas: {replicas} | copies took 1 ms\n"
        for number, (loss, norm) in enumerate(steps, start=1)
    )


@pytest.mark.parametrize(
    ("status", "output", "is_good"),
    [
        (0, lines((4.5, 1.25), (4.4, 1.5)), True),
        (0, lines((4.5, 1.25), (4.400004, 1.501)), True),
        (0, lines((4.5, 1.25), (4.4001, 1.5)), False),
        (0, lines((4.5, 1.25), (4.4, 1.502)), False),
        (0, lines((4.5, 1.25), (float("nan"), 1.5)), False),
        (0, lines((4.5, 1.25), (4.4, 1.5), replicas=0), False),
        (0, lines((4.5, 1.25)), False),
        (1, lines((4.5, 1.25), (4.4, 1.5)), False),
    ],
)
def test_a_run_is_compared_with_plain_ep(
    script: Any, status: int, output: str, is_good: bool
) -> None:
    ep = script.Run(0, lines((4.5, 1.25), (4.4, 1.5), replicas=0))
    assert script.compare("fssdp", script.Run(status, output), ep, 2).is_good is is_good


@pytest.mark.parametrize(
    ("ref", "message"),
    [((), "is not a Megatron-LM checkout"), (("--ref", "core_v9"), "has no core_v9")],
)
def test_what_is_no_checkout_is_refused(
    ref: tuple[str, ...],
    message: str,
    tmp_path: Path,
    check_here: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check_here(tmp_path, *ref) == 2
    assert message in capsys.readouterr().err

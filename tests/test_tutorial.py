"""The commands of docs/tutorial.md, in their order, as they stand; all of them with FSSDP_ALL=1."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_fssdp.cli import app
from tests.ranks import ALL

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.S)
DECIDE, TURN_ON = BLOCKS[:6], BLOCKS[6:]


def run(block: str, folder: Path, shell: list[str]) -> str:
    """Run a block: `fssdp` commands in this process, the rest in one growing script's shell."""
    if block.startswith("fssdp "):
        output = ""
        for line in block.strip().splitlines():
            result = CliRunner().invoke(app, shlex.split(line)[1:])
            assert result.exit_code == 0, f"{line}\n{result.output}"
            output += result.output
        return output
    # Variables of earlier blocks stay, their torchrun lines do not run again.
    settings = [re.sub(r"^torchrun .*$", "", each, flags=re.M) for each in shell]
    shell.append(block)
    answer = subprocess.run(
        ["bash", "-ec", "\n".join([*settings, block])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-2000:]
    return answer.stdout


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Tables as wide as a terminal's.
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "pretrain_gpt.py").symlink_to(ROOT / "pretrain_gpt.py")
    shell: list[str] = []
    doctor, ep, look, simulated, tiny, skewed = (run(block, tmp_path, shell) for block in DECIDE)
    assert "megatron-core" in doctor
    assert "lm loss" in ep
    assert "24 iterations (0 to 23), 2 MoE layers, 2 source ranks, 8 experts" in look
    assert "wrote runs/ep/report.html" in look
    assert "LAER" in simulated
    assert "wrote runs/simulated.html" in simulated
    assert "Leave it off" in tiny
    assert "--moe-parallel ep" in tiny
    assert "Turn it on: expect 1." in skewed or "Turn it on: expect 2." in skewed
    if not ALL:
        return
    # The second run of Megatron is half of the time.
    fssdp, both = (run(block, tmp_path, shell) for block in TURN_ON)
    assert re.search(r"fssdp iteration +12 \| fullest rank / mean tokens", fssdp)
    assert "wrote runs/report.html" in both
    assert ">measured<" in (tmp_path / "runs/report.html").read_text()

    def losses(output: str) -> list[float]:
        return [float(each) for each in re.findall(r"lm loss: (\S+)", output)]

    # Adam's steps let rounding grow: the later half differs more.
    assert len(losses(ep)) == 6
    assert losses(fssdp)[:3] == pytest.approx(losses(ep)[:3], rel=1e-5)
    assert losses(fssdp) == pytest.approx(losses(ep), rel=1e-4)
    lines = (tmp_path / "runs/fssdp/iterations-stage0.jsonl").read_text().splitlines()
    names = json.loads(lines[-1])
    for name in re.findall(r"`([a-z]+-[a-z-]+)`", TEXT[TEXT.index("## 7.") :]):
        assert name in names


def test_what_it_names_exists() -> None:
    for path in re.findall(r"`((?:megatron_fssdp|tests)/[\w/]+\.py)`", TEXT):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`(configs/\w+)`", TEXT):
        assert (ROOT / path).is_dir(), path

"""The patches, without Megatron-LM's file: the text around the added lines is in the patch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = {"core_v0.19.0.patch": "0.19", "main.patch": "0.20"}


def checkout_for(patch: Path, version: str, folder: Path) -> Path:
    """Make a folder that the patch applies to: its context lines, with nothing in between."""
    lines: list[str] = []
    for line in patch.read_text().splitlines():
        if line.startswith("@@"):
            start = int(line.split()[1].split(",")[0].removeprefix("-"))
            lines += [""] * (start - 1 - len(lines))
        elif line.startswith(" "):
            lines.append(line[1:])
    (folder / "pretrain_gpt.py").write_text("\n".join([*lines, "", "", ""]))
    info = folder / "megatron/core/package_info.py"
    info.parent.mkdir(parents=True)
    major, minor = version.split(".")
    info.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 0\n")
    return folder


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/check_patches.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_there_is_a_case_for_every_patch() -> None:
    assert {path.name for path in (ROOT / "patches").glob("*.patch")} == set(VERSIONS)


@pytest.mark.parametrize("name", VERSIONS)
def test_patch_only_adds_an_import_and_a_call(name: str) -> None:
    lines = (ROOT / "patches" / name).read_text().splitlines()
    assert [line for line in lines if line.startswith("+++")] == ["+++ b/pretrain_gpt.py"]
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == [
        "+from megatron_fssdp.integration import register as register_fssdp",
        "+    register_fssdp()",
    ]


@pytest.mark.parametrize("name", VERSIONS)
def test_check_tells_whether_a_patch_applies(name: str, tmp_path: Path) -> None:
    folder = checkout_for(ROOT / "patches" / name, VERSIONS[name], tmp_path)
    done = check(folder)
    assert (done.returncode, done.stdout.split()[1:3]) == (0, [name, "applies"]), done.stderr
    script = folder / "pretrain_gpt.py"
    script.write_text(script.read_text().replace("parse_and_validate_args", "parse"))
    done = check(folder)
    assert done.returncode == 1
    assert f"{name} does not apply" in done.stdout


def test_check_sees_a_folder_inside_another_repository(tmp_path: Path) -> None:
    """Git applied to a subfolder of another repository skips every file and reports success."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    folder = tmp_path / "vendored"
    folder.mkdir()
    checkout_for(ROOT / "patches/main.patch", "0.20", folder)
    assert check(folder).returncode == 0
    (folder / "pretrain_gpt.py").write_text("")
    assert check(folder).returncode == 1


def test_check_refuses_what_it_has_no_patch_for(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert (done.returncode, "is not a Megatron-LM checkout" in done.stderr) == (2, True)
    checkout_for(ROOT / "patches/main.patch", "0.16", tmp_path)
    done = check(tmp_path)
    assert done.returncode == 2
    assert "has megatron-core 0.16; there are patches for 0.19, 0.20" in done.stderr

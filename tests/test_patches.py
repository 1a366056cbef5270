"""The patches, without Megatron-LM's file: the text around the added lines is in the patch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import check_patches

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = {
    "core_v0.17.x.patch": "0.17",
    "core_v0.18.x.patch": "0.18",
    "core_v0.19.0.patch": "0.19",
    "main.patch": "0.20",
}


def checkout_for(patch: Path, version: str, folder: Path) -> Path:
    """Make a folder that the patch applies to: its context lines, with nothing in between."""
    lines: list[str] = []
    for line in patch.read_text().splitlines():
        if line.startswith("@@"):
            start = int(line.split()[1].split(",")[0].removeprefix("-"))
            lines += [""] * (start - 1 - len(lines))
        elif line.startswith(" "):
            lines.append(line[1:])
    folder.mkdir(parents=True, exist_ok=True)
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
    # Before all else: in-process restart looks at the flags, and --help ended the script there,
    # without ours.
    assert lines[lines.index(changed[1]) - 1] == ' if __name__ == "__main__":'


@pytest.mark.parametrize("name", VERSIONS)
def test_check_tells_whether_a_patch_applies(name: str, tmp_path: Path) -> None:
    folder = checkout_for(ROOT / "patches" / name, VERSIONS[name], tmp_path)
    done = check(folder)
    assert (done.returncode, done.stdout.split()[1:3]) == (0, [name, "applies"]), done.stderr
    script = folder / "pretrain_gpt.py"
    script.write_text(script.read_text().replace("_MAIN_ENTRY_TIME", "_START_TIME"))
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
    assert "has megatron-core 0.16; there are patches for 0.17, 0.18, 0.19, 0.20" in done.stderr


@pytest.mark.parametrize("name", VERSIONS)
def test_patch_is_what_the_generator_makes(name: str, tmp_path: Path) -> None:
    folder = checkout_for(ROOT / "patches" / name, VERSIONS[name], tmp_path)
    stock = (folder / "pretrain_gpt.py").read_text()
    assert check_patches.apply(check_patches.patch_for(folder), folder)
    assert (folder / "pretrain_gpt.py").read_text() == check_patches.add_our_lines(stock)


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the script of core_v0.19.0 under every name that we have patches for."""
    folder = checkout_for(ROOT / "patches/core_v0.19.0.patch", "0.19", tmp_path / "clone")
    git(folder, "init", "-q", "-b", "main")
    commit(folder)
    for patch in check_patches.PATCHES:
        for ref in patch.refs:
            if ref != "main":
                git(folder, "tag", ref)
    (tmp_path / "patches").mkdir()
    monkeypatch.setattr(check_patches, "FOLDER", tmp_path / "patches")
    return folder


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=Tests", "-c", "user.email=tests@example.com"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "A version")


def test_generate_writes_every_patch(clone: Path) -> None:
    check_patches.generate(clone)
    written = {path.name: path.read_text() for path in check_patches.FOLDER.iterdir()}
    assert set(written) == set(VERSIONS)
    lines = written["main.patch"].splitlines()
    committed = (ROOT / "patches/core_v0.19.0.patch").read_text().splitlines()
    changed = [line for line in lines if line.startswith("+")]
    assert changed == [line for line in committed if line.startswith("+")]


def test_generate_refuses_a_patch_that_does_not_fit_all_its_tags(clone: Path) -> None:
    script = clone / "pretrain_gpt.py"
    script.write_text(script.read_text().replace("_MAIN_ENTRY_TIME", "_START_TIME"))
    commit(clone)
    git(clone, "tag", "--force", "core_v0.18.0")
    with pytest.raises(ValueError, match=r"core_v0\.18\.x\.patch does not apply to core_v0\.18\.0"):
        check_patches.generate(clone)


def test_generate_refuses_a_script_without_our_places(clone: Path) -> None:
    script = clone / "pretrain_gpt.py"
    script.write_text(script.read_text().replace("if __name__", "if __name"))
    commit(clone)
    message = r"pretrain_gpt\.py of main has 0 times the line 'if __name__ == \"__main__\":'"
    with pytest.raises(ValueError, match=message):
        check_patches.generate(clone)

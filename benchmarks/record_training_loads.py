# SPDX-License-Identifier: Apache-2.0

"""Record the expert loads of a training whose text changes domain: data for the planner benchmark.

Trains `make train`'s model under plain EP, one domain of the corpus after the other, each for the
same number of iterations, resuming from checkpoints in between, and writes every iteration's
counts to benchmarks/data/training_loads.npz. Takes about five minutes on two cores.

    python -m benchmarks.record_training_loads [--iterations-per-domain 30]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from megatron_fssdp.integration.cpu_platform import MEGATRON_FLAGS
from megatron_fssdp.simulation.recording import read_recording
from scripts.train_demo import (
    MODEL_FLAGS,
    NUM_RANKS,
    ROOT,
    RUNS,
    TRAINING_FLAGS,
    children_environment,
    prepare_corpus,
)

OUTPUT = Path(__file__).parent / "data" / "training_loads.npz"


def train_domain(prefix: str, stop_at: int, num_iterations: int, folder: Path) -> np.ndarray:
    """Continue the training on one domain up to iteration `stop_at`.

    Returns:
        (iterations, layers, source ranks, experts) int32 counts of this domain.
    """
    log = folder / f"log{stop_at}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(NUM_RANKS), str(ROOT / "pretrain_gpt.py")]
    command += [*MEGATRON_FLAGS, *MODEL_FLAGS.split(), *TRAINING_FLAGS.split()]
    command += ["--train-iters", str(num_iterations), "--exit-interval", str(stop_at)]
    command += ["--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")]
    command += ["--data-path", prefix, "--data-cache-path", str(folder / "cache")]
    command += ["--save-interval", "1000", "--fssdp-record-trace", str(log)]
    subprocess.run(command, check=True, env=children_environment(), cwd=ROOT)
    return read_recording(log).counts_ILRE


def main() -> None:
    """Train through all domains and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations-per-domain", type=int, default=30)
    each = parser.parse_args().iterations_per_domain
    prefixes = [word for word in prepare_corpus(RUNS / "corpus") if word != "1"]
    with tempfile.TemporaryDirectory() as folder:
        counts = [
            train_domain(prefix, each * (index + 1), each * len(prefixes), Path(folder))
            for index, prefix in enumerate(prefixes)
        ]
    OUTPUT.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        OUTPUT,
        counts=np.concatenate(counts),
        domains=[Path(prefix).name for prefix in prefixes],
        iterations_per_domain=each,
    )
    print(f"wrote {OUTPUT}")


if __name__ == "__main__":
    main()

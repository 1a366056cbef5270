"""The three ways to start: our pretrain_gpt.py, the launcher, a patched script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fssdp.integration.cpu_platform import MEGATRON_FLAGS
from tests.integration.test_copy_options import SLOW_COMPUTE
from tests.pretrain import MODEL_FLAGS, ROOT, pretrain

# Parses like Megatron-LM's pretrain_gpt.py: with its own provider and its own defaults.
PARSING_SCRIPT = """
import json, sys
try:
    from megatron.training.arguments import parse_and_validate_args
except ImportError:
    # 0.17 parses in initialize_megatron, by these names of that module.
    from megatron.training.initialize import parse_args, validate_args

    def parse_and_validate_args(extra_args_provider, args_defaults):
        args = parse_args(extra_args_provider)
        validate_args(args, args_defaults)
        return args

def provider(parser):
    parser.add_argument("--theirs", default="unset")
    return parser

if __name__ == "__main__":
    args = parse_and_validate_args(
        extra_args_provider=provider, args_defaults={"tokenizer_type": "NullTokenizer"}
    )
    print("RESULT", json.dumps({
        "argv0": sys.argv[0], "path0": sys.path[0], "theirs": args.theirs,
        "moe_parallel": args.moe_parallel, "slots": args.fssdp_num_replica_slots,
        "has_layer": "megatron_fssdp.integration.layer" in sys.modules,
    }))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "somebodys_pretrain.py"
    path.write_text(PARSING_SCRIPT)
    return path


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher as one rank of two, up to the point where ranks would meet."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_fssdp.launch", *words],
        cwd=ROOT,
        env={**os.environ, "WORLD_SIZE": "2", "RANK": "0", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def parse(script: Path, *flags: str) -> dict:
    done = launch(str(script), *MEGATRON_FLAGS, *MODEL_FLAGS.split(), "--train-iters", "1", *flags)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return json.loads(line.removeprefix("RESULT"))


def test_launcher_chains_into_an_unmodified_script(script: Path) -> None:
    flags = ["--theirs", "set", "--moe-parallel", "fssdp", "--fssdp-num-replica-slots", "1"]
    assert parse(script, *flags) == {
        "argv0": str(script),
        "path0": str(script.parent),
        "theirs": "set",
        "moe_parallel": "fssdp",
        "slots": 1,
        "has_layer": True,
    }


def test_plain_ep_does_not_import_our_layer(script: Path) -> None:
    result = parse(script)
    assert (result["moe_parallel"], result["has_layer"]) == ("ep", False)


def test_launcher_stops_on_a_bad_flag(script: Path) -> None:
    flags = ["--moe-parallel", "fssdp", "--fssdp-num-replica-slots", "3"]
    done = launch(str(script), *MEGATRON_FLAGS, *MODEL_FLAGS.split(), "--train-iters", "1", *flags)
    assert done.returncode == 1
    assert "--fssdp-num-replica-slots 3 is more than the 2 experts" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [((), "first argument is the script"), (("no/such.py",), "There is no file no/such.py")],
)
def test_launcher_needs_a_script(words: tuple[str, ...], message: str) -> None:
    done = launch(*words)
    assert done.returncode == 1
    assert message in done.stderr


def test_launched_fssdp_trains_like_plain_ep() -> None:
    ep = pretrain("--train-iters", "3")
    assert ep.status == 0, ep.output
    entry = ("-m", "megatron_fssdp.launch", "pretrain_gpt.py")
    flags = ("--train-iters", "3", "--moe-parallel", "fssdp", "--fssdp-log-plan", "1")
    fssdp = pretrain(*flags, entry=entry)
    assert fssdp.status == 0, fssdp.output
    assert len(ep.losses) == 3
    # Megatron prints seven digits; the sums over replicas may change the last one.
    assert fssdp.losses == pytest.approx(ep.losses, rel=1e-5)
    assert fssdp.output.count("fssdp iteration") == 3


def test_pretrain_refuses_what_it_lacks() -> None:
    job = pretrain("--train-iters", "1", "--sft")
    assert job.status == 1
    assert "--sft is not supported by this pretrain_gpt.py" in job.output


@pytest.mark.slow
def test_moved_experts_are_saved_and_resumed_by_the_command_line(tmp_path: Path) -> None:
    """Owners change by the model's own decision; the checkpoint serves FSSDP and plain EP."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(SLOW_COMPUTE)
    common = (
        "--train-iters", "7", "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable",
    )  # fmt: skip
    fssdp = (
        *common, "--moe-parallel", "fssdp", "--fssdp-num-replica-slots", "0",
        "--fssdp-reshard-interval", "2", "--fssdp-sharding", "load", "--fssdp-check-plans",
        "--fssdp-cluster", str(cluster),
    )  # fmt: skip
    folder = str(tmp_path / "checkpoints")
    whole = pretrain(*fssdp, "--save", folder, "--save-interval", "4", "--async-save")
    assert whole.status == 0, whole.output
    assert "experts, " in whole.output
    assert "moved in" in whole.output
    resumed = pretrain(*fssdp, "--load", folder, "--ckpt-step", "4")
    assert resumed.status == 0, resumed.output
    assert "experts are where they were" in resumed.output
    assert resumed.grad_norms == whole.grad_norms[4:]
    assert resumed.losses[-1] == whole.losses[-1]
    ep = pretrain(*common, "--load", folder, "--ckpt-step", "4")
    assert ep.status == 0, ep.output
    assert ep.losses[-1] == pytest.approx(whole.losses[-1], rel=1e-5)
    assert ep.grad_norms == pytest.approx(whole.grad_norms[4:], abs=0.0011)

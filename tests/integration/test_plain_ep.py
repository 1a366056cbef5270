"""With the plugin registered and `--moe-parallel ep`, Megatron is Megatron.

Two processes train the same model through megatron.training's own parser and checks, one of them
with the plugin. What they leave behind must be the same bits, and Megatron's modules must hold
the same objects, but for the functions that integration/registration.py documents.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.integration.tiny import Job, TinyRun, Trained
from tests.ranks import run_ranks

# The only names that registering replaces: see the table in integration/registration.py.
REPLACED = {
    ("megatron.training.arguments", "add_megatron_arguments"),
    ("megatron.training.arguments", "validate_args"),
    ("megatron.training.yaml_arguments", "load_yaml"),
}

# Replaced too where it is: see `compat.modules_that_validate`.
IN_OLD_RELEASES = {("megatron.training.initialize", "validate_args")}

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --num-experts 8"
    " --max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 3"
    " --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --lr 1e-2"
    " --moe-router-load-balancing-type none --disable-bias-linear --tokenizer-type NullTokenizer"
    " --vocab-size 64 --mock-data"
)


def _attributes() -> dict[tuple[str, str], int]:
    """Every attribute of every Megatron module and of the classes in them, by identity."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "megatron" and module is not None:
            for key, value in vars(module).items():
                found[name, key] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    found |= {
                        (f"{name}.{key}", each): id(vars(value)[each]) for each in vars(value)
                    }
    return found


def _train(with_plugin: bool) -> tuple[Trained, list[tuple[str, str]]]:
    from megatron_fssdp.integration import cpu_platform
    from megatron_fssdp.integration.cpu_platform import MEGATRON_FLAGS

    # The same on both sides: it is what stands in for a GPU, and no part of registering.
    cpu_platform.enable(training=True)
    from megatron.training import arguments, checkpointing, training, yaml_arguments  # noqa: F401

    sys.argv = ["pretrain_gpt.py", *MEGATRON_FLAGS, *FLAGS.split()]
    changed = []
    before = _attributes()
    if with_plugin:
        from megatron_fssdp.integration import register

        register()
        sys.argv += ["--moe-parallel", "ep"]
    args = arguments.validate_args(arguments.parse_args())
    assert getattr(args, "moe_parallel", "ep") == "ep"
    after = _attributes()
    changed = [key for key, value in before.items() if after.get(key) != value]
    assert "megatron_fssdp.integration.layer" not in sys.modules
    return TinyRun(Job(ep=2, steps=3, num_microbatches=2)).train(), changed


def _bits(trained: Trained) -> list[Any]:
    return [trained.losses, trained.grad_norms]


def test_plain_ep_is_bit_equal_and_megatrons_modules_are_untouched() -> None:
    stock = run_ranks(2, _train, False)
    ours = run_ranks(2, _train, True)
    for (want, idle), (got, changed) in zip(stock, ours, strict=True):
        # What Megatron's own parser and checks change (caches, counters) is no affair of ours.
        assert set(changed) - set(idle) - IN_OLD_RELEASES == REPLACED
        assert _bits(got) == _bits(want)
        for name in ("params", "grads", "moments"):
            theirs, mine = getattr(want, name), getattr(got, name)
            assert theirs.keys() == mine.keys()
            assert theirs
            for key, tensor in theirs.items():
                assert torch.equal(mine[key], tensor), key

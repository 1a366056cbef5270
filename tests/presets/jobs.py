"""What the preset tests run in a process of their own: Megatron's parser, and models on meta."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from argparse import Namespace
from typing import Any

from megatron_fssdp.integration.cpu_platform import MEGATRON_FLAGS
from megatron_fssdp.presets.files import Args, merge, read_preset, to_words


def parse(words: list[str], world_size: int) -> Namespace:
    """Run Megatron's parser and checks with our flags, as the first rank of `world_size`."""
    from megatron.training import arguments

    os.environ.update(WORLD_SIZE=str(world_size), RANK="0")
    sys.argv = ["pretrain_gpt.py", *words]
    printed = io.StringIO()
    # argparse explains itself on stderr and exits.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
        try:
            args = arguments.parse_args()
            arguments.validate_args(args)
        except SystemExit as error:
            raise ValueError(printed.getvalue()) from error
    return args


def register() -> None:
    from megatron_fssdp.integration import register as register_plugin

    sys.argv = ["pretrain_gpt.py", *MEGATRON_FLAGS]
    register_plugin()


def check_command_lines(commands: dict[str, tuple[list[str], int]]) -> dict[str, str]:
    """Parse command lines; return by name what is wrong with each ("" if nothing)."""
    register()
    found = {}
    for name, (words, world_size) in commands.items():
        try:
            parse([*words, *MEGATRON_FLAGS], world_size)
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def count_parameters(names: list[str]) -> dict[str, dict[str, int]]:
    """Build each model, all its layers, on the meta device, and count its parameters by part.

    Expert parallelism as wide as there are experts leaves one expert a layer to build; it counts
    as many times as there are ranks. The other ranks are pretended.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.training.argument_utils import gpt_config_from_args
    from torch.testing._internal.distributed.fake_pg import FakeStore

    register()
    torch.cuda.current_device = lambda: "meta"  # where Megatron makes its parameters
    # Multi-latent attention needs Transformer Engine's kernel, which has no parameters either.
    stock_init = DotProductAttention.__init__
    DotProductAttention.__init__ = lambda self, *args, k_channels=0, v_channels=0, **options: (
        stock_init(self, *args, **options)
    )
    counts = {}
    for name in names:
        start = time.monotonic()
        preset = read_preset(name)
        num_experts = preset.args["--num-experts"]
        sizes: Args = {"--expert-model-parallel-size": num_experts, "--mock-data": True}
        sizes |= {"--micro-batch-size": 1, "--global-batch-size": num_experts}
        if preset.args.get("--multi-latent-attention") and "--q-lora-rank" not in preset.args:
            sizes["--qk-layernorm"] = False  # without Transformer Engine Megatron refuses it
        args = parse([*to_words(merge([preset.args, sizes])), *MEGATRON_FLAGS], num_experts)
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_experts)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=num_experts, create_gloo_process_groups=False
        )
        config = gpt_config_from_args(args)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        model = config.get_builder_cls()(config).build_model(groups)
        counts[name] = _count_by_part(model, num_experts)
        print(name, counts[name], time.monotonic() - start, flush=True)
    return counts


def _count_by_part(model: Any, num_experts: int) -> dict[str, int]:
    counts = dict.fromkeys(("embedding", "output", "mtp", "expert", "dense"), 0)
    for name, parameter in model.named_parameters():
        is_expert = not getattr(parameter, "allreduce", True)
        if name.startswith("embedding."):
            part = "embedding"
        elif name.startswith("output_layer."):
            part = "output"
        elif name.startswith("mtp."):
            part = "mtp"
        else:
            part = "expert" if is_expert else "dense"
        counts[part] += parameter.numel() * (num_experts if is_expert else 1)
    return counts

# SPDX-License-Identifier: Apache-2.0

"""Refuse settings that FSSDP would get wrong, before any process group exists.

Runs on every rank after Megatron's own checks, on the same arguments, so all ranks stop with the
same sentence: the flags, what was found, what is allowed, the way out.
"""

import functools
import os
from argparse import Namespace
from dataclasses import replace

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.integration.rules import RULES


def validate(args: Namespace) -> FSSDPConfig:
    """Check our flags alone, and against Megatron's if FSSDP is on.

    Returns:
        our settings.

    Raises:
        ValueError: one sentence for the user.
    """
    config = FSSDPConfig.from_args(args)
    if config.moe_parallel == "fssdp":
        config.check_experts(args.num_experts, args.expert_model_parallel_size)
        _check_sequence_parallel(args)
        _check_schedule(config, args)
        _check_fp8(args)
        config = _resharding(config, args)
        for rule in RULES:
            if clash := rule.clash(args):
                raise ValueError(
                    f"--moe-parallel fssdp does not work with {clash}: {rule.reason}; "
                    f"{rule.way_out}, or use --moe-parallel ep."
                )
    return config


def _check_sequence_parallel(args: Namespace) -> None:
    size = getattr(args, "tensor_model_parallel_size", 1)
    if size > 1 and not getattr(args, "sequence_parallel", False):
        raise ValueError(
            f"--moe-parallel fssdp does not work with --tensor-model-parallel-size {size} without "
            "--sequence-parallel: Megatron's MoE layers refuse to train so; add "
            "--sequence-parallel."
        )


def _check_schedule(config: FSSDPConfig, args: Namespace) -> None:
    if config.fssdp_etp_schedule != "fused":
        return
    dispatcher = args.moe_token_dispatcher_type
    if getattr(args, "expert_tensor_parallel_size", None) in (None, 1):
        raise ValueError(
            "--fssdp-etp-schedule fused joins the steps of expert tensor parallelism, and "
            "--expert-tensor-parallel-size is 1; use 2 or more, or --fssdp-etp-schedule auto."
        )
    if dispatcher != "alltoall":
        raise ValueError(
            "--fssdp-etp-schedule fused is a schedule of the alltoall dispatcher, and "
            f"--moe-token-dispatcher-type is {dispatcher}; use alltoall, or --fssdp-etp-schedule "
            "auto."
        )


def _check_fp8(args: Namespace) -> None:
    is_grouped = getattr(args, "moe_grouped_gemm", False)
    if getattr(args, "fp8", None) and (args.transformer_impl == "local" or not is_grouped):
        raise ValueError(
            "--moe-parallel fssdp computes in fp8 with Transformer Engine's grouped experts only; "
            "with --fp8-format add --moe-grouped-gemm --transformer-impl transformer_engine, or "
            "drop --fp8-format."
        )


def _resharding(config: FSSDPConfig, args: Namespace) -> FSSDPConfig:
    """Settle how often owners may change: never where other flags take their places for constant.

    Raises:
        ValueError: the user asked for it by number.
    """
    obstacle = _resharding_obstacle(args)
    if config.fssdp_owners is not None and config.fssdp_reshard_interval == 0:
        obstacle = ("--fssdp-owners", "it moves experts before the first iteration")
    elif obstacle is None or config.fssdp_reshard_interval == 0:
        return config
    flag, reason = obstacle
    if config.fssdp_reshard_interval is None and config.fssdp_owners is None:
        if os.environ.get("RANK", "0") == "0":
            print(f" fssdp: experts keep their owners, because of {flag}: {reason}", flush=True)
        return replace(config, fssdp_reshard_interval=0)
    raise ValueError(
        f"--fssdp-reshard-interval {config.reshard_interval} does not work with {flag}: {reason}; "
        "change that, or use --fssdp-reshard-interval 0 without --fssdp-owners."
    )


def _resharding_obstacle(args: Namespace) -> tuple[str, str] | None:
    """Return a flag that experts cannot change owners with, and why."""
    get = functools.partial(getattr, args)
    if get("use_precision_aware_optimizer", False):
        return "--use-precision-aware-optimizer", "its state cannot move between ranks"
    if get("optimizer_cpu_offload", False):
        return "--optimizer-cpu-offload", "its state cannot move between ranks"
    if not get("save", None):
        return None
    if get("ckpt_format", "torch_dist") != "torch_dist":
        return f"--ckpt-format {args.ckpt_format}", "it saves parameters by place (use torch_dist)"
    if get("ckpt_assume_constant_structure", False):
        return "--ckpt-assume-constant-structure", "it would save by the first checkpoint's owners"
    if get("non_persistent_ckpt_type", None) not in (None, "global"):
        return "--non-persistent-ckpt-type", "such checkpoints save parameters by place"
    by_expert = get("dist_ckpt_optim_fully_reshardable", False) or get("no_save_optim", False)
    if get("use_distributed_optimizer", False) and not by_expert:
        return (
            "--use-distributed-optimizer",
            "its checkpoints keep state by place (add --dist-ckpt-optim-fully-reshardable)",
        )
    return None

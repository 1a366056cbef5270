# SPDX-License-Identifier: Apache-2.0

"""What `gpu_check.py` checks of the dispatcher that is told: it has what a stock one finds."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_fssdp.integration.told_dispatch import ToldAlltoAllDispatcher
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.quotas import balance, messages_of
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import Topology

EXPERTS, TOPK, TOKENS, HIDDEN = 64, 8, 4096, 16
TOLD = ("num_out_tokens", "num_global_tokens_per_local_expert")


def check_told(device: torch.device) -> tuple[bool, float]:
    """Compare with a stock dispatcher on one rank, with and without fused permutation.

    A stock one finds counts on the device and copies them before it permutes; told, they are on
    the host at once, but for what a fused permutation reads on the device.
    """
    if device.type == "cpu":
        from megatron_fssdp.integration import cpu_platform

        cpu_platform.enable()
    owns_group = not dist.is_initialized()
    if owns_group:
        os.environ.setdefault("MASTER_ADDR", "localhost")
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    begin = time.perf_counter()
    is_equal = all(_compare(device, is_fused) for is_fused in (False, True))
    if owns_group:
        dist.destroy_process_group()
    return is_equal, 1e3 * (time.perf_counter() - begin)


def _compare(device: torch.device, is_fused: bool) -> bool:
    stock, told = (
        _dispatcher(kind, is_fused) for kind in (MoEAlltoAllTokenDispatcher, ToldAlltoAllDispatcher)
    )
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK, dim=1).indices
    routing = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)
    plan = plan_layers(
        None, shard_evenly(1, EXPERTS, 1), Topology.uniform(1), PlanSettings(num_replica_slots=0)
    ).layer(0)
    counts_RE = routing.sum(0, keepdim=True).numpy()
    told.tell(messages_of(counts_RE, balance(counts_RE, plan, (0,)), plan, (0,), 0))
    routing = routing.to(device)
    wanted = _found(stock, routing)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = told.preprocess(routing)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    tokens = told._maybe_dtoh_and_synchronize("before_permutation_1", tokens)
    found = _values(told, tokens)
    return all(_is_same(*pair) for pair in zip(found, wanted, strict=True))


def _found(dispatcher: Any, routing: torch.Tensor) -> list[Any]:
    """What a stock dispatcher knows once its copies to the host are there."""
    tokens = dispatcher.preprocess(routing)
    tokens = dispatcher._maybe_dtoh_and_synchronize("before_permutation_1", tokens)
    if routing.is_cuda:
        torch.cuda.synchronize()
    return _values(dispatcher, tokens)


def _values(dispatcher: Any, tokens: torch.Tensor) -> list[Any]:
    return [tokens, *(getattr(dispatcher, name) for name in TOLD)]


def _is_same(found: Any, wanted: Any) -> bool:
    if not torch.is_tensor(wanted):
        return int(found) == int(wanted)
    is_alike = (found.device, found.dtype) == (wanted.device, wanted.dtype)
    # One row a source rank, or on a single rank none.
    return is_alike and np.array_equal(found.cpu().ravel(), wanted.cpu().ravel())


def _dispatcher(kind: type, is_fused: bool) -> Any:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
    )
    config.moe_permute_fusion = is_fused
    groups = ProcessGroupCollection()
    groups.ep = groups.tp_ep = dist.group.WORLD
    groups.expt_tp = None
    indices = list(range(EXPERTS))
    return kind(EXPERTS, indices, config=config, pg_collection=groups)

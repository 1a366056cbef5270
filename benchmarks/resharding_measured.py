# SPDX-License-Identifier: Apache-2.0

"""Measured moves of experts: see `resharding.py`, which prints them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from moe_config import moe_config
from tables import Row
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from two_nodes import link_bytes, run_two_nodes

from megatron_fssdp.planning.moves import Homes
from megatron_fssdp.planning.plan import Int64Array

HIDDEN, FFN, MODEL_LAYERS, MODEL_EXPERTS, NUM_RANKS = 256, 1024, 4, 16, 4
MOVED = (1, 4, 16)
REPEATS = 5


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside and still alive; views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note what it made."""
        result = func(*args, **(kwargs or {}))
        known = {_storage(each).data_ptr() for each in _tensors((args, kwargs))}
        made = {_storage(each).data_ptr(): _storage(each) for each in _tensors(result)}
        for pointer, storage in made.items():
            if pointer not in known:
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def moving_model() -> tuple[Any, Any]:
    """Train a GPT-MoE for a step, so that it has optimizer state; return resharder and runtime."""
    from megatron_fssdp.integration import cpu_platform

    cpu_platform.enable()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    from megatron_fssdp.config import FSSDPConfig
    from megatron_fssdp.integration import spec

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=NUM_RANKS, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    runtime = spec.register(FSSDPConfig(moe_parallel="fssdp"))
    config = moe_config(
        num_layers=MODEL_LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=FFN,
        num_moe_experts=MODEL_EXPERTS,
        moe_router_topk=2,
        expert_model_parallel_size=NUM_RANKS,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    gpt = GPTModel(config, block, 64, max_sequence_length=16, position_embedding_type="rope")
    spec.prepare([gpt], runtime)
    spec.unregister()
    ddp_config = DistributedDataParallelConfig()
    model = DistributedDataParallel(config, ddp_config, Float16Module(config, gpt))
    settings = OptimizerConfig(lr=1e-3, bf16=True, params_dtype=torch.bfloat16)
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    runtime.owners.enable_moves(optimizer, parallel_state.get_expert_data_parallel_group(), None)
    tokens = torch.arange(16).unsqueeze(0)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    model.zero_grad_buffer()
    model(tokens, tokens, mask, labels=tokens).float().mean().backward()
    model.finish_grad_sync()
    optimizer.step()
    (resharder,) = runtime.owners.resharders.values()
    return resharder, runtime


def ring_on(homes: Homes, num_moved: int) -> Int64Array:
    """Let the experts in every rank's first homes move on to the next rank."""
    owner_LE = homes.owner_LE.copy()
    for rank in range(homes.num_ranks):
        layer, expert = homes.expert_of(rank)[:num_moved].T
        owner_LE[layer, expert] = (rank + 1) % homes.num_ranks
    return owner_LE


def run_moves(moved: tuple[int, ...]) -> list[dict[str, float]]:
    """Move `moved` experts of each rank. Runs on every rank."""
    torch.set_num_threads(1)
    resharder, runtime = moving_model()
    sent: list[int] = []
    stock: Callable[..., int] = resharder.mover.move
    resharder.mover.move = lambda *args: sent.append(stock(*args))
    results = []
    for number in moved:

        def move(number: int = number) -> Any:
            ownership = resharder.mover.ownership
            result = resharder.move(ring_on(ownership.homes, number))
            runtime.owners.after_reshard(ownership, result)
            assert result.is_done, result
            return result

        move()
        with LiveBytes() as live:
            move()
        seconds, bare, counted = [], [], 0
        for _ in range(REPEATS):
            dist.barrier()
            before = sum(link_bytes())
            result = move()
            dist.barrier()
            counted += sum(link_bytes()) - before
            seconds.append(result.took_s)
            expert_bytes = result.num_bytes // result.num_moves
            bare.append(bare_ring_s(expert_bytes, number))
        slowest = torch.tensor([seconds, bare], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        results.append(
            {
                "experts": result.num_moves,
                "sent": sent[-1],
                "planned": result.num_bytes,
                "expert_bytes": expert_bytes,
                "counted": counted / REPEATS,
                "s": slowest[0].median().item(),
                "bare_s": slowest[1].median().item(),
                "peak": live.peak,
            }
        )
    runtime.close()
    return results


def bare_ring_s(num_bytes: int, num_rounds: int) -> float:
    """Seconds in which ranks send one message each to the next, so many times."""
    rank, size = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(num_rounds):
        ops = [dist.P2POp(dist.irecv, incoming, (rank - 1) % size)]
        ops.append(dist.P2POp(dist.isend, outgoing, (rank + 1) % size))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return time.perf_counter() - begin


def measured_rows(moved: tuple[int, ...] = MOVED) -> list[Row]:
    """Move experts between real ranks."""
    by_rank = run_two_nodes(run_moves, moved, ranks_per_node=2, bytes_per_s=None, timeout_s=300)
    rows = []
    for number, results in zip(moved, zip(*by_rank, strict=True), strict=True):
        first = results[0]
        sent, peak = sum(each["sent"] for each in results), max(each["peak"] for each in results)
        rows.append(
            {
                "k": number,
                "experts": first["experts"],
                "MB": sent / 1e6,
                "sent / plan": sent / first["planned"],
                # Two of the ring's four messages cross the cable.
                "cable / plan": first["counted"] / (first["planned"] / 2),
                "ideal": 1.0,
                "ms": 1e3 * first["s"],
                "bare gloo ms": 1e3 * first["bare_s"],
                "MB/s a rank": sent / NUM_RANKS / first["s"] / 1e6,
                "peak MB": peak / 1e6,
                "2 experts MB": 2 * first["expert_bytes"] / 1e6,
                "holds": sent == first["planned"] and peak <= 2.02 * first["expert_bytes"],
            }
        )
    return rows

# SPDX-License-Identifier: Apache-2.0

"""The model that `copies.py` times: three transformer layers whose attention hides the copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from moe_config import moe_config

HIDDEN, FFN, EXPERTS, SEQUENCE, LAYERS = 512, 256, 4, 1024, 3


class AttentionClock:
    """Seconds that attention takes, forward."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._seconds: list[float] = []

    def watch(self, attention: torch.nn.Module) -> None:
        """Time a module's forwards."""
        attention.register_forward_pre_hook(self._start)
        attention.register_forward_hook(self._stop)

    def _start(self, *unused: Any) -> None:
        self._begin = time.perf_counter()

    def _stop(self, *unused: Any) -> None:
        self._seconds.append(time.perf_counter() - self._begin)

    def forget(self) -> None:
        """Begin anew."""
        self._seconds.clear()

    def forward_s(self) -> float:
        """Return the median of the forwards."""
        return statistics.median(self._seconds)


def overlap_model(overlap: str, clock: AttentionClock) -> tuple[Callable[[], None], Any]:
    """Build a model on 2 ranks, all of whose tokens go to rank 0's experts.

    Args:
        overlap: `--fssdp-overlap`.
        clock: to time the attention with.

    Returns:
        A training step that changes nothing, and the runtime.
    """
    from megatron_fssdp.integration import cpu_platform

    cpu_platform.enable()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_fssdp.config import FSSDPConfig
    from megatron_fssdp.integration import spec

    torch.set_num_threads(1)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=2, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    runtime = spec.register(
        FSSDPConfig(moe_parallel="fssdp", fssdp_num_replica_slots=1, fssdp_overlap=overlap)  # type: ignore[arg-type]
    )
    config = moe_config(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        expert_model_parallel_size=2,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
    )
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=64,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
    )
    spec.prepare([model], runtime)
    spec.unregister()
    for layer in model.decoder.layers:
        clock.watch(layer.self_attention)
        layer.mlp.router.forward = _route
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tokens = torch.arange(SEQUENCE).remainder(64).unsqueeze(0)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)

    def step() -> None:
        model(tokens, torch.arange(SEQUENCE).unsqueeze(0), mask, labels=tokens).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, runtime


def _route(*unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Send three quarters of the tokens to expert 0, the rest to expert 2 of the other rank."""
    routing_map = torch.zeros(SEQUENCE, EXPERTS, dtype=torch.bool)
    routing_map[: SEQUENCE * 3 // 4, 0] = True
    routing_map[SEQUENCE * 3 // 4 :, 2] = True
    return routing_map.float().requires_grad_(), routing_map

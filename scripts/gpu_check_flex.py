# SPDX-License-Identifier: Apache-2.0

"""What `gpu_check.py` checks of DeepEP and HybridEP, on two GPUs or more.

    torchrun --nproc-per-node 8 scripts/gpu_check_flex.py deepep

One FSSDP layer with replicas computes the same tokens with the flex dispatcher and with all-to-all;
outputs and gradients must agree to what bf16 keeps.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

HIDDEN, FFN, EXPERTS_PER_RANK, TOPK, TOKENS, STEPS = 1024, 512, 4, 2, 512, 3
BUFFERS = {"deepep": "Buffer", "hybridep": "HybridEPBuffer"}
# Largest difference over the largest value; bf16 keeps 8 bits, and results are added in another
# order.
TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-5}


def obstacle(backend: str) -> str | None:
    """Say why a backend cannot run here; None: it can."""
    try:
        found = hasattr(importlib.import_module("deep_ep"), BUFFERS[backend])
    except ImportError as error:
        return f"not run: deep_ep is not installed ({error})"
    if not found:
        return f"not run: the deep_ep installed here has no {BUFFERS[backend]}"
    if torch.cuda.device_count() < 2:
        return f"not run: needs 2 GPUs, found {torch.cuda.device_count()}"
    return None


def check_flex(backend: str) -> tuple[bool, float]:
    """Compare on all GPUs, in processes of their own."""
    start = time.perf_counter()
    ranks = torch.cuda.device_count()
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    answer = subprocess.run(
        [sys.executable, *command, __file__, backend], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        print(answer.stdout, answer.stderr, file=sys.stderr)
    return answer.returncode == 0, 1e3 * (time.perf_counter() - start)


def compare(backend: str, dtype: torch.dtype) -> dict[str, float]:
    """Return the largest relative differences of flex and all-to-all. Collective over the world."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    flex = {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": backend,
        "moe_router_dtype": "fp32",
    }
    results: list[dict[str, torch.Tensor]] = []
    weights: dict[str, Any] | None = None
    for dispatcher in ({"moe_token_dispatcher_type": "alltoall"}, flex):
        layer, runtime = _build(dtype, dispatcher)
        weights = layer.state_dict() if weights is None else weights
        layer.load_state_dict(weights)
        results.append(_run(layer, runtime, dtype))
        runtime.close()
    want, got = results
    return {
        name: ((got[name] - value).abs().max() / value.abs().max()).item()
        for name, value in want.items()
    }


def _build(dtype: torch.dtype, dispatcher: dict[str, Any]) -> tuple[Any, Any]:
    """Build an FSSDP layer of plain torch experts."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.transformer import TransformerConfig

    from megatron_fssdp.config import FSSDPConfig
    from megatron_fssdp.integration import spec

    num_experts = EXPERTS_PER_RANK * dist.get_world_size()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        ffn_hidden_size=FFN,
        moe_ffn_hidden_size=FFN,
        num_moe_experts=num_experts,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type="none",
        moe_grouped_gemm=True,
        expert_model_parallel_size=dist.get_world_size(),
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **dispatcher,
    )
    runtime = spec.register(FSSDPConfig(moe_parallel="fssdp"))
    builder = moe_module_specs.get_moe_module_spec_for_backend(
        LocalSpecProvider(), num_experts=num_experts, moe_grouped_gemm=True
    )
    layer = builder(config)
    spec.unregister()
    layer.set_layer_number(1)
    return layer, runtime


def _run(layer: Any, runtime: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Run steps whose routing is skewed and fixed; return the last one's output and gradients."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    num_experts = EXPERTS_PER_RANK * dist.get_world_size()
    popularity = 1.0 / torch.arange(1, num_experts + 1)
    chosen = torch.multinomial(popularity.expand(TOKENS, -1), TOPK, generator=generator)
    routing = torch.zeros(TOKENS, num_experts, dtype=torch.bool).scatter_(1, chosen, True)
    probs = torch.rand(TOKENS, num_experts, generator=generator) + 0.1
    inputs = torch.randn(TOKENS, 1, HIDDEN, generator=generator)
    device = next(layer.experts.parameters()).device
    routing = routing.to(device)
    probs = (probs.to(device) * routing).requires_grad_()
    inputs = inputs.to(device, dtype).requires_grad_()
    layer.router.forward = lambda *unused: (probs, routing)
    optimizer = torch.optim.SGD(layer.experts.parameters(), lr=0.0)
    runtime.watch_optimizers([optimizer])
    replicas: list[int] = []
    runtime.listeners.append(lambda record: replicas.append(record.num_replicas))
    for _ in range(STEPS):
        for each in (inputs, probs, *layer.experts.parameters()):
            each.grad = None
        output, _ = layer(inputs)
        output.float().square().mean().backward()
        optimizer.step()
    assert replicas[-1] > 0, "no expert was replicated: nothing is compared"
    grads = {name: weight.grad for name, weight in layer.experts.named_parameters()}
    tensors = {"output": output, "inputs": inputs.grad, "probs": probs.grad, **grads}
    return {name: tensor.detach().float() for name, tensor in tensors.items()}


def main() -> int:
    """Be one of the ranks."""
    backend = sys.argv[1]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    differences = compare(backend, torch.bfloat16)
    worst = max(differences, key=lambda name: differences[name])
    print(f"rank {dist.get_rank()}: {worst} differs by {differences[worst]:.4f}", flush=True)
    dist.destroy_process_group()
    # Not the worst alone: a maximum passes over NaN.
    is_good = all(value <= TOLERANCE[torch.bfloat16] for value in differences.values())
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

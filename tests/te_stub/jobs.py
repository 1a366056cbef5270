"""What the ranks of tests/integration/test_transformer_engine.py run, with TE in sight."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integration.tiny import Job, TinyRun, Trained


@dataclass(frozen=True, kw_only=True)
class LayerJob:
    """One MoE layer, trained by SGD under Megatron's DDP."""

    moe_parallel: str = "ep"
    ep: int = 2
    num_experts: int = 8
    hidden: int = 16
    ffn: int = 24
    tokens: int = 40  # of each rank
    iterations: int = 3
    num_microbatches: int = 1
    params_dtype: torch.dtype = torch.float32
    # Added to the router's logits: the skew. One number an expert, on all ranks alike.
    logit_bias: tuple[float, ...] = (3.0, 2.5, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    model: dict[str, Any] = field(default_factory=dict)
    fssdp: dict[str, Any] = field(default_factory=dict)
    # Settings of Megatron's DDP.
    ddp: dict[str, Any] = field(default_factory=dict)

    def as_fssdp(self, **settings: Any) -> LayerJob:
        return replace(self, moe_parallel="fssdp", fssdp={**self.fssdp, **settings})


@dataclass
class LayerRun:
    """What a layer's training leaves on one rank; lists have one entry an iteration."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    # By parameter name, and "input".
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    rows_R: list[list[int]] = field(default_factory=list)
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    # Without gradients, in eval mode, after the last iteration (as after each).
    eval_output: torch.Tensor | None = None


def pickled(fn: Callable, *args: Any) -> bytes:
    """Call a function, for a caller that hands its result on without Megatron."""
    return pickle.dumps(fn(*args))


def _see_te() -> None:
    """Before anything imports Megatron, which looks for TE once. Done already where preloaded."""
    importlib.import_module("tests.te_stub.preload")
    from megatron_fssdp.integration import cpu_platform

    cpu_platform.enable()
    from megatron.core.tensor_parallel import random

    # Stock compiles C++ for it, on the first recompute.
    random._get_share_storage = lambda: _give_storage


def _give_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Fill an output that was discarded, and with it all views of it."""
    storage = recomputed.untyped_storage()
    output.untyped_storage().resize_(storage.nbytes())
    output.untyped_storage().copy_(storage)


def _start(job: LayerJob) -> None:
    """Make the process groups and the random state, the same for every job."""
    _see_te()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=job.ep, create_gloo_process_groups=False
    )
    torch.manual_seed(5)
    tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)


def _config(job: LayerJob) -> Any:
    from megatron.core.transformer import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": job.hidden,
        "num_attention_heads": 2,
        "ffn_hidden_size": job.ffn,
        "moe_ffn_hidden_size": job.ffn,
        "num_moe_experts": job.num_experts,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
        "expert_model_parallel_size": job.ep,
        "params_dtype": job.params_dtype,
        "bf16": job.params_dtype is torch.bfloat16,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        # As by default in Megatron: TE's products add weights' gradients to main_grad.
        "gradient_accumulation_fusion": True,
    }
    return TransformerConfig(**{**settings, **job.model})


def _build(job: LayerJob) -> tuple[torch.nn.Module, Any]:
    """Build the layer from Megatron's own spec; returns it and the runtime (None for EP)."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from megatron_fssdp.config import FSSDPConfig
    from megatron_fssdp.integration import spec

    runtime = None
    if job.moe_parallel == "fssdp":
        runtime = spec.register(FSSDPConfig(moe_parallel="fssdp", **job.fssdp))
        runtime.num_microbatches = lambda: job.num_microbatches
    try:
        builder = moe_module_specs.get_moe_module_spec_for_backend(
            TESpecProvider(), num_experts=job.num_experts, moe_grouped_gemm=True
        )
        config = _config(job)
        with get_fp8_context(config, is_init=True):
            layer = builder(config)
    finally:
        spec.unregister()
    assert isinstance(layer.experts, TEGroupedMLP)
    layer.set_layer_number(1)
    return layer, runtime


def train_layer(job: LayerJob, end_iteration: Callable | None = None) -> LayerRun:
    """Train one layer on this rank; `end_iteration` is called with layer, runtime and DDP."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.fp8_utils import get_fp8_context

    _start(job)
    layer, runtime = _build(job)
    run = LayerRun()
    if runtime is not None:

        def listen(record: Any) -> None:
            run.replicas.append(record.num_replicas)
            run.rows_R.append(record.loads_LR[0].tolist())

        runtime.listeners.append(listen)
    bias = torch.tensor(job.logit_bias)
    gating = layer.router.gating
    layer.router.gating = lambda *args: gating(*args) + bias
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" in name:  # Megatron starts them at zero
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()))
    settings = DistributedDataParallelConfig(**job.ddp)
    model = DistributedDataParallel(layer.config, settings, layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())

    def random_rows() -> torch.Tensor:
        rows = torch.randn(job.tokens, 1, job.hidden, generator=generator)
        return rows.to(job.params_dtype)

    for _ in range(job.iterations):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        layer.set_is_first_microbatch()
        for _ in range(job.num_microbatches):
            rows = random_rows().requires_grad_()
            with get_fp8_context(layer.config):
                output, _ = model(rows)
            (output * random_rows()).sum().backward()
        model.finish_grad_sync()
        if end_iteration is not None:
            end_iteration(layer, runtime, model)
        run.outputs.append(output.detach())
        grads = {name: p.main_grad.clone() for name, p in layer.named_parameters()}
        run.grads.append({**grads, "input": rows.grad})
        for parameter in layer.parameters():
            parameter.grad = parameter.main_grad.to(parameter.dtype) / job.tokens
        optimizer.step()
        layer.eval()
        layer.set_is_first_microbatch()
        with torch.no_grad(), get_fp8_context(layer.config):
            run.eval_output, _ = layer(random_rows())
        layer.train()
    run.params = {name: _plain(p).clone() for name, p in layer.named_parameters()}
    if runtime is not None:
        runtime.close()
    return run


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter, which may be in fp8."""
    with torch.no_grad():
        return parameter.dequantize() if hasattr(parameter, "get_metadata") else parameter.detach()


def train_layers(jobs: list[LayerJob]) -> list[LayerRun]:
    return [train_layer(job) for job in jobs]


def describe_layer(job: LayerJob) -> dict[str, Any]:
    """Build a layer and tell what it is made of."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    _start(job)
    layer, runtime = _build(job)
    facts: dict[str, Any] = {
        "params": {name: p.detach().clone() for name, p in layer.named_parameters()},
        "state": list(layer.state_dict()),
        "random": torch.get_rng_state(),
        "tracked": get_cuda_rng_tracker().get_states(),
    }
    if runtime is not None:
        runtime.close()
        slots = layer._slot_experts
        linears = (slots.module.linear_fc1, slots.module.linear_fc2)
        facts.update(
            num_slots=runtime.owners.num_slots(0),
            families=slots.families,
            owned=[
                [_name_of(weight, layer.experts) for weight in expert]
                for expert in map(slots.home_weights, range(layer.num_local_experts))
            ],
            slot_names=[name for name, _ in slots.module.named_parameters()],
            real_bytes=sum(_real_bytes(module) for module in slots.module.modules()),
            fused=[linear.fuse_wgrad_accumulation for linear in linears],
            stock_fused=[
                layer.experts.linear_fc1.fuse_wgrad_accumulation,
                layer.experts.linear_fc2.fuse_wgrad_accumulation,
            ],
            stock_config={
                name: getattr(layer.config, name)
                for name in (
                    "gradient_accumulation_fusion",
                    "init_model_with_meta_device",
                    "perform_initialization",
                    "use_cpu_initialization",
                )
            },
        )
    return facts


def _name_of(weight: torch.Tensor, module: torch.nn.Module) -> str:
    return next(name for name, parameter in module.named_parameters() if parameter is weight)


def _real_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's own tensors that are not meta, registered or not."""
    tensors = [*module.__dict__.values(), *module._parameters.values(), *module._buffers.values()]
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta
    )


def draw_nothing(job: LayerJob) -> bool:
    """Whether building the slots' module leaves every random state alone."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megatron_fssdp.integration.slot_experts import build_slot_experts

    _start(job)
    layer, _ = _build(job)
    before = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    build_slot_experts(layer.experts, 6, layer.submodules.experts, _groups())
    after = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    return torch.equal(before[0], after[0]) and all(
        torch.equal(before[1][name], after[1][name]) for name in before[1]
    )


def _groups() -> Any:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    return get_default_pg_collection()


def build_with_other_names(job: LayerJob, rename: str) -> str:
    """Build slots over modules whose parameters TE has renamed; returns the complaint."""
    from megatron_fssdp.integration.slot_experts import build_slot_experts

    _start(job)
    layer, _ = _build(job)

    def renamed(*args: Any, **kwargs: Any) -> torch.nn.Module:
        module = layer.submodules.experts(*args, **kwargs)
        return _rename(module) if rename == "slots" else module

    experts = _rename(layer.experts) if rename == "owned" else layer.experts
    try:
        build_slot_experts(experts, 6, renamed, _groups())
    except RuntimeError as error:
        return str(error)
    return ""


def _rename(module: Any) -> Any:
    """Give one of the weights the name that a grouped parameter would have."""
    linear = module.linear_fc2
    weight = linear._parameters.pop("weight1")
    linear.register_parameter("weight", weight)
    return module


def optimizer_hook_runs() -> bool:
    """Whether a step of TE's FusedAdam, Megatron's optimizer on a cluster, ends an iteration."""
    _see_te()
    import transformer_engine.pytorch as te
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = []
    hook = register_optimizer_step_post_hook(lambda *unused: steps.append(1))
    # No gradient: none of its kernels runs.
    te.optimizers.FusedAdam([torch.nn.Parameter(torch.zeros(2))]).step()
    hook.remove()
    return steps == [1]


def find_gradients(job: LayerJob) -> list[dict[str, int]]:
    """Train, and tell where TE's products put the weights' gradients, an iteration an entry.

    An entry counts outputs by the memory that they are in; parameters that do not say that their
    gradient is in main_grad, and those whose gradient is not zero.
    """
    _start(job)
    tex = importlib.import_module("transformer_engine_torch")
    product = tex.te_general_grouped_gemm
    outputs: list[torch.Tensor] = []

    def listen(A: Any, transa: bool, B: Any, transb: bool, D: Any, *rest: Any) -> Any:
        if transb and not transa:  # weights' gradients
            assert rest[-3], "overwrites main_grad"
            assert len({out.dtype for out in D}) == 1, "one product, two types"
            outputs.extend(D)
        return product(A, transa, B, transb, D, *rest)

    iterations: list[dict[str, int]] = []

    def end_iteration(layer: Any, runtime: Any, model: Any) -> None:
        homes: dict[int, str] = {}
        for buffer in model.expert_parallel_buffers:
            homes[buffer.grad_data.untyped_storage().data_ptr()] = "main_grad"
        transport = runtime._layers[0].shared.transport
        for rows in (*transport._sums, transport._scrap):
            if rows._rows is not None:
                name = "scrap" if rows is transport._scrap else "sums"
                homes[rows._rows.untyped_storage().data_ptr()] = name
        found = dict.fromkeys(("main_grad", "sums", "scrap", "elsewhere"), 0)
        for out in outputs:
            found[homes.get(out.untyped_storage().data_ptr(), "elsewhere")] += 1
        found["unmarked"] = sum(
            not parameter.grad_added_to_main_grad
            for name, parameter in layer.experts.named_parameters()
            if "weight" in name
        )
        found["nonzero"] = sum(bool(p.main_grad.any()) for p in layer.experts.parameters())
        outputs.clear()
        iterations.append(found)

    tex.te_general_grouped_gemm = listen
    try:
        train_layer(job, end_iteration)
    finally:
        tex.te_general_grouped_gemm = product
    return iterations


def count_quantized_weights(job: LayerJob) -> list[int]:
    """Train in fp8, and tell how many weights TE quantizes in each iteration."""
    _start(job)
    tex = importlib.import_module("transformer_engine_torch")
    quantize = tex.quantize
    counts = [0]

    def listen(*args: Any) -> Any:
        counts[-1] += 1
        return quantize(*args)

    tex.quantize = listen
    try:
        train_layer(job, lambda *unused: counts.append(0))
    finally:
        tex.quantize = quantize
    return counts[:-1]


def check_on_one_device() -> list[tuple[str, bool | None, str]]:
    """Run what scripts/gpu_check.py checks of TE's experts."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    gpu_check_te = importlib.import_module("gpu_check_te")
    return list(gpu_check_te.check_te(torch.device("cpu")))


class TETinyRun(TinyRun):
    """The tiny GPT with local attention and TE's experts."""

    def __init__(self, job: Job) -> None:
        _see_te()
        super().__init__(job)

    def _model(self) -> list[torch.nn.Module]:
        from unittest import mock

        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
        from megatron.core.models.backends import LocalSpecProvider
        from megatron.core.transformer.moe.experts import TEGroupedMLP

        experts = TESpecProvider().grouped_mlp_modules
        with mock.patch.object(
            LocalSpecProvider, "grouped_mlp_modules", lambda self, grouped: experts(grouped)
        ):
            chunks = super()._model()
        modules = [module for chunk in chunks for module in chunk.modules()]
        assert any(isinstance(module, TEGroupedMLP) for module in modules)
        return chunks

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        from megatron.core import parallel_state

        per_rank = self.job.num_experts // self.job.ep
        first = parallel_state.get_expert_model_parallel_rank() * per_rank
        pattern = re.compile(r"(experts\.linear_fc\d\.[a-z_]+)(-?\d+)(?= \[|$)")
        return {
            pattern.sub(lambda match: f"{match[1]}{int(match[2]) + first}", name): parameter
            for name, parameter in super().named_parameters().items()
        }


def train_models(jobs: list[Job]) -> list[Trained]:
    return [TETinyRun(job).train() for job in jobs]


def train_local_models(jobs: list[Job]) -> list[Trained]:
    """Train models with Megatron's own experts, SequentialMLP."""
    _see_te()
    return [TinyRun(job).train() for job in jobs]

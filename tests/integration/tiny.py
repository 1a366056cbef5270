"""A tiny Megatron GPT-MoE trained on gloo ranks, plain EP or FSSDP: what the equality tests run.

Built from megatron.core directly (GPTModel, DDP, Megatron's optimizer, its pipeline schedule):
the parts that a training job runs, without its command line.
"""

from __future__ import annotations

import copy
import hashlib
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.integration.shards import cut, plain_name, shard_name, whole_shape

VOCAB = 64
# Of megatron-core before 0.18, by today's.
OLD_NAMES = {"moe_flex_dispatcher_num_sms": "moe_deepep_num_sms"}
_OPTIMIZER_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run. Everything that decides its numbers is here."""

    moe_parallel: str = "ep"
    ep: int = 2
    tp: int = 1
    etp: int = 1
    pp: int = 1
    # Model chunks of a rank (interleaved pipeline), and context parallelism.
    vpp: int = 1
    cp: int = 1
    steps: int = 5
    num_experts: int = 8
    topk: int = 2
    num_layers: int = 2
    global_batch: int = 16
    sequence: int = 16
    num_microbatches: int = 1
    dispatcher: str = "alltoall"
    optimizer: str = "adam"
    lr: float = 1e-3
    clip_grad: float = 1.0
    distributed_optimizer: bool = False
    optimizer_instances: int = 1
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    params_dtype: torch.dtype = torch.float32
    router_skew: float = 2.0
    # Experts that every token of a rank is sent to: one list a rank (the lists repeat).
    forced_experts: tuple[tuple[int, ...], ...] | None = None
    # Every so many steps experts get random new owners, 0 to E of a layer on a rank.
    reshard_every: int = 0
    # So many of each row's last tokens are padding.
    num_padding: int = 0
    # Parameters whose name contains this are frozen before DDP sees them.
    freeze: str | None = None
    # Keep Megatron's own initialization (its random numbers), to compare that too.
    stock_init: bool = False
    fssdp: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    def as_fssdp(self, **settings: Any) -> Job:
        return replace(self, moe_parallel="fssdp", fssdp={**self.fssdp, **settings})


@dataclass
class Trained:
    """What a run leaves behind on one rank. Expert entries are keyed by global expert id."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    # This rank's buffers: with the distributed optimizer only its shard is reduced over ranks.
    local_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    replicas: list[int] = field(default_factory=list)
    imbalance: list[tuple[float, float]] = field(default_factory=list)
    calibrated: int = 0
    reshards: list[Any] = field(default_factory=list)


class TinyRun:
    """One job on this rank: model, optimizer and data; `train()` runs its steps."""

    def __init__(self, job: Job) -> None:
        from megatron_fssdp.integration import cpu_platform

        cpu_platform.enable()
        from megatron.core import parallel_state, tensor_parallel

        self.job = job
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=job.tp,
            pipeline_model_parallel_size=job.pp,
            virtual_pipeline_model_parallel_size=job.vpp if job.vpp > 1 else None,
            context_parallel_size=job.cp,
            num_distributed_optimizer_instances=job.optimizer_instances,
            expert_model_parallel_size=job.ep,
            expert_tensor_parallel_size=job.etp,
            create_gloo_process_groups=False,
        )
        torch.manual_seed(1234)
        tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        self.result = Trained()
        self.config = self._config()
        self.model = self._model()
        if not job.stock_init:
            self._make_reproducible()
        if job.forced_experts is not None:
            self._force_routing(job.forced_experts)
        self.optimizer = self._optimizer()
        if job.moe_parallel == "fssdp":
            self.runtime.owners.enable_moves(
                self.optimizer,
                parallel_state.get_expert_data_parallel_group(),
                self._sync_parameters if job.overlap_param_gather else None,
            )

    def _sync_parameters(self) -> None:
        for chunk in self.model:
            chunk.start_param_sync(force_sync=True)

    def _config(self) -> Any:
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig

        job = self.job
        settings: dict[str, Any] = {
            "num_layers": job.num_layers,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "ffn_hidden_size": 48,
            "moe_ffn_hidden_size": 48,
            "num_moe_experts": job.num_experts,
            "moe_router_topk": job.topk,
            "moe_token_dispatcher_type": job.dispatcher,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": True,
            "expert_model_parallel_size": job.ep,
            "expert_tensor_parallel_size": job.etp,
            "tensor_model_parallel_size": job.tp,
            "pipeline_model_parallel_size": job.pp,
            "virtual_pipeline_model_parallel_size": job.vpp if job.vpp > 1 else None,
            "context_parallel_size": job.cp,
            "sequence_parallel": job.tp > 1,
            "pipeline_dtype": job.params_dtype,
            "params_dtype": job.params_dtype,
            "bf16": job.params_dtype is torch.bfloat16,
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "bias_activation_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "gradient_accumulation_fusion": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "deterministic_mode": False,
        }
        kind = TransformerConfig
        if job.model.get("multi_latent_attention"):
            kind = MLATransformerConfig
        known = {field.name for field in fields(kind)}
        model = {name if name in known else OLD_NAMES[name]: v for name, v in job.model.items()}
        return kind(**{**settings, **model})

    def _model(self) -> list[torch.nn.Module]:
        """Build this rank's model chunks."""
        from megatron_fssdp.integration import spec

        job = self.job
        if job.moe_parallel == "fssdp":
            from megatron_fssdp.config import FSSDPConfig

            self.runtime = spec.register(FSSDPConfig(moe_parallel="fssdp", **job.fssdp))
            self.runtime.listeners.append(self._listen)
        try:
            chunks = [self._chunk(number) for number in range(job.vpp)]
            if job.moe_parallel == "fssdp":
                spec.prepare(chunks, self.runtime)
                self.runtime.num_microbatches = lambda: job.num_microbatches
        finally:
            spec.unregister()
        return [self._wrap(chunk, number) for number, chunk in enumerate(chunks)]

    def _chunk(self, number: int) -> torch.nn.Module:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_mtp_block_spec,
        )

        job, stage = self.job, {"ignore_virtual": False, "vp_stage": number}
        block = get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=False, vp_stage=number
        )
        if job.cp > 1 or self.config.multi_latent_attention:
            for layer in block.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = attention_on_cpus()
        mtp = None
        if self.config.mtp_num_layers:
            mtp = get_gpt_mtp_block_spec(
                self.config, block, use_transformer_engine=False, vp_stage=number
            )
        return GPTModel(
            self.config,
            block,
            vocab_size=VOCAB,
            max_sequence_length=job.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            mtp_block_spec=mtp,
            vp_stage=number,
        )

    def _wrap(self, model: torch.nn.Module, number: int) -> torch.nn.Module:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )

        job = self.job
        for name, parameter in model.named_parameters():
            if job.freeze is not None and job.freeze in name:
                parameter.requires_grad_(False)
        if job.params_dtype is torch.bfloat16:
            from megatron.core.transformer.module import Float16Module

            model = Float16Module(self.config, model)
        return DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=job.distributed_optimizer,
                overlap_grad_reduce=job.overlap_grad_reduce,
                overlap_param_gather=job.overlap_param_gather,
                bucket_size=4000 if job.overlap_grad_reduce else None,
                num_distributed_optimizer_instances=job.optimizer_instances,
            ),
            model,
            # As Megatron does: only the first chunk's reduction has nothing else to hide under.
            disable_bucketing=number > 0,
        )

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by a name that does not depend on the layout: global expert and layer ids.

        A shard of a tensor-parallel parameter adds which one it is (see `shards`).
        """
        from megatron.core import parallel_state

        per_rank = self.job.num_experts // self.job.ep
        first = parallel_state.get_expert_model_parallel_rank() * per_rank
        named = {}
        for model in map(_unwrapped, self.model):
            layers = model.decoder.layers
            offset = layers[0].layer_number - 1 if len(layers) else 0
            place_of = self._places(model)
            for name, parameter in model.named_parameters():
                if parameter in place_of:
                    layer, expert = place_of[parameter]
                    name = _at_expert(layer + name[name.index(".mlp.experts.") :], expert - first)
                parts = name.split(".")
                if "local_experts" in parts:
                    place = parts.index("local_experts") + 1
                    parts[place] = str(int(parts[place]) + first)
                if parts[:2] == ["decoder", "layers"]:
                    parts[2] = str(int(parts[2]) + offset)
                named[shard_name(".".join(parts), parameter)] = parameter
        return named

    def _places(self, model: torch.nn.Module) -> dict[torch.nn.Parameter, tuple[str, int]]:
        """The layer (by its name in the chunk) and expert that each expert parameter holds."""
        if self.job.moe_parallel != "fssdp":
            return {}
        from megatron_fssdp.integration.layer import FSSDPMoELayer

        layers: dict[Any, list[str]] = {}
        for name, module in model.named_modules():
            if isinstance(module, FSSDPMoELayer):
                ownership, _ = self.runtime.owners.home(module._index)
                layers.setdefault(ownership, []).append(name.removesuffix(".mlp"))
        return {
            weight: (layers[ownership][position], expert)
            for ownership in layers
            for home, (position, expert) in enumerate(ownership.homes.expert_of(ownership.rank))
            for weight in ownership.weights(home)
        }

    def _make_reproducible(self) -> None:
        """Give every parameter values that depend on its layout-free name only."""
        for name, parameter in self.named_parameters().items():
            if "norm" in name or "layernorm" in name:
                continue
            seed = int.from_bytes(hashlib.sha256(plain_name(name).encode()).digest()[:4], "big")
            generator = torch.Generator().manual_seed(seed)
            shape = whole_shape(name, parameter.shape)
            values = torch.randn(shape, generator=generator) * 0.05
            if "router.weight" in name:
                # Expert e's logits grow with e's place in a fixed order: routing is skewed.
                order = torch.randperm(values.shape[0], generator=generator).unsqueeze(1)
                values = values * self.job.router_skew * (1 + order / 2)
            with torch.no_grad():
                parameter.copy_(cut(name, values))

    def _force_routing(self, experts: tuple[tuple[int, ...], ...]) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        bias = torch.zeros(self.job.num_experts)
        bias[list(experts[dist.get_rank() % len(experts)])] = 30.0
        for module in (each for chunk in self.model for each in chunk.modules()):
            if isinstance(module, TopKRouter):
                gating = module.gating
                module.gating = lambda x, gating=gating: gating(x) + bias  # type: ignore[method-assign]

    def _optimizer(self) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        job = self.job
        config = OptimizerConfig(
            optimizer=job.optimizer,
            lr=job.lr,
            weight_decay=0.01,
            clip_grad=job.clip_grad,
            bf16=job.params_dtype is torch.bfloat16,
            params_dtype=job.params_dtype,
            use_distributed_optimizer=job.distributed_optimizer,
            overlap_param_gather=job.overlap_param_gather,
            sgd_momentum=0.0,
            # Said again, because `in_double` changes what it means.
            **dict.fromkeys(_OPTIMIZER_DTYPES, torch.float32),
        )
        return get_megatron_optimizer(config, self.model, use_gloo_process_groups=False)

    def _batches(self, step: int) -> list[torch.Tensor]:
        """This rank's micro-batches: the global batch's rows, dealt out by data-parallel rank."""
        from megatron.core import parallel_state

        job = self.job
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(0, VOCAB, (job.global_batch, job.sequence + 1), generator=generator)
        # A few tokens dominate, as in text: it makes the routing skewed.
        rows = torch.where(torch.rand(rows.shape, generator=generator) < 0.5, rows % 5, rows)
        dp, rank = (
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_data_parallel_rank(),
        )
        mine = rows.chunk(dp)[rank]
        return list(mine.chunk(job.num_microbatches))

    def _forward_step(self, iterator: Any, model: torch.nn.Module) -> Any:
        rows = next(iterator)
        places = positions_of_rank(self.job.sequence)
        tokens, labels = rows[:, places], rows[:, places + 1]
        positions = places.unsqueeze(0).expand_as(tokens)
        mask = torch.ones(1, 1, *[self.job.sequence] * 2, dtype=torch.bool).triu(1)
        is_padding = positions >= self.job.sequence - self.job.num_padding
        padding = {"padding_mask": is_padding} if self.job.num_padding else {}
        output = model(tokens, positions, mask, labels=labels, **padding)

        def loss_func(losses: torch.Tensor) -> tuple[Any, ...]:
            loss = losses.float()[~is_padding].mean()
            if self.config.calculate_per_token_loss:
                num_tokens = (~is_padding).sum().int()
                return loss * num_tokens, num_tokens, {"loss": loss.detach().clone()}
            # Cloned: the schedule scales the loss in place.
            return loss, {"loss": loss.detach().clone()}

        return output, loss_func

    def _listen(self, record: Any) -> None:
        self.result.replicas.append(sum(plan.num_replicas for plan in record.plans))
        self.result.calibrated += sum(each.num_new for each in record.calibrations)
        for counts, loads, plan in zip(
            record.counts_LRE, record.loads_LR, record.plans, strict=True
        ):
            assert loads.sum() == counts.sum()
            owned = [counts.sum(0)[plan.owner_E == rank].sum() for rank in range(len(loads))]
            mean = counts.sum() / len(loads)
            self.result.imbalance.append((max(owned) / mean, loads.max() / mean))

    def reshard(self, seed: int) -> list[Any]:
        """Give all experts random owners; every rank keeps its number of them in total."""
        rng, results = np.random.default_rng(seed), []
        for resharder in self.runtime.owners.resharders.values():
            ownership = resharder.mover.ownership
            owners = rng.permutation(ownership.owner_LE.ravel())
            result = resharder.move(owners.reshape(ownership.owner_LE.shape))
            self.runtime.owners.after_reshard(ownership, result)
            results.append(result)
        return results

    def step(self, step: int) -> float:
        """Run one training step and return the mean loss over all data."""
        if self.job.reshard_every and step and step % self.job.reshard_every == 0:
            self.result.reshards += self.reshard(step)
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.config.finalize_model_grads_func = finalize_model_grads
        if self.job.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.model]
            self.config.no_sync_func = no_sync if self.job.vpp > 1 else no_sync[0]
        self.config.grad_scale_func = None
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [iter(self._batches(step)) for _ in self.model]
        losses = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iterators if self.job.vpp > 1 else iterators[0],
            model=self.model,
            num_microbatches=self.job.num_microbatches,
            seq_length=self.job.sequence,
            micro_batch_size=self.job.global_batch
            // self.job.num_microbatches
            // parallel_state.get_data_parallel_world_size(),
            forward_only=False,
        )
        if step == self.job.steps - 1:
            self.result.local_grads = {
                name: parameter.main_grad.clone()
                for name, parameter in self.named_parameters().items()
                if parameter.requires_grad
            }
            if not self.job.distributed_optimizer:
                self.result.grads = self.result.local_grads
        _, grad_norm, _ = self.optimizer.step()
        loss = torch.zeros(())
        if parallel_state.is_pipeline_last_stage():
            loss = torch.stack([entry["loss"] for entry in losses]).mean()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(loss, group=group)
        loss /= group.size()
        self.result.losses.append(loss.item())
        self.result.grad_norms.append(float(grad_norm))
        return loss.item()

    def train(self, first: int = 0) -> Trained:
        """Run the job's steps from number `first` and collect what is left."""
        for step in range(first, self.job.steps):
            self.step(step)
        if self.job.overlap_param_gather:
            # The last step's parameters would otherwise be gathered in the next forward.
            for chunk in self.model:
                chunk.disable_forward_pre_hook()
        self.result.params = {
            name: parameter.detach().clone() for name, parameter in self.named_parameters().items()
        }
        self.result.moments = self._moments()
        if self.job.moe_parallel == "fssdp":
            self.runtime.close()
        return self.result

    def _sharded_state(self, *, is_loading: bool, with_optimizer: bool = True) -> dict[str, Any]:
        """What megatron.training would save: model and optimizer, by Megatron's own rules."""
        from megatron.core import parallel_state

        metadata = {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        if self.job.distributed_optimizer:
            metadata["distrib_optim_sharding_type"] = "fully_reshardable"
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
        state = {"model": self.model[0].module.sharded_state_dict(metadata=metadata)}
        if with_optimizer:
            state["optimizer"] = self.optimizer.sharded_state_dict(
                state, is_loading=is_loading, metadata=metadata
            )
        return state

    def save(self, folder: str, queue: Any = None) -> None:
        """Write a torch_dist checkpoint; in the background, if given Megatron's queue for that."""
        from megatron.core import dist_checkpointing

        state = self._sharded_state(is_loading=False)
        if self.job.moe_parallel == "fssdp":
            from megatron_fssdp.integration import saved_state

            state["fssdp"] = saved_state.describe(self.runtime)
        # "mcore": the default needs a package that no test has.
        request = dist_checkpointing.save(
            state, folder, async_sharded_save=queue is not None, async_strategy="mcore"
        )
        if queue is not None:
            queue.schedule_async_request(request)

    def load(self, folder: str, *, with_optimizer: bool = True) -> None:
        """Read a torch_dist checkpoint, whoever wrote it."""
        from megatron.core import dist_checkpointing

        if self.job.moe_parallel == "fssdp":
            from megatron_fssdp.integration import saved_state

            self.restored = saved_state.restore(self.runtime, folder)
        wanted = self._sharded_state(is_loading=True, with_optimizer=with_optimizer)
        state = dist_checkpointing.load(wanted, folder)
        self.model[0].module.load_state_dict(state["model"])
        if with_optimizer:
            self.optimizer.load_state_dict(state["optimizer"])

    def _moments(self) -> dict[str, torch.Tensor]:
        """Adam's moments by layout-free name (plain optimizer only: ours hold whole tensors)."""
        if self.job.distributed_optimizer or self.job.optimizer != "adam":
            return {}
        states: dict[torch.Tensor, Any] = {}
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            states.update(optimizer.optimizer.state)
        moments = {}
        for name, parameter in self.named_parameters().items():
            state = states.get(getattr(parameter, "main_param", parameter), states.get(parameter))
            if state:
                for key in ("exp_avg", "exp_avg_sq"):
                    moments[f"{name}.{key}"] = state[key].clone()
        return moments


def _at_expert(name: str, index: int) -> str:
    """The name that an expert's parameter would have as the rank's expert `index`."""
    if "local_experts" in name:
        return re.sub(r"(?<=local_experts\.)\d+", str(index), name)
    return name.rstrip("0123456789") + str(index)  # TE's "weight3"


def _unwrapped(chunk: Any) -> Any:
    """The GPTModel inside DDP and whatever else wraps it."""
    return next(module for module in chunk.modules() if hasattr(module, "decoder"))


def positions_of_rank(sequence: int) -> torch.Tensor:
    """The places in a sequence that this context-parallel rank has: a piece of each half."""
    from megatron.core import parallel_state

    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    pieces = torch.arange(sequence).tensor_split(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def attention_on_cpus() -> type:
    """Attention for context parallelism and MLA on CPUs, where Megatron's own needs TE.

    Every rank gathers all keys and values; queries stay. Gradients go back to their ranks.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):
        def __init__(
            self, config: Any, *rest: Any, k_channels: int = 0, v_channels: int = 0, **options: Any
        ) -> None:
            stock = copy.copy(config)
            stock.context_parallel_size = 1
            stock.kv_channels = v_channels or config.kv_channels
            super().__init__(stock, *rest, **options)

        def forward(self, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
            group = parallel_state.get_context_parallel_group()
            if group.size() > 1:
                key, value = (
                    gather_from_sequence_parallel_region(each, group=group) for each in (key, value)
                )
                mine = positions_of_rank(key.shape[0])
                places = torch.empty(key.shape[0], dtype=mine.dtype)
                dist.all_gather_into_tensor(places, mine, group=group)
                mask = (places > mine.unsqueeze(1))[None, None]
            return super().forward(query, key, value, mask, **options)

    return Attention


def run(job: Job) -> Trained:
    """Train a job on this rank."""
    return TinyRun(job).train()


def run_many(jobs: list[Job]) -> list[Trained]:
    """Train several jobs one after the other in the same processes."""
    return [run(job) for job in jobs]


def merge(results: list[Trained], field_name: str) -> dict[str, torch.Tensor]:
    """Join the tensors of all ranks; where several ranks have one, they must agree."""
    merged: dict[str, torch.Tensor] = {}
    for result in results:
        for name, tensor in getattr(result, field_name).items():
            if name in merged:
                torch.testing.assert_close(merged[name], tensor, rtol=0, atol=0, msg=name)
            merged[name] = tensor
    return merged

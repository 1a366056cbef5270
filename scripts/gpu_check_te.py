# SPDX-License-Identifier: Apache-2.0

"""What `gpu_check.py` checks of Transformer Engine's experts on one GPU, without a second rank.

Slots, two of them owned, two replicas, one empty, against the stock TEGroupedMLP of all four
experts: outputs, the rows' gradients, and weights' gradients that TE adds in place, over three
micro-batches; then again with other weights and the replicas in each other's slots. In bf16 and in
each fp8 format that the device has, from bf16 parameters and from fp8 ones, whose replicas must
have the owner's bits. The rows of no expert are a multiple of what fp8 needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.collectives.lanes import Lane, Meter, Pending, make_lane
from megatron_fssdp.experts.gradients import GradientSums
from megatron_fssdp.experts.materialize import Materializer
from megatron_fssdp.experts.packing import pack, packed_bytes
from megatron_fssdp.experts.placement import Placement
from megatron_fssdp.experts.replicas import LentRows, ReplicaPool, Transport, read
from megatron_fssdp.planning.plan import EMPTY, LayerPlan

HIDDEN, FFN, EXPERTS = 256, 512, 4
# Rows of each expert in each micro-batch; none at all in the last.
ROWS_BE = ((100, 0, 33, 7), (0, 64, 7, 0), (0, 0, 0, 0))
OWNER = np.array([0, 0, 1, 1])
# Of rank 0: it owns experts 0 and 1.
SLOTS = ((0, 1, 2, 3, EMPTY), (0, 1, 3, 2, EMPTY))
# bf16 keeps 8 bits; the same products may run as other kernels. Stale weights are off by far more.
TOLERANCE = 0.02


# Rows, probabilities and the output's gradients: of each expert.
_Batch = list[list[torch.Tensor]]


class _PlayedPeer(Transport):
    """Sends the other rank's experts, and keeps the gradients that it would get."""

    def __init__(self, lane: Lane, experts: dict[int, list[torch.Tensor]]) -> None:
        super().__init__(None, lane)  # type: ignore[arg-type]
        self._experts = experts
        self.arrived: dict[int, torch.Tensor] = {}

    def gather(self, schedule: Any, owned: Any, received: Any, meter: Meter, name: str) -> Pending:
        def run() -> None:
            for slot, row in received.items():
                pack(row, self._experts[self.expert_of[slot]])

        return self.lane.start(run, meter)

    def reduce(
        self, placement: Placement, sums: LentRows, meter: Meter, name: str
    ) -> tuple[Pending, LentRows]:
        landing = LentRows.lend(self._landings, placement.sent_slots, sums.like)

        def run() -> None:
            for row in landing.rows.values():
                row.zero_()
            self.arrived = {
                placement.replica_of_slot[slot]: row.clone() for slot, row in sums.rows.items()
            }

        return self.lane.start(run, meter), landing

    expert_of: dict[int, int]


class _Results(NamedTuple):
    """By expert: outputs and gradients of rows for each micro-batch, gradients of weights."""

    rows: list[list[torch.Tensor]]
    weights: list[list[torch.Tensor]]


def find_formats() -> dict[str, str]:
    """Return the fp8 formats to check, with the reason of those that cannot run; "" is bf16.

    Empty where Transformer Engine is not installed.
    """
    extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    if not extension.HAVE_TE:
        return {}
    te = importlib.import_module("transformer_engine.pytorch")
    asked = {
        "tensorwise": te.is_fp8_available,
        "blockwise": te.is_fp8_block_scaling_available,
        "mxfp8": te.is_mxfp8_available,
    }
    reasons = {name: ask(return_reason=True) for name, ask in asked.items()}
    return {"": "", **{name: "" if can else why for name, (can, why) in reasons.items()}}


class Check:
    """The stock experts, and slots on them, in one format."""

    def __init__(self, device: torch.device, recipe: str, *, in_fp8: bool = False) -> None:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
        from megatron.core.fp8_utils import get_fp8_context
        from megatron.core.models.gpt import moe_module_specs
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

        from megatron_fssdp.integration.slot_experts import build_slot_experts

        _start(device)
        self.device = device
        build = moe_module_specs.get_moe_module_spec_for_backend(
            TESpecProvider(), num_experts=EXPERTS, moe_grouped_gemm=True
        )
        config = _config(recipe, in_fp8=in_fp8)
        with get_fp8_context(config, is_init=True):
            layer = build(config).to(device)
            self.config, self.stock = layer.config, layer.experts
            self.slots = build_slot_experts(
                layer.experts, len(SLOTS[0]), layer.submodules.experts, get_default_pg_collection()
            )
        self.experts: list[list[Any]] = [
            self.slots.home_weights(expert) for expert in range(EXPERTS)
        ]
        for parameter in layer.experts.parameters():
            # As Megatron's DDP does.
            parameter.main_grad = torch.zeros(parameter.shape, device=device)
            parameter.grad_added_to_main_grad = False
        theirs = {expert: [*weights] for expert, weights in enumerate(self.experts)}
        self.peer = _PlayedPeer(make_lane(device, overlap=True), theirs)
        self.materializer = Materializer(
            self.peer,
            ReplicaPool(len(SLOTS[0]) - 2),
            sums=GradientSums(True, lambda: len(ROWS_BE), self.slots.in_place),
        )
        self.has_owners_bits = True
        self.generator = torch.Generator().manual_seed(0)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, torch.bfloat16)

    def run_stock(self, batches: list[_Batch]) -> _Results:
        """Run the stock module."""

        def run(rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.stock(rows, counts, probs)[0]
            return output

        results = [self._run(batch, range(EXPERTS), run) for batch in batches]
        weights = [[each.main_grad.clone() for each in expert] for expert in self.experts]
        return _Results(results, weights)

    def run_slots(self, batches: list[_Batch], held: tuple[int, ...]) -> _Results:
        """Run the slots: `held` is the expert in each."""
        placement = Placement(LayerPlan(OWNER, np.array([held, (2, 3, 0, 1, EMPTY)])), 0)
        self.peer.expert_of = placement.replica_of_slot
        owned = self.experts[:2]

        def run(rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
            visit = self.materializer.launch(placement, owned, owned[0], is_trained=True)
            weights = visit.arrive()
            visit.wait()
            for slot, expert in placement.replica_of_slot.items():
                self.has_owners_bits &= _bits(weights[slot]) == _bits(self.experts[expert])
            output = self.slots(rows, counts, probs, weights, visit.version)
            visit.guard(output, weights)
            return output

        results = [self._run(batch, held, run) for batch in batches]
        self.materializer.settle()
        self.materializer.pool.forget()
        weights = [[each.main_grad.clone() for each in expert] for expert in owned]
        shapes = [each.shape for each in self.experts[0]]
        weights += [read(self.peer.arrived[expert], shapes) for expert in (2, 3)]
        return _Results(results, weights)

    def _run(
        self, batch: _Batch, held: Any, run: Callable[..., torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run one micro-batch forward and backward, with experts in the order `held`."""
        from megatron.core.fp8_utils import get_fp8_context

        filled = [expert for expert in held if expert != EMPTY]
        rows, probs, grads = ([each[expert] for expert in filled] for each in batch)
        sizes = [len(each) for each in rows]
        by_expert = dict(zip(filled, sizes, strict=True))
        counts = torch.tensor([by_expert.get(expert, 0) for expert in held])
        joined = torch.cat(rows).requires_grad_()
        with get_fp8_context(self.config):
            output = run(joined, counts, torch.cat(probs).float())
        output.backward(torch.cat(grads))
        assert joined.grad is not None
        found: dict[int, torch.Tensor] = {}
        parts = zip(output.detach().split(sizes), joined.grad.split(sizes), strict=True)
        for expert, (part, grad) in zip(filled, parts, strict=True):
            found[expert] = torch.cat([part, grad], dim=1)
        return [found[expert] for expert in range(EXPERTS)]

    def is_right(self) -> bool:
        """Compare both, twice, with other weights and other slots the second time."""
        for held in SLOTS:
            batches = [
                [
                    [self._random(count, HIDDEN) for count in rows_E],
                    [self._random(count).abs() for count in rows_E],
                    [self._random(count, HIDDEN) for count in rows_E],
                ]
                for rows_E in ROWS_BE
            ]
            self.stock.linear_fc1.is_first_microbatch = True
            self.stock.linear_fc2.is_first_microbatch = True
            want = self.run_stock(batches)
            self._clear()
            got = self.run_slots(batches, held)
            self._clear()
            for ours, theirs in ((got.rows, want.rows), (got.weights, want.weights)):
                pairs = zip(chain(*ours), chain(*theirs), strict=True)
                if not all(_is_close(mine, stock) for mine, stock in pairs):
                    return False
            with torch.no_grad():
                for parameter in self.stock.parameters():
                    parameter.copy_(self._random(*parameter.shape) * 0.05)
        return self.has_owners_bits

    def _clear(self) -> None:
        for parameter in self.stock.parameters():
            assert parameter.grad_added_to_main_grad or parameter in self._of_peer(), "unmarked"
            parameter.main_grad.zero_()
            parameter.grad, parameter.grad_added_to_main_grad = None, False

    def _of_peer(self) -> set[torch.nn.Parameter]:
        return {weight for expert in self.experts[2:] for weight in expert}

    def close(self) -> None:
        """End the threads."""
        self.peer.lane.close()


def _bits(weights: Sequence[torch.Tensor]) -> list[int]:
    """Return what an expert's weights are made of, quantized or not, as bytes."""
    row = torch.zeros(packed_bytes(weights), dtype=torch.uint8, device=weights[0].device)
    pack(row, weights)
    return row.tolist()


def _is_close(got: torch.Tensor, want: torch.Tensor) -> bool:
    got, want = got.float(), want.float()
    if not want.any():
        return not got.any()
    return bool((got - want).abs().max() <= TOLERANCE * want.abs().max())


def _start(device: torch.device) -> None:
    """Make Megatron's process groups, of this process alone."""
    if device.type == "cpu":
        from megatron_fssdp.integration import cpu_platform

        cpu_platform.enable()
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)


def _config(recipe: str, *, in_fp8: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    fp8 = {"fp8": "e4m3", "fp8_recipe": recipe, "fp8_param": in_fp8} if recipe else {}
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        moe_ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_grouped_gemm=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=True,
        **fp8,
    )


def check_te(device: torch.device) -> Iterator[tuple[str, bool | None, str]]:
    """Yield what was checked, whether it was right (None: it cannot run), and why not."""
    formats = find_formats()
    if not formats:
        yield "TE's experts", None, "transformer-engine is not installed"
    for recipe, reason in formats.items():
        for in_fp8 in (False, True) if recipe else (False,):
            title = f"TE's experts in {recipe or 'bf16'}, {'fp8' if in_fp8 else 'bf16'} parameters"
            if reason:
                yield title, None, reason
                continue
            check = Check(device, recipe, in_fp8=in_fp8)
            try:
                yield title, check.is_right(), ""
            finally:
                check.close()

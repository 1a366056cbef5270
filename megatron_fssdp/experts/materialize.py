# SPDX-License-Identifier: Apache-2.0

"""Materialization: the weights of a rank's slots, from the parameters that the ranks own.

[Note: Gradients are complete before Megatron sees them] The slots' weights are the outputs of one
autograd function whose inputs are the owned parameters: spAG in forward, spRS in backward. So a
parameter's gradient already holds its replicas' share when autograd hands it to the parameter,
and every hook that Megatron's DDP put there (gradient accumulation, overlapped reduce-scatter)
runs once, as in plain expert parallelism.

[Note: One order of gradients on every rank] Ranks of different expert-parallel groups have
different plans, yet their experts' gradients meet in the buckets of expert data parallelism, which
DDP reduces in the order in which they fill. So every rank, with or without copies, runs the same
graph: each owned weight goes through a node of its own into the one function. Those nodes are
numbered as they are made, and autograd runs the highest number first: gradients arrive in one
fixed order, the reverse of the parameters', whatever the plan.

[Note: Owned weights are not copied] An owned expert's slot is its parameter. Memory is taken for
replicas only: one row per replica holds all of its weights, so that a copy is one message.

Shape letters: S slots of this rank, W weights of one expert (fc1, fc2, and their biases if any).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.sparse import sparse_all_gather, sparse_reduce_scatter
from megatron_fssdp.planning.schedule import Schedule

SlotWeights = list[tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Materialization:
    """What one layer's forward needs to fill its slots, and its backward to empty them.

    Attributes:
        schedule: the copies of the layer's plan.
        group: the expert-parallel group.
        num_slots: S.
        owned_slots: the slot of each owned expert, in the order in which its weights are given.
    """

    schedule: Schedule
    group: dist.ProcessGroup
    num_slots: int
    owned_slots: tuple[int, ...]

    @cached_property
    def sent_slots(self) -> tuple[int, ...]:
        """Owned slots that are replicated somewhere, ascending."""
        sends = self.schedule.sends_of(self.group.rank())
        return tuple(sorted({copy.owner_slot for copy in sends}))

    @cached_property
    def received_slots(self) -> tuple[int, ...]:
        """Slots that hold a replica, ascending."""
        receives = self.schedule.receives_of(self.group.rank())
        return tuple(sorted(copy.replica_slot for copy in receives))


def materialize(
    plan: Materialization, owned_weights: Sequence[Sequence[torch.Tensor]], *, is_trained: bool
) -> SlotWeights:
    """Return the weights of this rank's slots, replicas fetched from their owners.

    Every rank of the group must call it, and run its backward, in the same order, with or without
    copies of its own (see the note on the order of gradients); only ranks with copies communicate.

    Args:
        plan: the layer's materialization.
        owned_weights: for each owned expert its W weights, of one dtype; shapes equal over all
            experts and ranks. Autograd flows into them.
        is_trained: whether any rank's weights require gradients: then every rank takes part in
            the backward, also one that owns only frozen experts, for it may hold replicas of
            others. Equal on all ranks.

    Returns:
        For each slot its W weights. Gradients of replicas travel back to the owners: an owned
        weight's gradient is the sum over all its instances, owner first, then replicas by
        ascending rank. Empty slots alias some owned weights, without gradient.
    """
    num_weights = len(owned_weights[0])
    flat = [weight.view_as(weight) for expert in owned_weights for weight in expert]
    trained = flat[0].new_empty(0, requires_grad=is_trained)
    outputs: tuple[torch.Tensor, ...] = _Materialize.apply(plan, num_weights, trained, *flat)
    filled = (*plan.owned_slots, *plan.received_slots)
    by_slot: dict[int, tuple[torch.Tensor, ...]] = {
        slot: tuple(outputs[index * num_weights : (index + 1) * num_weights])
        for index, slot in enumerate(filled)
    }
    nothing = tuple(weight.detach() for weight in owned_weights[0])
    return [by_slot.get(slot, nothing) for slot in range(plan.num_slots)]


class _Materialize(torch.autograd.Function):
    """spAG in forward, spRS in backward. Outputs: owned weights, then received ones, by slot."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Materialization,
        num_weights: int,
        trained: torch.Tensor,
        *owned: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.plan, ctx.num_weights = plan, num_weights
        shapes = [weight.shape for weight in owned[:num_weights]]
        rows: dict[int, torch.Tensor] = {}
        for index, slot in enumerate(plan.owned_slots):
            if slot in plan.sent_slots:
                rows[slot] = _pack(owned[index * num_weights : (index + 1) * num_weights])
        row_size = sum(prod(shape) for shape in shapes)
        received = owned[0].new_empty(len(plan.received_slots), row_size).unbind(0)
        rows.update(zip(plan.received_slots, received, strict=True))
        _transfer(sparse_all_gather, rows, plan)
        replicas = [weight for row in received for weight in _unpack(row, shapes)]
        return *(weight.view_as(weight) for weight in owned), *replicas

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        plan: Materialization = ctx.plan
        num_weights: int = ctx.num_weights
        slots = (*plan.owned_slots, *plan.received_slots)
        travelling = {*plan.sent_slots, *plan.received_slots}
        rows = {
            slot: _pack(grads[index * num_weights : (index + 1) * num_weights])
            for index, slot in enumerate(slots)
            if slot in travelling
        }
        _transfer(sparse_reduce_scatter, rows, plan)
        owned_grads = list(grads[: len(plan.owned_slots) * num_weights])
        shapes = [grad.shape for grad in owned_grads[:num_weights]]
        for index, slot in enumerate(plan.owned_slots):
            if slot in rows:
                first = index * num_weights
                owned_grads[first : first + num_weights] = _unpack(rows[slot], shapes)
        return None, None, None, *owned_grads


def _transfer(collective: Any, rows: dict[int, torch.Tensor], plan: Materialization) -> None:
    """Run a sparse collective on the rows of the slots that have one."""
    nothing = torch.empty(0)
    slots = [rows.get(slot, nothing) for slot in range(plan.num_slots)]
    collective(slots, plan.schedule, plan.group).wait()


def _pack(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Lay an expert's weights end to end."""
    return torch.cat([weight.reshape(-1) for weight in weights])


def _unpack(row: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """View a row as the weights that `_pack` laid there."""
    parts = row.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

"""Materialization: the weights of a rank's slots, from the parameters that the ranks own.

[Note: Gradients are complete before Megatron sees them] The slots' weights are the output of one
autograd function whose inputs are the owned parameters: spAG in forward, spRS in backward. So a
parameter's gradient already holds its replicas' share when autograd hands it to the parameter,
and every hook that Megatron's DDP put there (gradient accumulation, overlapped reduce-scatter)
runs once, as in plain expert parallelism.

Shape letters: S slots of this rank, W weights of one expert (fc1, fc2, and their biases if any).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.sparse import sparse_all_gather, sparse_reduce_scatter
from megatron_fssdp.planning.schedule import Schedule


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


def materialize(
    plan: Materialization, owned_weights: Sequence[Sequence[torch.Tensor]]
) -> tuple[torch.Tensor, ...]:
    """Return the stacked weights of this rank's slots, replicas fetched from their owners.

    Collective: every rank of `plan.group` must call it, and run its backward, in the same order.

    Args:
        plan: the layer's materialization.
        owned_weights: for each owned expert its W weights, of one dtype; shapes equal over all
            experts and ranks. Autograd flows into them.

    Returns:
        W tensors (S, *weight shape). Rows of empty slots are zero. Their gradients travel back to
        the owners: an owned weight's gradient is the sum over all its instances, owner first,
        then replicas by ascending rank.
    """
    num_weights = len(owned_weights[0])
    flat_weights = [weight for expert in owned_weights for weight in expert]
    result: tuple[torch.Tensor, ...] = _Materialize.apply(plan, num_weights, *flat_weights)
    return result


class _Materialize(torch.autograd.Function):
    """spAG in forward, spRS in backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, plan: Materialization, num_weights: int, *flat_weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.plan, ctx.num_weights = plan, num_weights
        shapes = [weight.shape for weight in flat_weights[:num_weights]]
        # One row holds all weights of one expert, so each copy is one contiguous message.
        rows = flat_weights[0].new_empty(plan.num_slots, sum(prod(shape) for shape in shapes))
        stacks = _split_rows(rows, shapes)
        filled = set(plan.owned_slots)
        for index, slot in enumerate(plan.owned_slots):
            for weight_index, stack in enumerate(stacks):
                stack[slot].copy_(flat_weights[index * num_weights + weight_index])
        pending = sparse_all_gather(rows.unbind(0), plan.schedule, plan.group)
        filled.update(copy.replica_slot for copy in plan.schedule.receives_of(plan.group.rank()))
        for slot in set(range(plan.num_slots)) - filled:
            rows[slot].zero_()
        pending.wait()
        return tuple(stacks)

    @staticmethod
    def backward(ctx: Any, *grad_stacks: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        plan: Materialization = ctx.plan
        rank = plan.group.rank()
        shapes = [stack.shape[1:] for stack in grad_stacks]
        grads = list(grad_stacks)
        # Only the slots that travel are packed into rows; the other gradients stay where they are.
        slots: dict[int, torch.Tensor] = {}
        for copy in plan.schedule.copies:
            if rank in (copy.owner, copy.replica):
                slot = copy.owner_slot if copy.owner == rank else copy.replica_slot
                if slot not in slots:
                    slots[slot] = torch.cat([grad[slot].reshape(-1) for grad in grads])
        empty = grads[0].new_empty(0)
        rows = [slots.get(slot, empty) for slot in range(plan.num_slots)]
        sparse_reduce_scatter(rows, plan.schedule, plan.group).wait()
        flat: list[torch.Tensor] = []
        for slot in plan.owned_slots:
            if slot in slots:
                parts = slots[slot].split([prod(shape) for shape in shapes])
                flat += [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            else:
                flat += [grad[slot] for grad in grads]
        return None, None, *flat


def _split_rows(rows: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """View (S, numel of an expert) rows as one (S, *shape) stack per weight."""
    parts = rows.split([prod(shape) for shape in shapes], dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]

# SPDX-License-Identifier: Apache-2.0

"""Materialization: the weights of a rank's slots, from the parameters that the ranks own.

    launch     before the attention: spAG starts        backward, last: waits for spRS, adds it
    arrive     before the dispatch                      backward, after the dispatch's: spRS starts
    wait       before the experts: waits for spAG
    guard      after the experts                        before their backward: replicas are back

[Note: Gradients are complete before Megatron sees them] The slots' weights are the outputs of two
autograd functions whose inputs are the owned parameters: spAG in forward, spRS in backward. So a
parameter's gradient already holds its replicas' share when autograd hands it to the parameter,
and every hook that Megatron's DDP put there (gradient accumulation, overlapped reduce-scatter)
runs once, as in plain expert parallelism.

[Note: Autograd hides spRS] Of the nodes that are ready autograd runs the one that was made last.
`launch` makes its node before the attention's, `arrive` after them and before the dispatch's:
backward, spRS starts when the tokens' gradients are under way (they are waited for, spRS is not),
and the node that waits for it comes when the attention's backward is done.

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
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_fssdp.collectives.lanes import Meter, Pending
from megatron_fssdp.experts.gradients import GradientSums, SlotContents
from megatron_fssdp.experts.packing import packed_bytes, unpack
from megatron_fssdp.experts.placement import Placement
from megatron_fssdp.experts.replicas import (
    LentRows,
    OwnedWeights,
    ReplicaPool,
    Transport,
    read,
    size_of,
)
from megatron_fssdp.planning.schedule import Schedule

SlotWeights = list[tuple[torch.Tensor, ...]]


@dataclass(eq=False)
class Materializer:
    """Fills one layer's slots, forward after forward.

    Attributes:
        transport: how weights and gradients travel.
        pool: where replicas are: this layer's own, or one that layers share.
        name: of the layer, in error messages.
        sums: adds up the replicas' gradients.
        predecessor: the layer whose backward comes next; its replicas are fetched ahead.
        is_accounted: whether fetches go into the accounts (an evaluation's do not).
        gathers, reductions: the messages that ran and the bytes of each, for the accounts, whose
            keeper empties them.
    """

    transport: Transport
    pool: ReplicaPool
    name: str = "a MoE layer"
    sums: GradientSums = field(default_factory=GradientSums)
    predecessor: Materializer | None = None
    is_accounted: bool = True
    gather_meter: Meter = field(default_factory=Meter)
    reduce_meter: Meter = field(default_factory=Meter)
    gathers: list[tuple[Schedule, int]] = field(default_factory=list)
    reductions: list[tuple[Schedule, int]] = field(default_factory=list)
    _placement: Placement | None = None
    _owned: OwnedWeights = ()
    _template: Sequence[torch.Tensor] = ()

    def launch(
        self,
        placement: Placement,
        owned: OwnedWeights,
        template: Sequence[torch.Tensor],
        *,
        is_trained: bool,
    ) -> Visit:
        """Start to fetch the replicas of a forward.

        Every rank of the group must call it, and run its backward, in the same order, with or
        without copies of its own; only ranks with copies communicate.

        Args:
            placement: what the slots are to hold.
            owned: for each owned expert its W weights, of one dtype; shapes equal over all
                experts and ranks. Autograd flows into them. A rank may own none.
            template: W tensors like an expert's weights: what an empty slot shows.
            is_trained: whether any rank's weights require gradients: then every rank takes part
                in the backward, also one that owns only frozen experts, for it may hold replicas
                of others. Equal on all ranks.
        """
        visit = Visit(self, placement, owned, template)
        self._placement, self._owned, self._template = placement, owned, template
        self.hold(placement)
        flat = [weight.view_as(weight) for expert in owned for weight in expert]
        # Without elements; it ties the two functions together where this rank owns nothing.
        first = template[0]
        trained = torch.empty(0, dtype=first.dtype, device=first.device, requires_grad=is_trained)
        visit.views = _Launch.apply(visit, trained, *flat)
        return visit

    def hold(self, placement: Placement) -> None:
        """Start to fetch what is missing of a placement's replicas."""
        weights = self._template

        def fetch(schedule: Schedule) -> Pending:
            meter = Meter()
            if self.is_accounted:
                self.gathers.append((schedule, packed_bytes(weights)))
                meter = self.gather_meter
            owned = dict(zip(placement.owned_slots, self._owned, strict=True))
            rows = self.pool.rows(placement, weights)
            return self.transport.gather(schedule, owned, rows, meter, self.name)

        self.pool.hold(self, placement, fetch)

    def change_to(self, placement: Placement) -> None:
        """Fetch what another placement needs besides the latest forward's."""
        self._placement = placement
        self.hold(placement)

    def prefetch(self) -> None:
        """Start to fetch the replicas of the latest forward again, for its backward."""
        if self._placement is not None:
            self.hold(self._placement)

    def reduce(self, placement: Placement, grads: Sequence[torch.Tensor]) -> Reduction | None:
        """Add replicas' gradients up; start to send them if this backward is the last.

        Args:
            placement: of the forward whose backward this is.
            grads: W gradients of each slot that holds a replica, slots ascending.
        """
        if not placement.schedule.copies:
            return None
        sums = self.sums.add(
            self.transport, SlotContents(placement, self._owned, self._template), grads
        )
        if sums is None:
            return None
        num_bytes = size_of(self._template) * sums.like.element_size()
        self.reductions.append((placement.schedule, num_bytes))
        pending, landing = self.transport.reduce(placement, sums, self.reduce_meter, self.name)
        return Reduction(pending, sums, landing)

    def settle(self) -> None:
        """End an iteration; see `GradientSums.settle`."""
        self.sums.settle(self.name)


@dataclass(eq=False)
class Reduction:
    """A spRS under way."""

    pending: Pending
    sums: LentRows
    landing: LentRows


@dataclass(eq=False)
class Visit:
    """One forward of a layer, and its backward."""

    materializer: Materializer
    placement: Placement
    owned: OwnedWeights
    template: Sequence[torch.Tensor]
    views: tuple[torch.Tensor, ...] = ()
    reduction: Reduction | None = None

    def move_to(self, placement: Placement) -> None:
        """Fetch what another placement needs besides, before `arrive`."""
        self.placement = placement
        self.materializer.change_to(placement)

    def arrive(self) -> SlotWeights:
        """Return the weights of this rank's slots; replicas may be read after `wait` only.

        Returns:
            For each slot its W weights. Gradients of replicas travel back to the owners: an owned
            weight's gradient is the sum over all its instances. Empty slots show the template,
            without gradient.
        """
        num_weights = len(self.template)
        # Given up: the views' node holds this visit, and so would keep itself alive.
        views, self.views = self.views, ()
        outputs: tuple[torch.Tensor, ...] = _Arrive.apply(self, *views)
        filled = (*self.placement.owned_slots, *self.placement.replica_of_slot)
        by_slot: dict[int, tuple[torch.Tensor, ...]] = {
            slot: tuple(outputs[index * num_weights : (index + 1) * num_weights])
            for index, slot in enumerate(filled)
        }
        nothing = tuple(weight.detach() for weight in self.template)
        return [by_slot.get(slot, nothing) for slot in range(self.placement.num_slots)]

    def wait(self) -> None:
        """Wait for the replicas."""
        self.materializer.hold(self.placement)
        self.materializer.pool.wait()

    @property
    def version(self) -> tuple[int, Placement]:
        """What is equal for two visits whose slots hold the same weights."""
        return self.materializer.pool.generation, self.placement

    def replicas(self) -> list[torch.Tensor]:
        """Return the W weights of each slot that holds a replica, end to end.

        They are memory of the pool: right until it is given to another placement.
        """
        pool = self.materializer.pool
        self.materializer.hold(self.placement)
        rows = pool.rows(self.placement, self.template)
        return [weight for row in rows.values() for weight in unpack(row, self.template)]

    def guard(self, output: torch.Tensor, weights: SlotWeights) -> None:
        """See to it that the experts' backward finds the replicas, and where gradients go.

        Args:
            output: of the experts; nothing of what computed it is read by the backward before
                this tensor's gradient is there.
            weights: that the experts were given.
        """

        def prepare(unused: torch.Tensor) -> None:
            self.wait()
            contents = SlotContents(self.placement, self.owned, self.template)
            self.materializer.sums.show_main_grads(self.materializer.transport, contents, weights)

        if output.requires_grad:
            output.register_hook(prepare)

    def finish(self, grads: list[torch.Tensor]) -> None:
        """Wait for spRS and add what arrived to the owned weights' gradients."""
        if self.reduction is not None:
            reduction, self.reduction = self.reduction, None
            reduction.pending.wait()
            self._add(reduction.landing, grads)
            reduction.sums.give_back()
            reduction.landing.give_back()
        for expert in self.owned:
            for position, weight in enumerate(expert):
                if self.materializer.sums.is_in_place(position) and weight.requires_grad:
                    # Megatron's DDP must not add the dummy that autograd hands to the parameter.
                    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]

    def _add(self, landing: LentRows, grads: list[torch.Tensor]) -> None:
        num_weights = len(self.template)
        shapes = [weight.shape for weight in self.template]
        for index, slot in enumerate(self.placement.owned_slots):
            if slot not in self.placement.sent_slots:
                continue
            for position, part in enumerate(read(landing.rows[slot], shapes)):
                place = index * num_weights + position
                main_grad = getattr(self.owned[index][position], "main_grad", None)
                is_there = self.materializer.sums.is_in_place(position)
                if main_grad is not None and (is_there or part.dtype != grads[place].dtype):
                    # Megatron keeps sums of bf16 gradients in fp32 there: no rounding on the way.
                    main_grad.add_(part)
                else:
                    grads[place] = grads[place] + part.to(grads[place].dtype)


class _Launch(torch.autograd.Function):
    """A tensor without elements, and the owned weights. Backward: add what spRS brought."""

    @staticmethod
    def forward(
        ctx: Any, visit: Visit, trained: torch.Tensor, *owned: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.visit = visit
        return trained.view_as(trained), *(weight.view_as(weight) for weight in owned)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        complete = list(grads[1:])
        ctx.visit.finish(complete)
        return None, None, *complete


class _Arrive(torch.autograd.Function):
    """Owned weights, then replicas by slot. Backward: start spRS, and fetch ahead."""

    @staticmethod
    def forward(
        ctx: Any, visit: Visit, trained: torch.Tensor, *owned: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.visit, ctx.num_owned = visit, len(owned)
        ctx.save_for_backward(trained)
        return *(weight.view_as(weight) for weight in owned), *visit.replicas()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        visit: Visit = ctx.visit
        materializer = visit.materializer
        visit.reduction = materializer.reduce(visit.placement, grads[ctx.num_owned :])
        if materializer.predecessor is not None:
            materializer.predecessor.prefetch()
        (trained,) = ctx.saved_tensors
        return None, torch.zeros_like(trained), *grads[: ctx.num_owned]

# SPDX-License-Identifier: Apache-2.0

"""Sums of replicas' gradients on the way to their owners.

[Note: Once an iteration] While replicas are kept, their gradients are added up over the
micro-batches and sent with the last one's backward.

[Note: Gradients in place] Transformer Engine's products can add a weight's gradient to `main_grad`
of the tensor that they are given, and hand autograd a dummy (Megatron's
--gradient-accumulation-fusion). For an owned weight that is its parameter's `main_grad`, for a
replica's the row that sums its gradients, for a slot whose gradient nobody wants scrap: no weight
gradient takes memory of its own. The tensors learn where just before their backward, not in the
forward: until then no row is lent, and parameters may get another `main_grad`.

Shape letters: W weights of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_fssdp.experts.placement import Placement
from megatron_fssdp.experts.replicas import LentRows, OwnedWeights, Transport, read, size_of


class SlotContents(NamedTuple):
    """What the slots of one forward hold.

    Attributes:
        placement: the plan as this rank sees it.
        owned: for each owned expert its W parameters.
        template: W tensors like an expert's weights: what an empty slot shows.
    """

    placement: Placement
    owned: OwnedWeights
    template: Sequence[torch.Tensor]


@dataclass(eq=False)
class GradientSums:
    """Adds up the gradients of one layer's replicas.

    Attributes:
        in_fp32: whether gradients of narrower weights are sent in fp32.
        num_backwards: how many backwards an iteration has, if replicas' gradients are to be sent
            with the last; None: with each.
        in_place: for each of the W weights, whether the experts' backward adds its gradient to
            `main_grad` of the tensor that it was given; none by default.
    """

    in_fp32: bool = False
    num_backwards: Callable[[], int] | None = None
    in_place: Sequence[bool] = ()
    _rows: LentRows | None = None
    _num_added: int = 0

    def is_in_place(self, position: int) -> bool:
        """Whether the experts' backward adds the gradient of a weight of theirs in place."""
        return bool(self.in_place) and self.in_place[position]

    def sent_dtype(self, weight: torch.Tensor) -> torch.dtype:
        """Return what gradients are sent in, the same on all ranks."""
        return torch.promote_types(weight.dtype, torch.float32) if self.in_fp32 else weight.dtype

    def show_main_grads(
        self,
        transport: Transport,
        contents: SlotContents,
        slots: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        """Tell the weights of all slots where their gradients are to be added.

        Args:
            transport: lends the memory.
            contents: of the slots in the forward whose backward comes.
            slots: for each slot the W tensors that the experts were given.
        """
        trained = any(weight.requires_grad for weights in slots for weight in weights)
        if not (trained and any(self.in_place)):
            return
        placement, owned, template = contents
        shapes = [weight.shape for weight in template]
        like = self._like(contents)
        scrap = read(transport.scrap_row(size_of(template), like), shapes)
        places: dict[int, list[torch.Tensor]] = {
            slot: [
                weight.main_grad  # type: ignore[attr-defined]
                if weight.requires_grad and is_in_place
                else nowhere
                for weight, is_in_place, nowhere in zip(expert, self.in_place, scrap, strict=True)
            ]
            for slot, expert in zip(placement.owned_slots, owned, strict=True)
        }
        if placement.replica_of_slot:
            rows = self._open(transport, contents).rows
            places.update({slot: read(rows[slot], shapes) for slot in placement.replica_of_slot})
        for slot, weights in enumerate(slots):
            for weight, place in zip(weights, places.get(slot, scrap), strict=True):
                # Attributes that Megatron's DDP gives its parameters, for the same purpose.
                weight.main_grad = place  # type: ignore[attr-defined]
                weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def add(
        self,
        transport: Transport,
        contents: SlotContents,
        grads: Iterable[torch.Tensor],
    ) -> LentRows | None:
        """Add what a backward brought for the replicas, besides what is in place.

        Args:
            transport: lends the memory.
            contents: of the slots in the forward whose backward this is.
            grads: W gradients of each slot that holds a replica, slots ascending.

        Returns:
            The sums, in what they are sent in, if this backward is the last.
        """
        self._num_added += 1
        sums = self._open(transport, contents)
        shapes = [weight.shape for weight in contents.template]
        arrived = iter(grads)
        for slot in contents.placement.replica_of_slot:
            for position, part in enumerate(read(sums.rows[slot], shapes)):
                grad = next(arrived)
                if not self.is_in_place(position):
                    part.add_(grad)
        if self.num_backwards is not None and self._num_added < self.num_backwards():
            return None
        self._rows, self._num_added = None, 0
        dtype = self.sent_dtype(contents.template[0])
        return sums if sums.like.dtype == dtype else transport.convert(sums, dtype)

    def _open(self, transport: Transport, contents: SlotContents) -> LentRows:
        """Return the sums of the micro-batches before, or zeros."""
        if self._rows is None:
            size, like = size_of(contents.template), self._like(contents)
            self._rows = transport.lend_sums(contents.placement, size, like)
            for row in self._rows.rows.values():
                row.zero_()
        return self._rows

    def _like(self, contents: SlotContents) -> torch.Tensor:
        """Return a tensor of the sums' type: one product writes them all, so main_grad's."""
        template = contents.template
        dtype = self.sent_dtype(template[0])
        if any(self.in_place):
            weights = (*template, *(weight for expert in contents.owned for weight in expert))
            dtype = next((w.main_grad.dtype for w in weights if hasattr(w, "main_grad")), dtype)
        return torch.empty(0, dtype=dtype, device=template[0].device)

    def settle(self, name: str) -> None:
        """End an iteration; parameters are about to change.

        Raises:
            RuntimeError: replicas' gradients were added up but never sent.
        """
        backwards, self._num_added = self._num_added, 0
        if backwards:
            expected = self.num_backwards() if self.num_backwards else 1
            raise RuntimeError(
                f"{name}: the optimizer steps, and gradients of replicas were not sent. "
                f"--moe-parallel fssdp keeps them for the last of {expected} micro-batches, but "
                f"{backwards} backwards came since it sent some: an iteration was given up, or has "
                "another number of micro-batches. Use --fssdp-rematerialize, which sends them with "
                "every micro-batch"
            )

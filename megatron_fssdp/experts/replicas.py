# SPDX-License-Identifier: Apache-2.0

"""Memory of replicas: a pool for their weights, buffers for their gradients.

[Note: Kept or re-materialized] A pool holds the replicas of one placement at a time. Kept: each
layer has its own pool, replicas are fetched by the first forward of an iteration and stay until the
parameters change. Re-materialized: one pool serves all layers in turn, so a backward may find
another layer's replicas in it, and fetches its own again. What is in a pool, and so whether a fetch
is due, follows from the order of forwards and backwards alone, which all ranks of an
expert-parallel group share: they agree without asking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.buffers import RowBuffer
from megatron_fssdp.collectives.lanes import Lane, Meter, Pending
from megatron_fssdp.collectives.sparse import sparse_all_gather, sparse_reduce_scatter
from megatron_fssdp.experts.packing import pack, packed_bytes
from megatron_fssdp.experts.placement import Placement
from megatron_fssdp.planning.schedule import Schedule

# For each owned expert its W weights.
OwnedWeights = Sequence[Sequence[torch.Tensor]]


@dataclass(eq=False)
class Transport:
    """How the layers of one expert-parallel group exchange weights and gradients.

    Attributes:
        group: the same ranks as the expert-parallel group, with a communicator of its own, so that
            copies and tokens need not wait for each other.
        lane: where its collectives run.
    """

    group: dist.ProcessGroup
    lane: Lane
    _sent: RowBuffer = field(default_factory=RowBuffer)
    _arrived: RowBuffer = field(default_factory=RowBuffer)
    # Not lent at the moment: replicas' gradients, and what lands for owned experts.
    _sums: list[RowBuffer] = field(default_factory=list)
    _converted: list[RowBuffer] = field(default_factory=list)
    _landings: list[RowBuffer] = field(default_factory=list)
    _scrap: RowBuffer = field(default_factory=RowBuffer)

    def gather(
        self,
        schedule: Schedule,
        owned: dict[int, Sequence[torch.Tensor]],
        received: dict[int, torch.Tensor],
        meter: Meter,
        name: str,
    ) -> Pending:
        """Start spAG.

        Args:
            schedule: the messages.
            owned: the weights of the owned slots.
            received: the rows of the slots to fill.
            meter: takes the time.
            name: of the layer.
        """
        rank = self.group.rank()
        sent = {copy.sender_slot for copy in schedule.copies if copy.sender == rank}
        slots = sorted(sent.intersection(owned))

        def run() -> None:
            packed: dict[int, torch.Tensor] = {}
            if slots:
                first = owned[slots[0]]
                size, device = packed_bytes(first), first[0].device
                rows = self._sent.rows(len(slots), size, torch.uint8, device)
                packed = dict(zip(slots, rows, strict=True))
            for slot, row in packed.items():
                pack(row, owned[slot])
            sparse_all_gather({**packed, **received}, schedule, self.group, f"spAG of {name}")

        return self.lane.start(run, meter)

    def reduce(
        self, placement: Placement, sums: LentRows, meter: Meter, name: str
    ) -> tuple[Pending, LentRows]:
        """Start spRS on the gradients of a placement's replicas.

        Returns:
            What to wait for, and the rows that then hold the sums for the owned slots.
        """
        landing = LentRows.lend(self._landings, placement.sent_slots, sums.like)

        def run() -> None:
            for row in landing.rows.values():
                row.zero_()
            rows = {**landing.rows, **sums.rows}
            sparse_reduce_scatter(
                rows, placement.schedule, self.group, self._arrived, f"spRS of {name}"
            )

        return self.lane.start(run, meter), landing

    def lend_sums(self, placement: Placement, size: int, like: torch.Tensor) -> LentRows:
        """Lend rows of `size` for the gradients of a placement's replicas."""
        return LentRows.lend(self._sums, tuple(placement.replica_of_slot), like.new_empty(0, size))

    def convert(self, sums: LentRows, dtype: torch.dtype) -> LentRows:
        """Give sums back, and lend rows of another type with the same values."""
        lent = LentRows.lend(self._converted, tuple(sums.rows), sums.like.to(dtype))
        for slot, row in sums.rows.items():
            lent.rows[slot].copy_(row)
        sums.give_back()
        return lent

    def scrap_row(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """Return one row of `size` that anybody may write and nobody reads."""
        return self._scrap.rows(1, size, like.dtype, like.device)[0]

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        buffers = (
            self._sent,
            self._arrived,
            self._scrap,
            *self._sums,
            *self._converted,
            *self._landings,
        )
        return sum(buffer.num_bytes for buffer in buffers)


@dataclass(eq=False)
class LentRows:
    """Rows by slot, lent until `give_back`.

    Attributes:
        rows: by slot.
        like: without rows, of their size, dtype and device.
    """

    rows: dict[int, torch.Tensor]
    like: torch.Tensor
    _buffer: RowBuffer
    _home: list[RowBuffer]

    @classmethod
    def lend(cls, unused: list[RowBuffer], slots: tuple[int, ...], like: torch.Tensor) -> LentRows:
        """Take a buffer that is unused, or a new one."""
        buffer = unused.pop() if unused else RowBuffer()
        rows = buffer.rows(len(slots), like.shape[1], like.dtype, like.device)
        return cls(dict(zip(slots, rows, strict=True)), like, buffer, unused)

    def give_back(self) -> None:
        """Let others use the rows."""
        self._home.append(self._buffer)


class ReplicaPool:
    """Rows for the replicas of one placement at a time. See the note above.

    Attributes:
        generation: grows when parameters change.
    """

    def __init__(self, num_rows: int) -> None:
        self.generation = 0
        self._num_rows = num_rows
        self._buffer = RowBuffer()
        self._layer: object = None
        self._placement: Placement | None = None
        self._rows_of: WeakKeyDictionary[Placement, dict[int, int]] = WeakKeyDictionary()
        self._pending: Pending | None = None

    def hold(
        self, layer: object, placement: Placement, fetch: Callable[[Schedule], Pending]
    ) -> None:
        """Start to fetch the replicas of a placement that are not here yet.

        Args:
            layer: whose they are.
            placement: what is wanted.
            fetch: starts the messages that it is given, into `rows`.
        """
        if layer is self._layer and placement is self._placement:
            return
        self.wait()
        schedule = placement.schedule
        if placement not in self._rows_of:
            present = self._placement if layer is self._layer else None
            if present is not None:
                schedule = placement.scheduler(placement.plan, present.plan)
            self._rows_of[placement] = self._assign_rows(placement, present)
        # A placement that was here before keeps its rows: its forward's tensors are views of them.
        self._layer, self._placement = layer, placement
        if schedule.copies:
            self._pending = fetch(schedule)

    def _assign_rows(self, placement: Placement, present: Placement | None) -> dict[int, int]:
        """Choose a row for each expert; replicas that are here already stay where they are."""
        experts = list(placement.replica_of_slot.values())
        here = {} if present is None else self._rows_of[present]
        kept = {expert: here[expert] for expert in experts if expert in here}
        taken = set(kept.values())
        free = [row for row in range(self._num_rows) if row not in taken]
        new = [expert for expert in experts if expert not in kept]
        return {**kept, **dict(zip(new, free[: len(new)], strict=True))}

    def rows(
        self, placement: Placement, weights: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Return the row of bytes of each slot that holds a replica of the placement held.

        Args:
            placement: of the latest `hold`.
            weights: the weights of some expert, which tell the size of a row.
        """
        if not placement.replica_of_slot:
            return {}
        size, device = packed_bytes(weights), weights[0].device
        rows = self._buffer.rows(self._num_rows, size, torch.uint8, device)
        row_of = self._rows_of[placement]
        return {slot: rows[row_of[expert]] for slot, expert in placement.replica_of_slot.items()}

    def wait(self) -> None:
        """Wait for a fetch that is under way."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def forget(self) -> None:
        """Parameters have changed: what is here is old."""
        self.wait()
        self._layer = self._placement = None
        self.generation += 1

    @property
    def num_bytes(self) -> int:
        """Memory taken."""
        return self._buffer.num_bytes


def size_of(weights: Sequence[torch.Tensor]) -> int:
    """Return the elements of an expert's weights: the length of its row of gradients."""
    return sum(weight.numel() for weight in weights)


def read(row: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """View an expert's row of gradients as those of its weights."""
    parts = row.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

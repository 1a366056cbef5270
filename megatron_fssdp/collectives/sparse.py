# SPDX-License-Identifier: Apache-2.0

"""SparseAllGather and SparseReduceScatter as grouped point-to-point messages.

The two collectives of the paper's section 3.1: spAG(P, P') fills the replica slots from the
owners' slots, spRS(P', P) sums the replica slots' gradients into the owners'. Every transfer of a
call is one `batch_isend_irecv`: one NCCL group call, or asynchronous gloo messages. Both start
the transfers and return a handle; nothing may be read or reused before `wait()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from megatron_fssdp.planning.schedule import Schedule


@dataclass
class PendingTransfers:
    """Transfers under way. Holds every buffer that they use until `wait()`."""

    works: list[dist.Work] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    finish: list[Callable[[], object]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for the transfers (on CUDA: make the current stream wait) and finish the call."""
        for work in self.works:
            work.wait()
        for action in self.finish:
            action()
        self.works, self.buffers, self.finish = [], [], []


def sparse_all_gather(
    slots: Sequence[torch.Tensor], schedule: Schedule, group: dist.ProcessGroup
) -> PendingTransfers:
    """Start to copy every replicated expert from its owner's slot into its replicas' slots.

    Collective: every rank of `group` that is an end of a copy must call it; a rank without sends
    and receives issues nothing. An empty schedule costs nothing.

    Args:
        slots: S tensors of this rank, one expert each, of equal shape and dtype on all ranks; any
            dtype, contiguous or not. Owned slots are read, replica slots written.
        schedule: the layer's copies, equal on all ranks.
        group: the expert-parallel group; ranks in `schedule` are ranks of it.

    Returns:
        A handle; the replica slots hold the owners' values after its `wait()`.
    """
    pending = PendingTransfers()
    rank = group.rank()
    ops: list[dist.P2POp] = []
    for copy in schedule.copies:
        if copy.owner == rank:
            ops.append(_send(slots[copy.owner_slot], copy.replica, group, pending))
        elif copy.replica == rank:
            ops.append(_receive_into(slots[copy.replica_slot], copy.owner, group, pending))
    _start(ops, pending)
    return pending


def sparse_reduce_scatter(
    slots: Sequence[torch.Tensor], schedule: Schedule, group: dist.ProcessGroup
) -> PendingTransfers:
    """Start to sum the replica slots' gradients into their owners' slots.

    Collective, like `sparse_all_gather`. Sums are taken in `wait()`, in the schedule's order
    (ascending replica rank), whatever order the messages arrive in.

    Args:
        slots: S gradient tensors of this rank, one expert each. Replica slots are read, owned
            slots added to.
        schedule: the schedule of the forward's `sparse_all_gather`.
        group: the expert-parallel group.

    Returns:
        A handle; the owned slots hold the sums after its `wait()`.
    """
    pending = PendingTransfers()
    rank = group.rank()
    ops: list[dist.P2POp] = []
    for copy in schedule.copies:
        if copy.replica == rank:
            ops.append(_send(slots[copy.replica_slot], copy.owner, group, pending))
        elif copy.owner == rank:
            total = slots[copy.owner_slot]
            arrived = torch.empty_like(total, memory_format=torch.contiguous_format)
            ops.append(_receive_into(arrived, copy.replica, group, pending))
            pending.finish.append(partial(total.add_, arrived))
    _start(ops, pending)
    return pending


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Backends differ in the dtypes they can send (gloo has no fp8); bytes work everywhere.
    return tensor.view(-1).view(torch.uint8)


def _send(
    tensor: torch.Tensor, peer: int, group: dist.ProcessGroup, pending: PendingTransfers
) -> dist.P2POp:
    message = tensor.detach().contiguous()
    pending.buffers.append(message)
    return dist.P2POp(dist.isend, _as_bytes(message), group=group, group_peer=peer)


def _receive_into(
    tensor: torch.Tensor, peer: int, group: dist.ProcessGroup, pending: PendingTransfers
) -> dist.P2POp:
    target = message = tensor.detach()
    if not target.is_contiguous():
        message = torch.empty_like(target, memory_format=torch.contiguous_format)
        pending.finish.append(partial(target.copy_, message))
    pending.buffers.append(message)
    return dist.P2POp(dist.irecv, _as_bytes(message), group=group, group_peer=peer)


def _start(ops: list[dist.P2POp], pending: PendingTransfers) -> None:
    # Zero-byte messages are nothing to wait for, and some backends refuse them.
    ops = [op for op in ops if op.tensor.numel()]
    if ops:
        pending.works.extend(dist.batch_isend_irecv(ops))

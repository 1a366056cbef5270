# SPDX-License-Identifier: Apache-2.0

"""SparseAllGather and SparseReduceScatter as grouped point-to-point messages.

The two collectives of the paper's section 3.1: spAG(P, P') fills the replica slots from the
owners' slots, spRS(P', P) sums the replica slots' gradients into the owners'. They run the stages
of a schedule one after the other; all messages of a stage are one `batch_isend_irecv`: one NCCL
group call, or asynchronous gloo messages. Both return when the caller's stream (on CPUs: the
caller) may use the results; `lanes` runs them beside other work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_fssdp.collectives.buffers import RowBuffer
from megatron_fssdp.planning.schedule import Schedule


def sparse_all_gather(
    rows: Mapping[int, torch.Tensor],
    schedule: Schedule,
    group: dist.ProcessGroup,
    name: str = "spAG",
) -> None:
    """Copy every replicated expert from its owner's slot into its replicas' slots.

    Collective: every rank of `group` that is an end of a copy must call it; a rank without
    messages issues nothing. An empty schedule costs nothing.

    Args:
        rows: this rank's slots that take part, by slot: 1-D, contiguous, one expert each, of
            equal size and dtype on all ranks; any dtype. Owned slots are read, replicas' written.
        schedule: the layer's messages, equal on all ranks.
        group: the group whose ranks `schedule` names.
        name: what an error calls this collective.

    Raises:
        RuntimeError: a peer failed; the message names it, the collective and the expert.
    """
    rank = group.rank()
    for stage in schedule.stages_of(rank):
        messages = [
            _Message(copy.expert, copy.receiver, True, rows[copy.sender_slot])
            if copy.sender == rank
            else _Message(copy.expert, copy.sender, False, rows[copy.receiver_slot])
            for copy in stage
        ]
        _exchange(messages, group, name)


def sparse_reduce_scatter(
    rows: Mapping[int, torch.Tensor],
    schedule: Schedule,
    group: dist.ProcessGroup,
    scratch: RowBuffer,
    name: str = "spRS",
) -> None:
    """Sum the replica slots' gradients into their owners' slots.

    Collective, like `sparse_all_gather`. The messages of that schedule run backwards: a rank that
    relayed an expert first adds what it receives to its own slot, then sends the sum. Sums are
    taken in the schedule's order, whatever order messages arrive in.

    Args:
        rows: this rank's slots that take part: gradients, 1-D, contiguous, one expert each. Replica
            slots are read (and used for partial sums), owned slots added to.
        schedule: the schedule of the forward's placement, all of its copies.
        group: the group whose ranks `schedule` names.
        scratch: memory for what arrives, kept from call to call.
        name: what an error calls this collective.

    Raises:
        RuntimeError: a peer failed; the message names it, the collective and the expert.
    """
    rank = group.rank()
    for stage in reversed(schedule.stages_of(rank)):
        arriving = [copy for copy in stage if copy.sender == rank]
        sums = [rows[copy.sender_slot] for copy in arriving]
        arrived = scratch.rows_like(sums)
        messages = [
            _Message(copy.expert, copy.sender, True, rows[copy.receiver_slot])
            for copy in stage
            if copy.receiver == rank
        ]
        messages += [
            _Message(copy.expert, copy.receiver, False, row)
            for copy, row in zip(arriving, arrived, strict=True)
        ]
        _exchange(messages, group, name)
        for total, row in zip(sums, arrived, strict=True):
            total.add_(row)


class _Message(NamedTuple):
    expert: int
    peer: int
    is_sent: bool
    row: torch.Tensor


def _exchange(messages: Sequence[_Message], group: dist.ProcessGroup, name: str) -> None:
    """Run one stage's messages as one group call, and wait for them."""
    # Zero-byte messages are nothing to wait for, and some backends refuse them.
    messages = [message for message in messages if message.row.numel()]
    # Receives first: a gloo send waits for its receiver to be ready, and that word would queue
    # behind the data that the other side sends here.
    messages.sort(key=lambda message: message.is_sent)
    if not messages:
        return
    ops = [
        dist.P2POp(
            dist.isend if message.is_sent else dist.irecv,
            # Backends differ in the dtypes they can send (gloo has no fp8); bytes always work.
            message.row.detach().view(torch.uint8),
            group=group,
            group_peer=message.peer,
        )
        for message in messages
    ]
    current: Sequence[_Message] = messages
    try:
        works = dist.batch_isend_irecv(ops)
        for index, work in enumerate(works):
            # NCCL has one work for the whole stage, gloo one for each message.
            current = messages[index : index + 1] if len(works) == len(messages) else messages
            work.wait()
    except RuntimeError as error:
        raise RuntimeError(f"{name} failed {_describe(current)}: {error}") from error


def _describe(messages: Sequence[_Message]) -> str:
    if len(messages) > 1:
        peers = sorted({message.peer for message in messages})
        return f"among this rank and ranks {peers} of the expert-parallel group"
    expert, peer, is_sent, _ = messages[0]
    way = "sending" if is_sent else "receiving"
    return (
        f"{way} expert {expert} {'to' if is_sent else 'from'} rank {peer} of the expert-parallel "
        "group"
    )

# SPDX-License-Identifier: Apache-2.0

"""The sparse collectives by dense ones: slow, obvious, the oracle of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_fssdp.planning.plan import LayerPlan
from megatron_fssdp.planning.schedule import Schedule


def dense_all_gather(
    slots: Sequence[torch.Tensor], plan: LayerPlan, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Return what the slots hold after spAG, by gathering every slot of every rank.

    Collective: every rank of `group` must call it.
    """
    all_slots = _gather_all(slots, group)
    result = [slot.clone() for slot in slots]
    for copy in Schedule.flat(plan).copies:
        if copy.receiver == group.rank():
            result[copy.receiver_slot] = all_slots[copy.sender][copy.sender_slot].clone()
    return result


def dense_reduce_scatter(
    slots: Sequence[torch.Tensor], plan: LayerPlan, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Return what the owned slots hold after spRS, by gathering every slot of every rank.

    Collective: every rank of `group` must call it.
    """
    all_slots = _gather_all(slots, group)
    result = [slot.clone() for slot in slots]
    for copy in Schedule.flat(plan).copies:
        if copy.sender == group.rank():
            result[copy.sender_slot] += all_slots[copy.receiver][copy.receiver_slot]
    return result


def _gather_all(
    slots: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[list[torch.Tensor]]:
    mine = torch.stack([slot.contiguous() for slot in slots])
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    return [list(stack.unbind(0)) for stack in gathered]

# SPDX-License-Identifier: Apache-2.0

"""Megatron's all-to-all dispatcher, told on the host what every rank sends.

A stock dispatch counts each rank's tokens for each expert, gathers the counts of all ranks and
waits until the host has them. Quotas made on the host have gathered and waited already, and say
what goes where: told so, the dispatcher asks and waits no more, so that a forward has as many
synchronisations of host and device as a stock one.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_fssdp.integration.agreement import all_agree
from megatron_fssdp.planning.quotas import Messages


class ToldAlltoAllDispatcher(MoEAlltoAllTokenDispatcher):
    """Takes what it sends and receives from `tell`, where that was called; else it is stock."""

    _told: Messages | None = None
    _is_checked = False

    def tell(self, messages: Messages, is_checked: bool = False) -> None:
        """Say what the next dispatch sends and receives.

        Args:
            messages: of this rank.
            is_checked: let stock find the same out, and compare.
        """
        self._told, self._is_checked = messages, is_checked

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Set what stock sets. Returns the (slots,) int64 tokens of each local slot, on the host.

        Args:
            routing_map: (tokens, ranks * slots) bool.

        Raises:
            RuntimeError: where it is checked: ranks made different quotas.
        """
        # Taken, not read: what was told holds for one dispatch.
        messages, self._told = self._told, None
        # Padding for quantization changes the routing map after the quotas were made.
        if messages is None or self.config.moe_router_padding_for_quantization:
            return super().preprocess(routing_map)
        if self._is_checked:
            self._check(messages, super().preprocess(routing_map))
        received_RS = torch.from_numpy(messages.received_RS)
        self.num_out_tokens = int(messages.sent_R.sum())
        self.input_splits = messages.sent_R
        self.output_splits = messages.received_RS.sum(axis=1)
        if self.num_local_experts > 1:
            by_slot = received_RS
            if self.config.moe_permute_fusion and routing_map.is_cuda:
                by_slot = by_slot.pin_memory().to(routing_map.device, non_blocking=True)
            self.num_global_tokens_per_local_expert = by_slot
        return received_RS.sum(dim=0)

    def _check(self, messages: Messages, tokens_S: torch.Tensor) -> None:
        """Compare with what stock has just asked the other ranks for."""
        told_S = messages.received_RS.sum(axis=0)
        is_same = tokens_S.tolist() == told_S.tolist()
        if self.ep_size > 1:
            is_same &= self.input_splits.tolist() == messages.sent_R.tolist()
            is_same &= self.output_splits.tolist() == messages.received_RS.sum(axis=1).tolist()
        # All together, before the tokens' exchange, in which the others would hang.
        if not all_agree(is_same, self.tp_ep_group):
            found = "the others' differ from this rank's"
            if not is_same:
                found = (
                    f"rank {self.ep_group.rank()} expects {told_S.tolist()} tokens in its slots, "
                    f"and is sent {tokens_S.tolist()}"
                )
            raise RuntimeError(
                f"--fssdp-check-plans: expert-parallel ranks made different quotas ({found}); do "
                "all run the same versions of megatron-fssdp and numpy?"
            )

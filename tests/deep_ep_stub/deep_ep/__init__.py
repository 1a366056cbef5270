"""The two buffers that Megatron's flex dispatcher uses: same calls, same results, gloo below.

Checks what the kernels demand of their inputs (read from deepseek-ai/DeepEP: `deep_ep/buffer.py`,
`deep_ep/hybrid_ep_buffer.py`). Shape letters: T tokens of this rank, N tokens that arrived, K
experts of a token, E experts of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deep_ep.utils import EventOverlap

Rows = torch.Tensor


@dataclass(frozen=True, eq=False)
class Handle:
    """Which tokens went where: `is_sent_RT` by target, and the tokens that arrived by source."""

    is_sent_RT: torch.Tensor
    arrived_R: list[int]
    group: dist.ProcessGroup

    @classmethod
    def of(cls, is_sent_RT: torch.Tensor, group: dist.ProcessGroup) -> Handle:
        sent_R = is_sent_RT.sum(1)
        arrived_R = torch.empty_like(sent_R)
        dist.all_to_all_single(arrived_R, sent_R, group=group)
        return cls(is_sent_RT, arrived_R.tolist(), group)

    def scatter(self, rows: Rows) -> Rows:
        """(T, ...) to (N, ...): each token once to each rank that it is sent to."""
        sent = torch.cat([rows[is_sent_T] for is_sent_T in self.is_sent_RT]).contiguous()
        arrived = sent.new_empty(sum(self.arrived_R), *rows.shape[1:])
        sizes = self.is_sent_RT.sum(1).tolist()
        dist.all_to_all_single(arrived, sent, self.arrived_R, sizes, group=self.group)
        return arrived

    def gather(self, rows: Rows) -> Rows:
        """(N, ...) to (T, ...): back, and what ranks return for a token is added up."""
        sizes = self.is_sent_RT.sum(1).tolist()
        back = rows.new_empty(sum(sizes), *rows.shape[1:])
        dist.all_to_all_single(back, rows.contiguous(), sizes, self.arrived_R, group=self.group)
        total = rows.new_zeros(self.is_sent_RT.shape[1], *rows.shape[1:])
        for part, is_sent_T in zip(back.split(sizes), self.is_sent_RT, strict=True):
            total[is_sent_T] += part
        return total


def _check_rows(rows: Rows) -> None:
    assert rows.dim() == 2
    assert rows.is_contiguous()
    assert rows.shape[1] * rows.element_size() % 16 == 0, "rows are read 16 bytes at a time"


class Buffer:
    """DeepEP's: a token goes once to each rank that has some of its experts."""

    num_sms = 0

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        assert group.size() > 1
        self.group = group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        assert num_sms % 2 == 0, "SMs come in pairs"
        Buffer.num_sms = num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden_bytes, ranks: hidden_bytes * ranks,
            get_rdma_buffer_size_hint=lambda hidden_bytes, ranks: 0,
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, **stream: Any
    ) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        assert num_experts % self.group.size() == 0
        per_rank = num_experts // self.group.size()
        assert per_rank <= 1024, "NUM_MAX_LOCAL_EXPERTS"
        ordered = topk_idx.sort(dim=1).values
        is_twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        assert not is_twice.any(), "a token names an expert twice"
        assert topk_idx.max() < num_experts
        chosen_TE = torch.zeros(len(topk_idx), num_experts, dtype=torch.bool)
        token, place = (topk_idx >= 0).nonzero(as_tuple=True)
        chosen_TE[token, topk_idx[token, place]] = True
        is_sent_TR = chosen_TE.view(len(topk_idx), -1, per_rank).any(2)
        return is_sent_TR.sum(0), None, chosen_TE.sum(0), is_sent_TR, EventOverlap()

    def dispatch(
        self,
        x: Rows,
        *,
        handle: Handle | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[Any, ...]:
        _check_rows(x)
        if handle is not None:
            return handle.scatter(x), None, None, None, None, EventOverlap()
        assert topk_idx is not None
        assert topk_weights is not None
        assert num_tokens_per_expert is not None
        assert is_token_in_rank is not None
        assert topk_weights.dtype == torch.float32
        handle = Handle.of(is_token_in_rank.T, self.group)
        per_rank = len(num_tokens_per_expert) // self.group.size()
        index_NK = handle.scatter(topk_idx) - self.group.rank() * per_rank
        weight_NK = handle.scatter(topk_weights)
        is_here = (index_NK >= 0) & (index_NK < per_rank)
        index_NK = torch.where(is_here, index_NK, -1)
        counts = torch.bincount(index_NK[is_here], minlength=per_rank).tolist()
        weight_NK = torch.where(is_here, weight_NK, 0.0)
        return handle.scatter(x), index_NK, weight_NK, counts, handle, EventOverlap()

    def combine(
        self, x: Rows, handle: Handle, topk_weights: torch.Tensor | None = None, **others: Any
    ) -> tuple[Any, ...]:
        _check_rows(x)
        weights = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32
            weights = handle.gather(topk_weights)
        return handle.gather(x), weights, EventOverlap()


@dataclass(frozen=True, eq=False)
class _PermutedHandle:
    """What arrived, and which expert of this rank each permuted row is for."""

    sent: Handle
    token_P: torch.Tensor
    expert_P: torch.Tensor
    num_experts: int


class HybridEPBuffer:
    """HybridEP's: as DeepEP's, and rows leave it expert by expert."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        **sms: Any,
    ) -> None:
        assert group.size() > 1
        assert not use_fp8
        self.group = group

    def dispatch_with_permute(
        self,
        *,
        hidden: Rows,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        pad_multiple: int | None = None,
        num_permuted_tokens: Any = None,
        non_blocking: bool = False,
        handle: _PermutedHandle | None = None,
    ) -> tuple[Any, ...]:
        _check_rows(hidden)
        if handle is not None:
            rows = handle.sent.scatter(hidden)[handle.token_P]
            assert num_permuted_tokens is None or num_permuted_tokens == len(rows)
            return rows, None, None, None, handle
        assert routing_map is not None
        assert probs is not None
        assert num_of_experts_per_rank is not None
        assert pad_multiple is None
        assert routing_map.dtype == torch.bool
        assert probs.dtype == torch.float32
        assert routing_map.shape == probs.shape
        assert routing_map.shape[1] == num_of_experts_per_rank * self.group.size()
        sizes = torch.tensor([len(hidden), -len(hidden)])
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=self.group)
        assert sizes.sum() == 0, "ranks must have equally many tokens"
        by_rank = routing_map.view(len(hidden), self.group.size(), -1)
        sent = Handle.of(by_rank.any(2).T, self.group)
        first = self.group.rank() * num_of_experts_per_rank
        here = slice(first, first + num_of_experts_per_rank)
        map_NE, probs_NE = (sent.scatter(each)[:, here] for each in (routing_map, probs))
        expert_P, token_P = map_NE.T.nonzero(as_tuple=True)
        made = _PermutedHandle(sent, token_P, expert_P + first, routing_map.shape[1])
        counts = map_NE.sum(0)
        return sent.scatter(hidden)[token_P], probs_NE[token_P, expert_P], None, counts, made

    def combine_with_unpermute(
        self,
        *,
        hidden: Rows,
        probs: torch.Tensor | None = None,
        handle: _PermutedHandle,
        pad_multiple: int | None = None,
    ) -> tuple[Rows, torch.Tensor | None]:
        num_arrived = sum(handle.sent.arrived_R)
        rows = hidden.new_zeros(num_arrived, hidden.shape[1])
        rows.index_add_(0, handle.token_P, hidden)
        combined_probs = None
        if probs is not None:
            probs_NE = probs.new_zeros(num_arrived, handle.num_experts)
            probs_NE[handle.token_P, handle.expert_P] = probs
            combined_probs = handle.sent.gather(probs_NE)
        return handle.sent.gather(rows), combined_probs

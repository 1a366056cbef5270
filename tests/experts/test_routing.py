"""Routing translation: exact shares, nothing lost, gradients back to the router."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fssdp.experts.routing import share_of, translate_routing


def test_worked_example() -> None:
    # 4 tokens, 2 experts. Expert 0 has instances at physical 0 and 3, split 1 : 2; expert 1 is
    # at physical 2 only.
    routing = torch.tensor([[True, True], [True, False], [False, True], [True, True]])
    probs = torch.tensor([[0.7, 0.3], [1.0, 0.0], [0.0, 1.0], [0.4, 0.6]])
    split = torch.tensor([[1, 2], [3, 0]])
    physical = torch.tensor([[0, 3], [2, 0]])
    got_map, got_probs = translate_routing(routing, probs, split, physical, 4)
    assert got_map.tolist() == [
        [True, False, True, False],
        [False, False, False, True],
        [False, False, True, False],
        [False, False, True, True],
    ]
    expected = torch.tensor([[0.7, 0, 0.3, 0], [0, 0, 0, 1.0], [0, 0, 1.0, 0], [0, 0, 0.6, 0.4]])
    assert torch.equal(got_probs, expected)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(1, 6),
    num_instances=st.integers(1, 4),
)
def test_shares_are_exact(seed: int, num_tokens: int, num_experts: int, num_instances: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    routing = torch.rand(num_tokens, num_experts, generator=generator) < 0.5
    probs = torch.rand(num_tokens, num_experts, generator=generator) * routing
    # Cut each expert's tokens at random places.
    counts = routing.sum(0)
    cuts = torch.rand(num_experts, num_instances - 1, generator=generator) * (counts[:, None] + 1)
    ends = torch.cat([cuts.floor().long().sort(dim=1)[0], counts[:, None]], dim=1)
    split = ends.diff(dim=1, prepend=torch.zeros(num_experts, 1, dtype=torch.long))
    columns = torch.randperm(num_experts * num_instances, generator=generator)
    physical = columns.view(num_experts, num_instances)
    got_map, got_probs = translate_routing(routing, probs, split, physical, columns.numel())
    # Each instance gets its share, each (token, expert) pair exactly one instance.
    assert torch.equal(got_map.sum(0)[physical], split)
    assert torch.equal(
        got_map[:, physical.reshape(-1)].view(-1, *split.shape).sum(2), routing.int()
    )
    assert torch.equal(got_probs[:, physical.reshape(-1)].view(-1, *split.shape).sum(2), probs)


def test_gradient_reaches_the_router() -> None:
    routing = torch.tensor([[True, False], [True, True]])
    probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]], requires_grad=True)
    split, physical = torch.tensor([[1, 1], [1, 0]]), torch.tensor([[0, 2], [1, 0]])
    _, got = translate_routing(routing, probs, split, physical, 3)
    (got * torch.arange(6.0).view(2, 3)).sum().backward()
    assert probs.grad is not None
    # Token 0 went to physical 0 (weight 0), token 1 to physical 2 (weight 5) and 1 (weight 4).
    assert probs.grad.tolist() == [[0.0, 1.0], [5.0, 4.0]]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_shards=st.integers(1, 4),
    num_experts=st.integers(1, 6),
    num_instances=st.integers(1, 4),
)
def test_shards_take_all_of_a_split(
    seed: int, num_shards: int, num_experts: int, num_instances: int
) -> None:
    """The shards' parts have their own tokens in the rows, and add up to the split."""
    generator = torch.Generator().manual_seed(seed)
    counts_ZE = torch.randint(0, 9, (num_shards, num_experts), generator=generator)
    left_E, parts = counts_ZE.sum(0), []
    for _ in range(num_instances - 1):
        parts.append((torch.rand(num_experts, generator=generator) * (left_E + 1)).long())
        left_E = left_E - parts[-1]
    split_EI = torch.stack([*parts, left_E], dim=1)
    shares = [share_of(split_EI, counts_ZE, shard) for shard in range(num_shards)]
    assert torch.equal(torch.stack(shares).sum(0), split_EI)
    assert torch.equal(torch.stack(shares).sum(2), counts_ZE)
    assert min(share.min() for share in shares) >= 0


def test_a_split_of_two_shards_by_hand() -> None:
    split_EI, counts_ZE = torch.tensor([[6, 2]]), torch.tensor([[5], [3]])
    assert share_of(split_EI, counts_ZE, 0).tolist() == [[5, 0]]
    assert share_of(split_EI, counts_ZE, 1).tolist() == [[1, 2]]

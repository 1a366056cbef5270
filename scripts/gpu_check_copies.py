# SPDX-License-Identifier: Apache-2.0

"""What `gpu_check.py` checks of copies and shares on one GPU, without a second rank.

The peer is played by memory of this process: its copies run on the side stream of the real lane,
slowed down, under a busy main stream. A missing event shows as other bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_fssdp.collectives.lanes import Lane, Meter, Pending, make_lane
from megatron_fssdp.experts.compute import RowGroups, grouped_linear
from megatron_fssdp.experts.gradients import GradientSums
from megatron_fssdp.experts.materialize import Materializer
from megatron_fssdp.experts.packing import pack
from megatron_fssdp.experts.placement import Placement
from megatron_fssdp.experts.replicas import LentRows, ReplicaPool, Transport
from megatron_fssdp.planning.plan import LayerPlan
from megatron_fssdp.planning.quotas import balance

HIDDEN, FFN, LAYERS, STEPS = 512, 256, 4, 5
# Rank 0 owns experts 0 and 1, and holds replicas of 2 and 3.
PLAN = LayerPlan(np.array([0, 0, 1, 1]), np.array([[0, 1, 2, 3], [2, 3, 0, 1]]))


class _PlayedPeer(Transport):
    """Copies from, and adds to, tensors of this process instead of sending messages."""

    def __init__(self, lane: Lane, peer: dict[int, list[torch.Tensor]], busy: torch.Tensor) -> None:
        super().__init__(None, lane)  # type: ignore[arg-type]
        self._peer, self._busy = peer, busy

    def _dawdle(self) -> None:
        for _ in range(20):
            torch.mm(self._busy, self._busy)

    def gather(self, schedule: Any, owned: Any, received: Any, meter: Meter, name: str) -> Pending:
        def run() -> None:
            self._dawdle()
            for slot, row in received.items():
                pack(row, self._peer[slot])

        return self.lane.start(run, meter)

    def reduce(
        self, placement: Placement, sums: LentRows, meter: Meter, name: str
    ) -> tuple[Pending, LentRows]:
        landing = LentRows.lend(self._landings, placement.sent_slots, sums.like)

        def run() -> None:
            self._dawdle()
            # As if the peer's replicas of our experts had the gradients of ours of its experts.
            for ours, theirs in zip(landing.rows.values(), sums.rows.values(), strict=True):
                ours.copy_(theirs)

        return self.lane.start(run, meter), landing


def _train(device: torch.device, *, overlap: bool, again: bool) -> list[torch.Tensor]:
    """Run steps of a stack of expert layers and return the last gradients and weights."""
    generator = torch.Generator().manual_seed(0)

    def weights() -> list[torch.Tensor]:
        shapes = ((FFN, HIDDEN), (HIDDEN, FFN))
        made = [torch.randn(shape, generator=generator) * 0.05 for shape in shapes]
        return [each.to(device, torch.bfloat16) for each in made]

    lane = make_lane(device, overlap=overlap)
    side = 1024 if device.type == "cuda" else 32
    busy = torch.randn(side, side, generator=generator).to(device)
    pool = ReplicaPool(2)
    layers, owned = [], []
    for _ in range(LAYERS):
        transport = _PlayedPeer(lane, {2: weights(), 3: weights()}, busy)
        kept = pool if again else ReplicaPool(2)
        layers.append(Materializer(transport, kept, sums=GradientSums(in_fp32=True)))
        owned.append([[each.requires_grad_() for each in weights()] for _ in range(2)])
    parameters = [each for layer in owned for expert in layer for each in expert]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    rows = torch.randn(64, HIDDEN, generator=generator).to(device, torch.bfloat16)
    groups = RowGroups(torch.tensor([16, 16, 16, 16]), device)
    grads: list[torch.Tensor] = []
    for _ in range(STEPS):
        hidden = rows
        for layer, experts in zip(layers, owned, strict=True):
            visit = layer.launch(Placement(PLAN, 0), experts, experts[0], is_trained=True)
            attention = torch.mm(busy, busy).sum().to(torch.bfloat16) * 0
            slots = visit.arrive()
            visit.wait()
            fc1, fc2 = zip(*slots, strict=True)
            output = grouped_linear(torch.tanh(grouped_linear(hidden, fc1, groups)), fc2, groups)
            visit.guard(output, slots)
            hidden = hidden + output + attention
        hidden.float().square().mean().backward()
        grads = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        for layer in layers:
            layer.settle()
            layer.pool.forget()
    lane.close()
    return [*grads, *(parameter.detach() for parameter in parameters)]


def check_streams(device: torch.device) -> tuple[bool, float]:
    """Compare overlap with none, kept replicas with re-materialized ones: the same bits."""
    want = _train(device, overlap=False, again=False)
    start = time.perf_counter()
    is_equal = True
    for overlap, again in ((True, False), (False, True), (True, True)):
        got = _train(device, overlap=overlap, again=again)
        is_equal &= all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    return is_equal, 1e3 * (time.perf_counter() - start) / 3


def digest(device: torch.device) -> str:
    """Return a checksum of the results of training with overlap: equal bits, equal text."""
    tensors = _train(device, overlap=True, again=True)
    total = sum(int(each.double().cpu().view(torch.int64).sum()) for each in tensors)
    return f"{total & (2**64 - 1):016x}"


def replayed_shares(
    plan: LayerPlan,
    nodes: tuple[int, ...],
    counts_RE: np.ndarray,
    device: torch.device,
    best_ms: Callable[..., float],
    width: int,
) -> tuple[float, float]:
    """Time the experts of each rank in turn, forward and backward.

    Returns:
        Milliseconds of the slowest rank under EP, and under FSSDP.
    """
    quota_EI = balance(counts_RE, plan, nodes)
    ranks = range(plan.num_ranks)
    load_E = counts_RE.sum(axis=0)
    ep = [load_E[plan.owner_E == rank] for rank in ranks]
    fssdp = [quota_EI[plan.instance_rank_EI == rank] for rank in ranks]
    slowest = []
    for shares in (ep, fssdp):
        # Ranks with as many rows in as many experts take as long: time the few fullest.
        fullest = sorted(shares, key=lambda share: -int(share.sum()))[:3]
        slowest.append(max(best_ms(_experts(share, device, width), device) for share in fullest))
    return slowest[0], slowest[1]


def _experts(rows_S: np.ndarray, device: torch.device, width: int) -> Callable[[], object]:
    counts = torch.from_numpy(rows_S.astype(np.int64))
    groups = RowGroups(counts, device)
    make: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    rows = torch.randn(int(counts.sum()), width, **make)
    fc1 = [torch.randn(width, width, **make) for _ in counts]
    fc2 = [torch.randn(width, width, **make) for _ in counts]

    def run() -> object:
        output = grouped_linear(grouped_linear(rows, fc1, groups), fc2, groups)
        return torch.autograd.grad(output.sum(), [rows, *fc1, *fc2])

    return run

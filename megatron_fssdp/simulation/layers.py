# SPDX-License-Identifier: Apache-2.0

"""A MoE layer's micro-batch on all ranks of its expert-parallel group, stream by stream.

Ranks start a layer together: the all-to-all before was a barrier. So every time here counts from
the layer's start, and is an array over the R ranks. Forward, and backward as its mirror:

    compute   attention | gate |          | experts |         |
    tokens                     | dispatch |         | combine |
    copies    spAG ------------ ... waited for before the experts

Two transfers that meet on the links share them: see `share_link`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_fssdp.simulation.result import PARTS, Stream

Float64Array = npt.NDArray[np.float64]

# Backward against forward: two products of the same size for each of the forward's.
BACKWARD = 2.0


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a system moves when, as its paper says.

    Attributes:
        fetch: when replicas' weights start: "attention": before the layer's attention; "gate":
            when the gate has decided; "ahead": when the layer before starts; "none": never.
        fetches_each: they are fetched in every micro-batch, not once an iteration.
        fetches_again: they are fetched again for the backward.
        returns: how gradients go back: "attention": under the attention's backward; "open":
            waited for at once; "none".
        returns_each: in every micro-batch, not with the last one.
        planning_s: seconds that a micro-batch waits for counts, quotas or plans in each layer.
    """

    fetch: Literal["none", "attention", "gate", "ahead"] = "none"
    fetches_each: bool = False
    fetches_again: bool = False
    returns: Literal["none", "attention", "open"] = "none"
    returns_each: bool = False
    planning_s: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWork:
    """What one micro-batch of one layer takes, were nothing waited for.

    Attributes:
        dense_s: forward seconds of attention, shared expert and the rest, the same on all ranks.
        tokens_s: seconds of one token exchange; dispatch and combine are mirrors.
        experts_R: (R,) forward seconds of each rank's experts, alone on its cores.
        fetch_R: (R,) seconds until each rank's replicas are there.
        return_R: (R,) seconds until each rank's gradients are where they belong.
        traits: of the system.
        fetch_work_s, return_work_s: seconds that copying takes from every rank's computation.
        grads_s: seconds of adding gradients up in the backward, the same on all ranks.
        recompute: "moe": the backward computes the MoE layer again first, "full": all of it.
        cores: CPU cores that the ranks share; None: a device each.
    """

    dense_s: float
    tokens_s: float
    experts_R: Float64Array
    fetch_R: Float64Array
    return_R: Float64Array
    traits: Traits
    fetch_work_s: float = 0.0
    return_work_s: float = 0.0
    grads_s: float = 0.0
    recompute: Literal["none", "moe", "full"] = "none"
    cores: int | None = None

    @property
    def hides_return(self) -> bool:
        """Whether gradients go back while something is computed."""
        return self.traits.returns == "attention" and self.recompute != "moe"


class Span(NamedTuple):
    """Something that all ranks do, each at its time; arrays are (R,)."""

    name: str
    stream: Stream
    start_R: Float64Array
    duration_R: Float64Array


@dataclass(eq=False)
class Clock:
    """Time on each rank's compute stream, and what it was spent on.

    Attributes:
        now_R: (R,) seconds since the layer began.
        parts: seconds of each of `PARTS`, mean over ranks.
        spans: what happened, if `records`.
        window_R: (R,) seconds at the layer's end in which copies of the next one may travel.
    """

    num_ranks: int
    records: bool = False
    now_R: Float64Array = field(init=False)
    window_R: Float64Array = field(init=False)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now_R = np.zeros(self.num_ranks)
        self.window_R = np.zeros(self.num_ranks)

    @property
    def end_s(self) -> float:
        """When the last rank is through."""
        return float(self.now_R.max())

    def spend(self, name: str, stream: Stream, part: str, seconds: Float64Array | float) -> None:
        """Let every rank do something that its next step needs."""
        if self.records:
            self.note(name, stream, self.now_R, seconds)
        self.now_R = self.now_R + seconds
        self.parts[part] += float(np.mean(seconds))

    def note(
        self, name: str, stream: Stream, start: Float64Array | float, seconds: Float64Array | float
    ) -> None:
        """Record something in the background."""
        if self.records:
            ones = np.ones(self.num_ranks)
            self.spans.append(Span(name, stream, start * ones, seconds * ones))

    def wait(self, until_R: Float64Array | float, part: str) -> None:
        """Wait for something in the background."""
        later_R = np.maximum(self.now_R, until_R)
        self.parts[part] += float(np.mean(later_R - self.now_R))
        self.now_R = later_R

    def copy(self, seconds: float) -> None:
        """Let copies in the background take their time from the computation that hides them."""
        if seconds:
            self.spend("copying", "compute", "copies", seconds)

    def meet(self, part: str = "straggling") -> None:
        """Wait for the slowest rank."""
        self.wait(self.now_R.max(), part)


def share_link(first_s: Float64Array | float, second_s: float) -> tuple[Float64Array, float]:
    """Let two transfers share a link fairly from one start on.

    Args:
        first_s: seconds that one would take alone; an array for ranks with different ones.
        second_s: the same of the other.

    Returns:
        When each ends. The shorter ends after twice its time, the longer when both are done:
        2 s and 3 s end after 4 s and 5 s.
    """
    first = np.asarray(first_s, dtype=np.float64)
    both = first + second_s
    longest = float(first.max(initial=0.0))
    return np.minimum(both, 2 * first), min(2 * second_s, second_s + longest)


def shared_cores(work_R: Float64Array, cores: int | None) -> Float64Array:
    """Return when each rank ends if all start together and share CPU cores fairly.

    Args:
        work_R: (R,) seconds at the speed that a rank has while all ranks work.
        cores: for all ranks; None: each has its own.

    Returns:
        (R,) seconds. On fewer cores than ranks a rank speeds up as others end, up to one core: 4
        ranks on 2 cores, of 4, 4, 8 and 8 seconds, end after 4, 4, 6 and 6.
    """
    num_ranks = len(work_R)
    if cores is None or cores >= num_ranks:
        return work_R
    order = np.argsort(work_R, kind="stable")
    steps = np.diff(work_R[order], prepend=0.0)
    active = num_ranks - np.arange(num_ranks)
    # Speed of a rank while so many are active, over that while all are.
    speed = np.minimum(1.0, cores / active) * num_ranks / cores
    end_R = np.empty_like(work_R)
    end_R[order] = np.cumsum(steps / speed)
    return end_R


def forward(
    work: LayerWork,
    is_first: bool,
    ahead_s: Float64Array | float = 0.0,
    records: bool = False,
    late_s: float = 0.0,
) -> Clock:
    """Walk through a micro-batch's forward.

    Args:
        work: of the layer.
        is_first: whether it is the iteration's first micro-batch.
        ahead_s: seconds before the layer's start in which its replicas could travel already
            (fetch "ahead").
        records: keep the spans.
        late_s: seconds until the owners' parameters are gathered: no copy starts before.
    """
    clock = Clock(len(work.experts_R), records)
    traits = work.traits
    fetch_R = np.zeros(clock.num_ranks)
    if traits.fetch != "none" and (is_first or traits.fetches_each):
        fetch_R = work.fetch_R
    early_s = ahead_s if traits.fetch == "ahead" and not late_s else 0.0
    if traits.fetch != "gate":
        clock.note("spAG", "copies", late_s - np.minimum(early_s, fetch_R), fetch_R)
    clock.spend("attention", "compute", "attention", work.dense_s)
    if fetch_R.any() and traits.fetch != "gate":
        clock.copy(work.fetch_work_s)
    clock.spend("gate", "compute", "planning", traits.planning_s)
    starts_R = clock.now_R if traits.fetch == "gate" else np.zeros(clock.num_ranks)
    starts_R = np.maximum(starts_R, late_s) - early_s
    if traits.fetch == "gate":
        clock.note("spAG", "copies", starts_R, fetch_R)
    left_R = np.where(fetch_R > 0, np.maximum(starts_R + fetch_R - clock.now_R, 0.0), 0.0)
    _exchange_and_compute(clock, work, left_R, 1.0)
    clock.spend("combine", "tokens", "tokens", work.tokens_s)
    clock.window_R = np.full(clock.num_ranks, clock.end_s - 2 * work.tokens_s)
    return clock


def backward(
    work: LayerWork, is_last: bool, ahead_s: Float64Array | float = 0.0, records: bool = False
) -> Clock:
    """Walk through a micro-batch's backward: see `forward`.

    The layer before gets what spRS leaves of the copies' stream, which works in order: from the
    start of spRS on (`experts.materialize`), with fetch "ahead" from the layer's start.
    """
    clock = Clock(len(work.experts_R), records)
    traits = work.traits
    fetch_R = work.fetch_R if traits.fetches_again else np.zeros(clock.num_ranks)
    left_R = np.maximum(fetch_R - ahead_s, 0.0)
    if traits.fetches_again:
        clock.note("spAG", "copies", -np.minimum(ahead_s, fetch_R), fetch_R)
    if work.recompute == "full":
        clock.spend("attention again", "compute", "attention", work.dense_s)
    if work.recompute != "none":
        clock.spend("gate again", "compute", "planning", traits.planning_s)
        _exchange_and_compute(clock, work, left_R, 1.0, " again")
        clock.spend("combine again", "tokens", "tokens", work.tokens_s)
        left_R = np.zeros(clock.num_ranks)
    _exchange_and_compute(clock, work, left_R, BACKWARD)
    clock.spend("combine", "tokens", "tokens", work.tokens_s)
    before_R = free_R = clock.now_R
    returned_R = np.zeros(clock.num_ranks)
    if traits.returns != "none" and (is_last or traits.returns_each):
        clock.note("spRS", "copies", clock.now_R, work.return_R)
        free_R = returned_R = clock.now_R + work.return_R
        if work.hides_return:
            clock.copy(work.return_work_s)
        else:
            clock.wait(returned_R, "copies")
    if fetch_R.any():
        # The rest was waited for, while cores had nothing else to do.
        hidden_R = np.minimum(fetch_R, ahead_s)
        clock.copy(work.fetch_work_s * float(hidden_R.sum() / fetch_R.sum()))
    seconds = BACKWARD * work.dense_s + work.grads_s
    clock.spend("attention", "compute", "attention", seconds)
    clock.wait(returned_R, "copies")
    # The layer before cannot start its exchange until all are here.
    clock.meet("copies")
    clock.window_R = np.maximum(clock.end_s - free_R, 0.0)
    if traits.fetch == "ahead":
        trips = 4 if work.recompute != "none" else 2
        clock.window_R += np.maximum(before_R - trips * work.tokens_s, 0.0)
    return clock


def _exchange_and_compute(
    clock: Clock, work: LayerWork, left_R: Float64Array, factor: float, suffix: str = ""
) -> None:
    """Send tokens (in the backward, their gradients), wait for replicas, compute the experts.

    Args:
        clock: of the ranks, all at one time.
        work: of the layer.
        left_R: (R,) seconds that replicas still need, on the same links.
        factor: 1 forward, `BACKWARD` backward.
        suffix: of the spans' names.
    """
    begin_s = clock.end_s
    arrived_R, sent_s = share_link(left_R, work.tokens_s)
    clock.note("dispatch" + suffix, "tokens", begin_s, sent_s)
    clock.wait(begin_s + work.tokens_s, "tokens")
    # What the exchange lost to copies on the same links.
    clock.wait(begin_s + sent_s, "copies")
    clock.wait(begin_s + arrived_R, "copies")
    ends_R = shared_cores(factor * work.experts_R, work.cores)
    clock.spend("experts" + suffix, "compute", "experts", ends_R)
    clock.meet()

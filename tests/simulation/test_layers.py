# SPDX-License-Identifier: Apache-2.0

"""A layer's timeline by hand: 2 ranks, times that can be added up in the head."""

import numpy as np
import pytest

from megatron_fssdp.simulation.layers import (
    LayerWork,
    Traits,
    backward,
    forward,
    share_link,
    shared_cores,
)

FSSDP = Traits(fetch="attention", returns="attention")


def work(traits: Traits = FSSDP, fetch=(0.0, 3.0), returned=(0.0, 0.0), **settings) -> LayerWork:
    """Attention 4 s, exchange 2 s, experts 6 s on rank 0 and 1 s on rank 1."""
    return LayerWork(
        dense_s=4.0,
        tokens_s=2.0,
        experts_R=np.array([6.0, 1.0]),
        fetch_R=np.array(fetch),
        return_R=np.array(returned),
        traits=traits,
        **settings,
    )


def used(clock) -> dict[str, float]:
    return {name: seconds for name, seconds in clock.parts.items() if seconds}


def test_forward_without_copies() -> None:
    """4 attention + 2 dispatch + 6 experts of the slower rank + 2 combine = 14."""
    clock = forward(work(Traits()), is_first=True)
    assert clock.end_s == 14.0
    # Means of two ranks: experts (6 + 1) / 2; rank 1 waits 5.
    assert used(clock) == {"attention": 4.0, "experts": 3.5, "tokens": 4.0, "straggling": 2.5}
    assert sum(clock.parts.values()) == clock.end_s


def test_copies_hide_under_attention() -> None:
    """3 s of copies under 4 s of attention: as without."""
    assert forward(work(), is_first=True).end_s == 14.0


def test_copies_that_do_not_hide_share_the_links() -> None:
    """7 s of copies: 3 s are left at the dispatch; both share the link.

    The dispatch of 2 s ends after 4 s, the copies after 5: at 4 + 5 = 9 rank 1 starts, and ends at
    10. Rank 0, with no copies of its own, starts at 8 and ends at 14. Combine: 16.
    """
    clock = forward(work(fetch=(0.0, 7.0)), is_first=True, records=True)
    assert clock.end_s == 16.0
    # Rank 0: 2 s that the dispatch lost. Rank 1: the same, and 1 s more for its copies.
    assert used(clock)["copies"] == pytest.approx((2 + 3) / 2)
    assert sum(clock.parts.values()) == pytest.approx(16.0)
    starts = {span.name: span.start_R.tolist() for span in clock.spans}
    assert starts["experts"] == [8.0, 9.0]
    # Not in the next micro-batch: replicas stay.
    assert forward(work(fetch=(0.0, 7.0)), is_first=False).end_s == 14.0


def test_copies_after_the_gate_are_in_the_open() -> None:
    """At 4 both start: the dispatch of 2 s ends at 8, the copies of 3 s at 9."""
    clock = forward(work(Traits(fetch="gate", planning_s=1.0)), is_first=True)
    # 4 + 1 planning, + 4 for the dispatch, + 6 + 2.
    assert clock.end_s == 17.0


def test_backward() -> None:
    """2 exchange + 12 experts + 2 exchange + 8 attention = 24; 5 s of gradients hide."""
    clock = backward(work(returned=(5.0, 0.0)), is_last=True)
    assert clock.end_s == 24.0
    assert used(clock) == {"attention": 8.0, "experts": 7.0, "tokens": 4.0, "straggling": 5.0}
    # 9 s do not: one is exposed, on both ranks as they meet.
    clock = backward(work(returned=(9.0, 0.0)), is_last=True)
    assert clock.end_s == 25.0
    assert used(clock)["copies"] == 1.0
    assert backward(work(returned=(9.0, 0.0)), is_last=False).end_s == 24.0
    # With selective recompute of the layer: 1 x (2 + 6 + 2) again, and gradients in the open.
    assert backward(work(returned=(5.0, 0.0), recompute="moe"), is_last=True).end_s == 39.0


def test_rematerialized_replicas_travel_ahead() -> None:
    traits = Traits(fetch="attention", fetches_each=True, fetches_again=True)
    assert backward(work(traits), is_last=False, ahead_s=3.0).end_s == 24.0
    # Nothing ahead: 3 s share the link with the exchange of 2 s: it ends after 4, rank 1's after 5.
    assert backward(work(traits), is_last=False).end_s == 26.0


def test_a_refetch_gets_what_the_gradients_leave_of_the_stream() -> None:
    """Under 8 s of the attention's backward: 8 s for rank 0, after 5 s of spRS 3 s for rank 1."""
    traits = Traits(fetch="attention", fetches_again=True, returns="attention", returns_each=True)
    window_R = backward(work(traits, returned=(0.0, 5.0)), is_last=False).window_R
    assert window_R.tolist() == [8.0, 3.0]
    assert backward(work(traits), is_last=False, ahead_s=window_R).end_s == 24.0
    # 4 s do not fit: the exchange shares the links with 1 s.
    fourth = work(traits, fetch=(0.0, 4.0))
    assert backward(fourth, is_last=False, ahead_s=window_R).end_s == 25.0


def test_a_plan_from_the_gate_is_known_in_the_backward() -> None:
    traits = Traits(fetch="gate", fetches_each=True, fetches_again=True)
    assert backward(work(traits), is_last=False, ahead_s=3.0).end_s == 24.0


def test_copies_wait_for_the_owners_parameters() -> None:
    """Gathered at 2, 3 s of copies end at 5: 1 s after the attention, and shares the links."""
    assert forward(work(), is_first=True, late_s=1.0).end_s == 14.0
    assert forward(work(), is_first=True, late_s=2.0).end_s == 15.0
    # After the gate at 4, 8 s are left of weights gathered at 9; with the dispatch's 2 s they end
    # at 14, rank 1's experts at 15.
    clock = forward(work(Traits(fetch="gate")), is_first=True, late_s=9.0)
    assert clock.end_s == 17.0


def test_hidden_copies_take_cores_that_copy_them() -> None:
    """1 s of the forward's 14 and of the backward's 24; none of what is waited for."""
    costs = {"fetch_work_s": 1.0, "return_work_s": 1.0}
    assert forward(work(**costs), is_first=True).end_s == 15.0
    assert forward(work(**costs), is_first=False).end_s == 14.0
    # 2 of 7 s are left at the dispatch of 2 s: both end after 4, at 9.
    assert forward(work(fetch=(0.0, 7.0), **costs), is_first=True).end_s == 17.0
    clock = backward(work(returned=(5.0, 0.0), **costs), is_last=True)
    assert clock.end_s == 25.0
    assert used(clock)["copies"] == 1.0
    assert backward(work(returned=(9.0, 0.0), **costs), is_last=True).end_s == 25.0
    assert backward(work(returned=(9.0, 0.0), **costs), is_last=False).end_s == 24.0
    again = Traits(fetch="attention", fetches_again=True)
    assert backward(work(again, **costs), is_last=False, ahead_s=3.0).end_s == 25.0
    # Of 3 s one is hidden; the exchange of 2 s shares the links with two.
    assert backward(work(again, **costs), is_last=False, ahead_s=1.0).end_s == pytest.approx(
        24.0 + 2.0 + 1.0 / 3.0
    )
    # All is waited for: as without the work.
    assert backward(work(again, **costs), is_last=False).end_s == 26.0
    # The gate's copies, or gradients in the open, find cores that wait.
    assert forward(work(Traits(fetch="gate"), **costs), is_first=True).end_s == 16.0
    opened = work(Traits(returns="open"), returned=(5.0, 0.0), **costs)
    assert backward(opened, is_last=True).end_s == 29.0


def test_links_and_cores_are_shared_fairly() -> None:
    first, second = share_link(np.array([2.0, 0.0]), 3.0)
    assert (first.tolist(), second) == ([4.0, 0.0], 5.0)
    assert share_link(np.zeros(2), 3.0)[1] == 3.0
    ends = shared_cores(np.array([8.0, 4.0, 8.0, 4.0]), 2)
    assert ends.tolist() == [6.0, 4.0, 6.0, 4.0]
    # All equal: nobody speeds up. One left alone: it cannot take two cores.
    assert shared_cores(np.full(4, 3.0), 2).tolist() == [3.0] * 4
    assert shared_cores(np.array([0.0, 0.0, 0.0, 4.0]), 2).tolist() == [0.0, 0.0, 0.0, 2.0]
    assert shared_cores(np.array([1.0, 2.0]), 2).tolist() == [1.0, 2.0]

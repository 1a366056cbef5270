"""Made-up traces: seeded, possible, and each kind shows what it is named after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fssdp.simulation.generate import KINDS, Shape, generate
from megatron_fssdp.simulation.measured import straggler
from megatron_fssdp.simulation.traces import owned_loads

SHAPE = Shape(
    num_iterations=40, num_layers=3, num_ranks=8, num_experts=32, tokens=2048, topk=4, skew=0.8
)


def fullest_rank(kind: str, shape: Shape = SHAPE) -> np.ndarray:
    trace = generate(kind, shape)
    every = [trace.counts(position) for position in range(trace.num_iterations)]
    return np.stack([straggler(owned_loads(counts).astype(float)) for counts in every])


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 99),
    experts=st.integers(1, 20),
    topk=st.integers(1, 4),
    skew=st.floats(0, 4),
)
def test_counts_are_possible(kind: str, seed: int, experts: int, topk: int, skew: float) -> None:
    """A token chooses k different experts: none gets more tokens than a rank has."""
    shape = Shape(
        num_iterations=3, num_layers=2, num_ranks=4, num_experts=max(experts, topk), tokens=50,
        topk=topk, skew=skew,
    )  # fmt: skip
    trace, again = generate(kind, shape, seed), generate(kind, shape, seed)
    for position in (2, 0, 1):
        counts = trace.counts(position)
        assert counts.shape == (2, 4, max(experts, topk))
        assert counts.dtype == np.int64
        assert (counts.sum(axis=2) == 50 * topk).all()
        assert counts.min() >= 0
        assert counts.max() <= 50
        assert (counts == again.counts(position)).all()


def test_kinds_are_what_they_are_called() -> None:
    factors = {kind: fullest_rank(kind) for kind in KINDS}
    assert factors["even"].max() < 1.06
    assert 1.3 < factors["zipf"].mean() < factors["hot-rank"].mean()
    # How much a layer's factor moves from one iteration to the next.
    moves = {kind: np.abs(np.diff(each, axis=0)).mean() for kind, each in factors.items()}
    assert moves["drift"] > 2 * moves["zipf"]
    # Bursts are rare: the median stays, the highest does not.
    assert np.median(factors["bursts"]) == pytest.approx(np.median(factors["zipf"]), rel=0.1)
    assert factors["bursts"].max() > 1.25 * factors["zipf"].max()


def test_domains_jump_between_calm_stretches() -> None:
    trace = generate("domains", SHAPE)
    shares = np.stack([trace.counts(i).sum(axis=1) / (8 * 2048 * 4) for i in range(40)])
    jumps = np.abs(np.diff(shares, axis=0)).sum(axis=(1, 2))
    at = [3, 7, 11, 15, 19, 23, 27, 31, 35]
    assert jumps[at].min() > 2 * np.delete(jumps, at).max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": 33}, "top-33 of 32"),
        ({"tokens": 0}, "tokens is 0"),
        ({"skew": -1.0}, "use 0 to"),
        # They ended in a traceback, or not at all.
        ({"tokens": 10**20}, "use 1 to 2147483647"),
        ({"num_ranks": 1000, "num_experts": 100_000}, "num_ranks x num_experts is 100000000; use"),
        ({"num_iterations": 10**8}, "num_iterations x num_layers x num_experts is 3200000000; use"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict, message: str) -> None:
    values = {"num_iterations": 1, "num_layers": 1, "num_ranks": 1, "num_experts": 32}
    with pytest.raises(ValueError, match=message):
        Shape(**{**values, **changes})
    with pytest.raises(ValueError, match="use one of even, zipf, drift"):
        generate("no", SHAPE)

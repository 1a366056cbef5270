"""Load series: shapes, determinism, the recorded files."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_fssdp.simulation.loads import (
    SHAPES,
    domain_series,
    recorded_rank_tokens,
    shape_series,
    training_series,
    yardstick,
    zipf_series,
)


def test_zipf_series_drifts_slowly_and_repeats():
    series = zipf_series(32, 8, 1.0, 6, seed=3)
    assert series.shape == (6, 8, 32)
    assert (series.sum(axis=2) == 8192 * 8).all()
    assert (series == zipf_series(32, 8, 1.0, 6, seed=3)).all()
    load_TE = series.sum(axis=1) / series.sum(axis=(1, 2))[:, None]
    assert np.abs(np.diff(load_TE, axis=0)).sum(axis=1).max() / 2 < 0.05


def test_yardstick_is_the_fields():
    instances = list(yardstick())
    assert len(instances) == 156
    assert [counts.shape for *_, counts in instances[:1]] == [(8, 8)]
    # Its definition, spelled out once more for one instance.
    rng = np.random.default_rng(2)
    share = np.arange(1, 65) ** -1.2
    share /= share.sum()
    expected = rng.multinomial(8192 * 8, share[rng.permutation(64)], size=16)
    found = next(c for e, d, s, seed, c in instances if (e, d, s, seed) == (64, 16, 1.2, 2))
    assert (found == expected).all()


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    series = shape_series(name, 16, 4, 9)
    assert series.shape == (9, 4, 16)
    assert series.dtype == np.int64
    assert (series >= 0).all()
    assert series.sum() > 0


def test_zeros_has_ranks_and_experts_without_tokens():
    series = shape_series("W5 zeros", 16, 4, 1)[0]
    assert (series.sum(axis=0) == 0).any()
    assert (series.sum(axis=1) == 0).any()


def test_domains_jump():
    series = domain_series(4, layer=3)
    assert series.shape == (291, 4, 32)
    share_TE = series.sum(axis=1) / series.sum(axis=(1, 2))[:, None]
    assert 0.15 < np.abs(np.diff(share_TE, axis=0)).sum(axis=1).mean() / 2 < 0.45


def test_recorded_runs_are_as_imbalanced_as_published():
    ratios = {
        name: (tokens.max(axis=2) / tokens.mean(axis=2)).mean()
        for name, tokens in recorded_rank_tokens().items()
    }
    assert ratios["FSDP__mixtral-8x7b-e8k2"] == pytest.approx(1.66, abs=0.01)
    assert ratios["LAER__mixtral-8x7b-e16k4"] == pytest.approx(1.29, abs=0.01)


def test_training_series(tmp_path):
    assert training_series(tmp_path / "none.npz") is None
    np.savez(tmp_path / "loads.npz", counts=np.ones((2, 3, 4, 5), dtype=np.int32))
    assert training_series(tmp_path / "loads.npz").shape == (2, 3, 4, 5)

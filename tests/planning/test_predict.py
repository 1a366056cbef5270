"""Predictors: whole numbers, restartable."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_fssdp.planning.predict import PREDICTORS, ExponentialMean, LastIteration, SlidingMean


def loads(*values):
    return [np.array([[value]], dtype=np.int64) for value in values]


def feed(predictor, values):
    for load in loads(*values):
        predictor.update(load)
    return predictor.predict()


def test_sliding_mean_forgets_and_rounds_down():
    assert feed(SlidingMean(3), [100, 1, 2, 5]).tolist() == [[2]]


def test_last():
    assert feed(LastIteration(), [7, 9]).tolist() == [[9]]


def test_exponential_mean_halves_the_distance():
    # 0, then 8 twice: 4, 6.
    assert feed(ExponentialMean(shift=1), [0, 8, 8]).tolist() == [[6]]


@pytest.mark.parametrize("name", PREDICTORS)
def test_nothing_before_the_first_update(name):
    assert PREDICTORS[name]().predict() is None


@pytest.mark.parametrize("name", PREDICTORS)
def test_state_survives_json(name):
    first, second = PREDICTORS[name](), PREDICTORS[name]()
    feed(first, [3, 10, 2**31])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert feed(first, [17]).tobytes() == feed(second, [17]).tobytes()


@pytest.mark.parametrize("name", PREDICTORS)
def test_any_dtype_gives_the_same_bytes(name):
    results = []
    for dtype in (np.int32, np.int64, np.uint16):
        predictor = PREDICTORS[name]()
        for value in (5, 8, 1000):
            predictor.update(np.array([[value, 1]], dtype=dtype))
        results.append(predictor.predict())
    assert {result.tobytes() for result in results} == {results[0].tobytes()}
    assert results[0].dtype == np.int64


def test_the_caller_may_reuse_its_array():
    predictor = SlidingMean()
    load = np.array([[5]], dtype=np.int64)
    predictor.update(load)
    load[:] = 0
    assert predictor.predict().tolist() == [[5]]


def test_wrong_settings():
    with pytest.raises(ValueError, match="at least 1"):
        SlidingMean(0)
    with pytest.raises(ValueError, match="shift"):
        ExponentialMean(17)

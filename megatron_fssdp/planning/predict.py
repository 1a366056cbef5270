# SPDX-License-Identifier: Apache-2.0

"""Predict the next iteration's loads from those seen. Whole numbers in and out.

Every rank runs the same predictor on the same counts and must get the same bytes, so states are
whole numbers and so are predictions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from megatron_fssdp.planning.plan import Int64Array

# Iterations that the sliding mean covers: the paper's w.
DEFAULT_WINDOW = 5


class Predictor(Protocol):
    """What a planner needs of a predictor."""

    def update(self, load_LE: Int64Array) -> None:
        """Take in the (L, E) int64 tokens that each expert got in the iteration just routed."""

    def predict(self) -> Int64Array | None:
        """Return the expected (L, E) int64 tokens of the next iteration, None if nothing seen."""

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain lists and ints, for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same kind of predictor."""


class SlidingMean:
    """The mean of the last w iterations, rounded down (the paper's choice with w = 5, sec. 4.2)."""

    def __init__(self, window: int = DEFAULT_WINDOW) -> None:
        if window < 1:
            raise ValueError(f"the window is {window} iterations; it must be at least 1")
        self.window = window
        self._history: deque[Int64Array] = deque(maxlen=window)

    def update(self, load_LE: Int64Array) -> None:
        """Take in one iteration's (L, E) loads."""
        self._history.append(np.array(load_LE, dtype=np.int64))

    def predict(self) -> Int64Array | None:
        """Return the prediction, None before any update."""
        if not self._history:
            return None
        total_LE: Int64Array = np.sum(np.stack(self._history), axis=0, dtype=np.int64)
        return total_LE // len(self._history)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain lists."""
        return {"history": [load_LE.tolist() for load_LE in self._history]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        history = [np.array(load, dtype=np.int64) for load in state["history"]]
        self._history = deque(history, maxlen=self.window)


class LastIteration(SlidingMean):
    """The iteration before: the quickest to follow a jump, the noisiest otherwise."""

    def __init__(self) -> None:
        super().__init__(window=1)


class ExponentialMean:
    """A mean whose weights halve with each iteration of age, times 2^-shift (fixed point).

    mean += (load - mean) / 2^shift, kept with 16 binary places: exact on every rank, where a
    floating mean would depend on the machine.
    """

    PLACES = 16

    def __init__(self, shift: int = 1) -> None:
        if not 0 <= shift <= self.PLACES:
            raise ValueError(f"the shift is {shift}; it must be in 0..{self.PLACES}")
        self.shift = shift
        self._mean_LE: Int64Array | None = None

    def update(self, load_LE: Int64Array) -> None:
        """Take in one iteration's (L, E) loads."""
        scaled_LE = np.array(load_LE, dtype=np.int64) << self.PLACES
        if self._mean_LE is None:
            self._mean_LE = scaled_LE
        else:
            self._mean_LE = self._mean_LE + ((scaled_LE - self._mean_LE) >> self.shift)

    def predict(self) -> Int64Array | None:
        """Return the prediction, None before any update."""
        if self._mean_LE is None:
            return None
        rounded_LE: Int64Array = (self._mean_LE + (1 << (self.PLACES - 1))) >> self.PLACES
        return rounded_LE

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain lists."""
        return {"mean": None if self._mean_LE is None else self._mean_LE.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        mean = state["mean"]
        self._mean_LE = None if mean is None else np.array(mean, dtype=np.int64)


# The smallest error over the recorded loads taken together: see `make bench-planner`.
DEFAULT_PREDICTOR = "exponential"

PREDICTORS: dict[str, Callable[[], Predictor]] = {
    "sliding": SlidingMean,
    "exponential": ExponentialMean,
    "last": LastIteration,
}


def make_predictor(name: str, window: int) -> Predictor:
    """Return a predictor of `PREDICTORS`; `window`: iterations that the sliding mean covers."""
    return SlidingMean(window) if name == "sliding" else PREDICTORS[name]()

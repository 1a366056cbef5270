# SPDX-License-Identifier: Apache-2.0

"""Make traces up: seeded, of any size.

even       every expert draws the same
zipf       Zipf shares that drift slowly, in each layer in another order
drift      the same, drifting fast: an expert's share doubles or halves within tens of iterations
bursts     Zipf shares; now and then an expert of a layer draws many times its share for a while
hot-rank   one rank's experts draw most, in each layer another's
domains    the text changes: shares jump to another order every tenth of the trace
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from megatron_fssdp.simulation.loads import DRIFT_STEP, drifting
from megatron_fssdp.simulation.recording import MOST
from megatron_fssdp.simulation.result import Float64Array, Int64Array
from megatron_fssdp.simulation.traces import Trace

# Noise of a fast drift's log share in an iteration; the share then wanders by a factor of 1.9.
FAST_STEP = 0.2
# Counts of a layer, and shares of all iterations, that are drawn at once.
MOST_OF_LAYER, MOST_SHARES = 2**24, 2**27
# A burst: its chance in a layer and iteration, how much it multiplies by, and its iterations.
BURST_CHANCE, BURST_FACTOR, BURST_LENGTH = 0.05, 16, 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a trace.

    Attributes:
        num_iterations, num_layers, num_ranks, num_experts: I, L, R, E.
        tokens: of a source rank in an iteration.
        topk: experts of a token.
        skew: Zipf exponent.

    Raises:
        ValueError: a size is out of range.
    """

    num_iterations: int
    num_layers: int
    num_ranks: int
    num_experts: int
    tokens: int = 8192
    topk: int = 8
    skew: float = 0.8

    def __post_init__(self) -> None:
        for name in ("num_iterations", "num_layers", "num_ranks", "num_experts", "tokens", "topk"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ValueError(f"{name} is {getattr(self, name)}; use 1 to {MOST}")
        for names, most in (
            (("num_ranks", "num_experts"), MOST_OF_LAYER),
            (("num_iterations", "num_layers", "num_experts"), MOST_SHARES),
        ):
            size = math.prod(getattr(self, name) for name in names)
            if size > most:
                raise ValueError(f"{' x '.join(names)} is {size}; use at most {most}")
        if self.topk > self.num_experts:
            raise ValueError(f"top-{self.topk} of {self.num_experts} experts cannot be chosen")
        if not 0 <= self.skew <= 10:
            raise ValueError(f"skew is {self.skew}; use 0 to 10")


Shares = Callable[[Shape, np.random.Generator], Float64Array]


def _zipf(shape: Shape, rng: np.random.Generator) -> Float64Array:
    """Draw (L, E) log shares, in each layer in another order."""
    log_E = -shape.skew * np.log(np.arange(1, shape.num_experts + 1))
    return np.stack([rng.permutation(log_E) for _ in range(shape.num_layers)])


def _drifting(shape: Shape, rng: np.random.Generator, step: float) -> Float64Array:
    logs = islice(drifting(_zipf(shape, rng), rng, step), shape.num_iterations)
    return np.stack(list(logs))


def _even(shape: Shape, rng: np.random.Generator) -> Float64Array:
    return np.zeros((shape.num_iterations, shape.num_layers, shape.num_experts))


def _slow(shape: Shape, rng: np.random.Generator) -> Float64Array:
    return _drifting(shape, rng, DRIFT_STEP)


def _fast(shape: Shape, rng: np.random.Generator) -> Float64Array:
    return _drifting(shape, rng, FAST_STEP)


def _bursts(shape: Shape, rng: np.random.Generator) -> Float64Array:
    log_ILE = _drifting(shape, rng, DRIFT_STEP)
    starts = rng.random((shape.num_iterations, shape.num_layers)) < BURST_CHANCE
    expert_IL = rng.integers(shape.num_experts, size=starts.shape)
    for iteration, layer in zip(*np.nonzero(starts), strict=True):
        during = slice(iteration, iteration + BURST_LENGTH)
        log_ILE[during, layer, expert_IL[iteration, layer]] += np.log(BURST_FACTOR)
    return log_ILE


def _hot_rank(shape: Shape, rng: np.random.Generator) -> Float64Array:
    log_ILE = _drifting(shape, rng, DRIFT_STEP)
    owner_E = np.arange(shape.num_experts) * shape.num_ranks // shape.num_experts
    # The hot rank draws about half of all tokens, whatever their number.
    for layer, rank in enumerate(rng.integers(shape.num_ranks, size=shape.num_layers)):
        log_ILE[:, layer, owner_E == rank] += np.log(max(shape.num_ranks - 1, 1))
    return log_ILE


def _domains(shape: Shape, rng: np.random.Generator) -> Float64Array:
    log_ILE = _drifting(shape, rng, DRIFT_STEP)
    length = max(shape.num_iterations // 10, 1)
    for start in range(length, shape.num_iterations, length):
        for layer in range(shape.num_layers):
            order = rng.permutation(shape.num_experts)
            log_ILE[start : start + length, layer] = log_ILE[start : start + length, layer][
                :, order
            ]
    return log_ILE


KINDS: dict[str, Shares] = {
    "even": _even,
    "zipf": _slow,
    "drift": _fast,
    "bursts": _bursts,
    "hot-rank": _hot_rank,
    "domains": _domains,
}


def generate(kind: str, shape: Shape, seed: int = 0) -> Trace:
    """Make a trace up. See the module for the kinds.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no kind {kind!r}; use one of {', '.join(KINDS)}")
    share_ILE = np.exp(KINDS[kind](shape, np.random.default_rng(seed)))
    share_ILE = _cap(share_ILE / share_ILE.sum(axis=2, keepdims=True), 1 / shape.topk)

    return Trace(
        source=f"{kind}, seed {seed}",
        iterations=tuple(range(shape.num_iterations)),
        num_layers=shape.num_layers,
        num_ranks=shape.num_ranks,
        num_experts=shape.num_experts,
        notes=(),
        read=partial(_draw_layers, share_ILE, shape, seed),
    )


def _draw_layers(share_ILE: Float64Array, shape: Shape, seed: int, position: int) -> Int64Array:
    """Draw an iteration: a generator for each place, so that they can be read in any order."""
    return np.stack(
        [
            _draw(share_E, shape, np.random.default_rng((seed, position, layer)))
            for layer, share_E in enumerate(share_ILE[position])
        ]
    )


def _cap(share: Float64Array, most: float) -> Float64Array:
    """Keep (..., E) shares below what an expert can draw: it is chosen once by a token, of k."""
    share = share.copy()
    is_full = np.zeros(share.shape, dtype=bool)
    while (share > most * (1 + 1e-9)).any():
        is_full |= share > most
        rest = np.where(is_full, 0.0, share)
        left = 1 - most * is_full.sum(axis=-1, keepdims=True)
        scaled = rest * left / np.maximum(rest.sum(axis=-1, keepdims=True), 1e-300)
        share = np.where(is_full, most, scaled)
    return share


def _draw(share_E: Float64Array, shape: Shape, rng: np.random.Generator) -> Int64Array:
    """Draw (R, E) tokens; what chance gives an expert beyond a rank's tokens goes to others."""
    drawn_RE = rng.multinomial(shape.tokens * shape.topk, share_E, size=shape.num_ranks)
    counts_RE = np.minimum(drawn_RE, shape.tokens)
    excess_R = (drawn_RE - counts_RE).sum(axis=1, keepdims=True)
    room_RE = shape.tokens - counts_RE
    before_RE = np.cumsum(room_RE, axis=1) - room_RE
    whole_RE: Int64Array = counts_RE + np.clip(excess_R - before_RE, 0, room_RE)
    return whole_RE

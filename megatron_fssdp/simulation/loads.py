# SPDX-License-Identifier: Apache-2.0

"""Load series to try planners on: made ones and recorded ones.

All are tokens: (T iterations, R source ranks, E experts) int64 for one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.plan import Int64Array

Float64Array = npt.NDArray[np.float64]

TRACES = Path(__file__).parent.parent / "data" / "traces"

# How Zipf series move: each iteration an expert's log share keeps this much of its distance from
# its Zipf share and gets normal noise of this size. The distance settles at 0.096 (10 % of the
# load, one sigma).
DRIFT_MEMORY = 0.95
DRIFT_STEP = 0.03


def drifting(
    log_share: Float64Array, rng: np.random.Generator, step: float = DRIFT_STEP
) -> Iterator[Float64Array]:
    """Yield log shares, iteration by iteration, that wander about the given ones.

    Args:
        log_share: of any shape, such as (E,) or (L, E).
        rng: noise is drawn when an iteration is asked for.
        step: see `DRIFT_STEP`.
    """
    offset = np.zeros_like(log_share)
    while True:
        offset = DRIFT_MEMORY * offset + step * rng.standard_normal(log_share.shape)
        yield log_share + offset


def zipf_series(
    num_experts: int,
    num_ranks: int,
    exponent: float,
    num_iterations: int,
    seed: int = 0,
    topk: int = 8,
    tokens: int = 8192,
    drift_step: float = DRIFT_STEP,
) -> Int64Array:
    """Make a Zipf load that drifts slowly.

    Args:
        num_experts: E.
        num_ranks: R.
        exponent: s; expert shares are proportional to 1 / place^s, in a random order.
        num_iterations: T.
        seed: of the generator.
        topk: experts of a token.
        tokens: of a source rank in an iteration.
        drift_step: see `DRIFT_STEP`.

    Returns:
        (T, R, E) int64.
    """
    rng = np.random.default_rng(seed)
    log_share_E = -exponent * np.log(np.arange(1, num_experts + 1))
    log_share_E = log_share_E[rng.permutation(num_experts)]
    logs = islice(drifting(log_share_E, rng, drift_step), num_iterations)
    return np.stack([_draw(np.exp(log_E), num_ranks, tokens * topk, rng) for log_E in logs])


def _draw(share_E: object, num_ranks: int, tokens: int, rng: np.random.Generator) -> Int64Array:
    share = np.asarray(share_E, dtype=np.float64)
    return rng.multinomial(tokens, share / share.sum(), size=num_ranks).astype(np.int64)


def yardstick() -> Iterator[tuple[int, int, float, int, Int64Array]]:
    """Yield the 156 instances that planners of this field are measured on.

    E in {8, 64, 128, 256} on R <= E ranks in {8, 16, 32, 64}, Zipf 0.5 to 1.2, three seeds, 8192
    tokens a rank, top-8 (top-2 at E = 8).

    Yields:
        E, R, exponent, seed, and (R, E) int64 counts.
    """
    for num_experts in (8, 64, 128, 256):
        for num_ranks in (8, 16, 32, 64):
            if num_ranks > num_experts:
                continue
            for exponent in (0.5, 0.8, 1.0, 1.2):
                for seed in range(3):
                    rng = np.random.default_rng(seed)
                    share_E = np.arange(1, num_experts + 1) ** -exponent
                    share_E /= share_E.sum()
                    share_E = share_E[rng.permutation(num_experts)]
                    tokens = 8192 * (2 if num_experts == 8 else 8)
                    counts_RE = rng.multinomial(tokens, share_E, size=num_ranks)
                    yield num_experts, num_ranks, exponent, seed, counts_RE.astype(np.int64)


def _balanced(rng: np.random.Generator, num_experts: int, num_ranks: int, t: int) -> Int64Array:
    return np.full((num_ranks, num_experts), 256, dtype=np.int64)


def _hot_experts(rng: np.random.Generator, num_experts: int, num_ranks: int, t: int) -> Int64Array:
    share_E = np.ones(num_experts)
    share_E[:: max(num_experts // 2, 1)] = num_experts / 4
    return _draw(share_E, num_ranks, 256 * num_experts, rng)


def _hot_rank(rng: np.random.Generator, num_experts: int, num_ranks: int, t: int) -> Int64Array:
    share_E = np.ones(num_experts)
    share_E[: max(num_experts // num_ranks, 1)] = num_ranks / 2
    return _draw(share_E, num_ranks, 256 * num_experts, rng)


def _spread(rng: np.random.Generator, num_experts: int, num_ranks: int, t: int) -> Int64Array:
    return _draw(np.linspace(0.5, 1.5, num_experts), num_ranks, 256 * num_experts, rng)


def _ragged(rng: np.random.Generator, num_experts: int, num_ranks: int, t: int) -> Int64Array:
    counts_RE = _hot_experts(rng, num_experts, num_ranks, t)
    return counts_RE * np.arange(1, num_ranks + 1)[:, None] // num_ranks


def _zeros(rng: np.random.Generator, num_experts: int, num_ranks: int, t: int) -> Int64Array:
    counts_RE = _hot_experts(rng, num_experts, num_ranks, t)
    counts_RE[:, 1::2] = 0
    counts_RE[1::3] = 0
    return counts_RE


def _rotating(rng: np.random.Generator, num_experts: int, num_ranks: int, t: int) -> Int64Array:
    share_E = np.ones(num_experts)
    share_E[(t * 3) % num_experts] = num_experts / 2
    return _draw(share_E, num_ranks, 256 * num_experts, rng)


def _burst(rng: np.random.Generator, num_experts: int, num_ranks: int, t: int) -> Int64Array:
    share_E = np.ones(num_experts)
    if t % 8 == 7:
        share_E[num_experts // 2] = num_experts
    return _draw(share_E, num_ranks, 256 * num_experts, rng)


# The eight shapes that users of Megatron-LM asked to be tried (NVIDIA/Megatron-LM#7488).
SHAPES: dict[str, Callable[[np.random.Generator, int, int, int], Int64Array]] = {
    "W0 balanced": _balanced,
    "W1 hot experts": _hot_experts,
    "W2 hot rank": _hot_rank,
    "W3 spread": _spread,
    "W4 ragged sources": _ragged,
    "W5 zeros": _zeros,
    "W6 rotating": _rotating,
    "W7 burst": _burst,
}


def shape_series(
    name: str, num_experts: int, num_ranks: int, num_iterations: int, seed: int = 0
) -> Int64Array:
    """Make one of `SHAPES`: (T, R, E) int64."""
    rng = np.random.default_rng(seed)
    make = SHAPES[name]
    return np.stack([make(rng, num_experts, num_ranks, t) for t in range(num_iterations)])


def domain_series(num_ranks: int, layer: int, tokens: int = 8192) -> Int64Array:
    """Read gpt-oss-20b's loads of one layer, a text domain an iteration: each is a jump.

    Args:
        num_ranks: R; the recorded shares are drawn for each source rank.
        layer: 0..23.
        tokens: of a source rank, top-4.

    Returns:
        (291, R, 32) int64.
    """
    with np.load(TRACES / "gptoss20b_domain_loads.npz", allow_pickle=False) as data:
        loads_TE = data["loads"][:, layer]
    rng = np.random.default_rng(layer)
    return np.stack([_draw(load_E, num_ranks, tokens * 4, rng) for load_E in loads_TE])


def training_series(path: str | Path) -> Int64Array | None:
    """Read loads recorded by this project's own training, if the file is there.

    Returns:
        (T, L, R, E) int64, or None.
    """
    if not Path(path).exists():
        return None
    with np.load(path, allow_pickle=False) as data:
        counts: Int64Array = data["counts"].astype(np.int64)
        return counts


def recorded_rank_tokens() -> dict[str, Int64Array]:
    """Read what ranks received in LAER-MoE's published runs.

    Returns:
        For each `METHOD__MODEL`, (T, L, 32) int64 tokens of each rank (see the data's README).
    """
    with np.load(TRACES / "laer_moe_tokens_per_rank.npz", allow_pickle=False) as data:
        return {name: data[name].astype(np.int64) for name in data.files}

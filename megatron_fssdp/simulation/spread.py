# SPDX-License-Identifier: Apache-2.0

"""A trace's loads on the ranks that are simulated, and a trace that is made up.

A trace rarely has the ranks, tokens and layers of the job in question. Nothing is drawn here; what
is done is said in `Spread.notes`:

- tokens: each source rank's counts are scaled to the job's tokens of a micro-batch, and rounded so
  that the sum is kept (largest remainders first, ties to the lower expert);
- ranks: if the trace has as many sources as a whole pipeline stage has expert-parallel ranks, each
  expert-parallel group gets its own; else all groups are alike, and rank r of R gets the sources
  from r * S / R to (r + 1) * S / R of the trace's S;
- layers: the model's MoE layers take the trace's in turn, from the first;
- experts must be as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.simulation.loads import DRIFT_STEP, drifting
from megatron_fssdp.simulation.model import Job

Float64Array = npt.NDArray[np.float64]


class Trace(Protocol):
    """What the simulator needs of a trace."""

    @property
    def num_iterations(self) -> int:
        """Iterations."""

    @property
    def num_layers(self) -> int:
        """MoE layers."""

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""

    @property
    def num_ranks(self) -> int | None:
        """Source ranks; None where only totals are known."""

    @property
    def iterations(self) -> tuple[int, ...]:
        """The iterations' numbers in the run that was recorded."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of it."""

    def counts(self, iteration: int) -> Int64Array:
        """Return (layers, source ranks, experts) tokens at a position, or (layers, experts)."""


@dataclass(frozen=True, eq=False)
class ZipfTrace:
    """Zipf loads that drift slowly, of any size: `loads.zipf_series` for all layers, made lazily.

    Attributes:
        exponent: shares are proportional to 1 / place^exponent, in each layer in another order.
        num_experts, num_layers, num_ranks, num_iterations: sizes.
        tokens: of a source rank, times top-k.
        drift_step: see `loads.DRIFT_STEP`.
        seed: of everything.
    """

    exponent: float
    num_experts: int
    num_layers: int
    num_ranks: int
    num_iterations: int
    tokens: int = 16384
    drift_step: float = DRIFT_STEP
    seed: int = 0

    @property
    def iterations(self) -> tuple[int, ...]:
        """From 0."""
        return tuple(range(self.num_iterations))

    @property
    def notes(self) -> tuple[str, ...]:
        """How loads are made."""
        return (
            f"loads are made up: Zipf {self.exponent:g} in each layer in another order, drifting "
            "slowly",
        )

    @cached_property
    def _shares_TLE(self) -> Float64Array:
        rng = np.random.default_rng(self.seed)
        size = (self.num_layers, self.num_experts)
        places = np.argsort(rng.random(size), axis=1) + 1
        log_LE = -self.exponent * np.log(places)
        logs = islice(drifting(log_LE, rng, self.drift_step), self.num_iterations)
        share_TLE = np.exp(np.stack(list(logs)))
        return share_TLE / share_TLE.sum(axis=2, keepdims=True)

    def counts(self, iteration: int) -> Int64Array:
        """Draw an iteration's (L, R, E) tokens."""
        rng = np.random.default_rng((self.seed, iteration))
        drawn = [
            rng.multinomial(self.tokens, share_E, size=self.num_ranks)
            for share_E in self._shares_TLE[iteration]
        ]
        return np.stack(drawn).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Spread:
    """A trace, spread over a job's ranks.

    Attributes:
        trace: where loads come from.
        job: what is simulated.

    Raises:
        ValueError: if the trace has another number of experts than the model.
    """

    trace: Trace
    job: Job

    def __post_init__(self) -> None:
        wanted = self.job.shape.num_experts
        if self.trace.num_experts != wanted:
            raise ValueError(
                f"the trace has {self.trace.num_experts} experts, the model {wanted}: "
                "take a trace of this model, or a generated one"
            )

    @property
    def num_groups(self) -> int:
        """G: expert-parallel groups of a stage with loads of their own; 1: all are alike."""
        layout = self.job.layout
        return layout.edp if self.trace.num_ranks == layout.ep * layout.edp else 1

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What was done to the trace."""
        layout, found = self.job.layout, list(self.trace.notes)
        sources = self.trace.num_ranks
        if sources is None:
            found.append("the trace has totals only: all source ranks have the same shares")
        elif self.num_groups == 1 and sources != layout.ep:
            found.append(f"the trace's {sources} source ranks are spread over {layout.ep} in order")
        if self.num_groups == 1 and layout.edp > 1:
            found.append(f"all {layout.edp} expert-parallel groups of a stage have the same loads")
        wanted = len(self.job.shape.moe_layers)
        if self.trace.num_layers != wanted:
            found.append(
                f"the model's {wanted} MoE layers take the trace's {self.trace.num_layers} in turn"
            )
        tokens = self.job.tokens_per_rank
        found.append(
            f"counts are scaled to {tokens} tokens x top-{self.job.shape.topk} of a rank and "
            "micro-batch; all micro-batches of an iteration are alike"
        )
        return tuple(found)

    def counts(self, iteration: int) -> Int64Array:
        """Return (G, L, R, E) int64 tokens of a micro-batch."""
        layout, num_groups = self.job.layout, self.num_groups
        counts = self.trace.counts(iteration)
        if counts.ndim == 2:
            counts = counts[:, None]
        layers = np.arange(len(self.job.shape.moe_layers)) % len(counts)
        counts = counts[layers]
        if num_groups > 1:
            shape = (len(counts), num_groups, layout.ep, -1)
            counts_GLRE = np.moveaxis(counts.reshape(shape), 1, 0)
        else:
            counts_GLRE = _spread_ranks(counts, layout.ep)[None]
        return scale_rows(counts_GLRE, self.job.tokens_per_rank * self.job.shape.topk)


def _spread_ranks(counts_LSE: Int64Array, num_ranks: int) -> Int64Array:
    sources = counts_LSE.shape[1]
    if sources == num_ranks:
        return counts_LSE
    first = np.arange(num_ranks) * sources // num_ranks
    end = np.maximum((np.arange(num_ranks) + 1) * sources // num_ranks, first + 1)
    run = np.concatenate([np.zeros_like(counts_LSE[:, :1]), np.cumsum(counts_LSE, axis=1)], axis=1)
    spread: Int64Array = run[:, end] - run[:, first]
    return spread


def scale_rows(counts: Int64Array, total: int) -> Int64Array:
    """Scale the last axis to whole numbers that sum to `total`; rows without tokens get it evenly.

    Example: [3, 1] to 6 is [4.5, 1.5]: [5, 1].
    """
    counts = np.asarray(counts, dtype=np.float64)
    sums = counts.sum(axis=-1, keepdims=True)
    share = np.where(sums > 0, counts / np.maximum(sums, 1), 1.0 / counts.shape[-1])
    exact = share * total
    whole = np.floor(exact)
    # Rounded, so that equal remainders stay equal whatever the sum's rounding was.
    remainder = np.round(exact - whole, 9)
    left = total - whole.sum(axis=-1, keepdims=True)
    place = np.argsort(np.argsort(-remainder, axis=-1, kind="stable"), axis=-1, kind="stable")
    return (whole + (place < left)).astype(np.int64)

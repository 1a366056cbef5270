# SPDX-License-Identifier: Apache-2.0

"""Search the settings that make a job fastest on its trace, and say what they are worth.

One setting after the other is varied, and the default kept unless another value is surely faster:
replica slots and whether replicas are kept or
re-materialized together, then predictor, balance tolerance and re-sharding interval. Settings are
chosen on the first half of the iterations and judged on the second, so that luck in choosing does
not count as gain. The gain's interval is a bootstrap over blocks of iterations, which follow each
other as they ran. What the simulator itself gets wrong is not in it.

Not searched: `--fssdp-collectives` and `--fssdp-overlap`. Their defaults take what the cost model
finds faster for each plan, and hide what can be hidden; no trace makes another value faster here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from megatron_fssdp.planning.predict import DEFAULT_PREDICTOR
from megatron_fssdp.simulation.cluster import Cluster
from megatron_fssdp.simulation.model import Job
from megatron_fssdp.simulation.result import Float64Array, SystemResult
from megatron_fssdp.simulation.simulate import simulate
from megatron_fssdp.simulation.spread import Trace
from megatron_fssdp.simulation.systems import Options

SLOTS = (1, 2, 4, 8)
PREDICTORS = ("exponential", "sliding", "last")
TOLERANCES = (0.01, 0.05, 0.1)
INTERVALS = (0, 25, 100)

# A setting must surely be faster by this to replace a default, and candidates this close in time
# are equal: the one with less memory is taken.
EQUAL = 0.005
# Held-out iterations without which there is neither an interval nor a verdict: blocks of 3 of fewer
# than 8 hardly differ.
LEAST_HELD_OUT = 8
# A gain whose interval does not exceed this is not worth a flag.
LEAST_GAIN = 1.01
DRAWS = 2000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is searched: `--fssdp-*` flags.

    Attributes:
        num_replica_slots, predictor, balance_tolerance, reshard_interval: as the flags.
        rematerializes: `--fssdp-rematerialize`.
    """

    num_replica_slots: int = 2
    rematerializes: bool = False
    predictor: str = DEFAULT_PREDICTOR
    balance_tolerance: float = 0.01
    reshard_interval: int = 100

    @property
    def flags(self) -> str:
        """The flags, those at their defaults left out."""
        default, words = Settings(), ["--moe-parallel fssdp"]
        if self.num_replica_slots != default.num_replica_slots:
            words.append(f"--fssdp-num-replica-slots {self.num_replica_slots}")
        if self.rematerializes:
            words.append("--fssdp-rematerialize")
        if self.predictor != default.predictor:
            words.append(f"--fssdp-predictor {self.predictor}")
        if self.balance_tolerance != default.balance_tolerance:
            words.append(f"--fssdp-balance-tolerance {self.balance_tolerance}")
        if self.reshard_interval != default.reshard_interval:
            words.append(f"--fssdp-reshard-interval {self.reshard_interval}")
        return " ".join(words)

    @property
    def system(self) -> str:
        """The simulator's name of it."""
        return "fssdp-rm" if self.rematerializes else "fssdp"

    def options(self) -> Options:
        """Return what the simulator takes."""
        options = Options(
            num_replica_slots=self.num_replica_slots,
            predictor=self.predictor,
            reshard_interval=self.reshard_interval,
        )
        tolerance = self.balance_tolerance
        return replace(options, settings=replace(options.settings, balance_tolerance=tolerance))


@dataclass(frozen=True, eq=False)
class Tried:
    """A candidate and what it does.

    Attributes:
        settings: the candidate.
        result: its simulation.
        fits: whether the fullest rank's memory is enough.
    """

    settings: Settings
    result: SystemResult
    fits: bool

    def choice_s(self) -> float:
        """Mean seconds of the iterations that settings are chosen on."""
        return float(self.result.iteration_s[: halves(self.result.iteration_s)].mean())


@dataclass(frozen=True, eq=False)
class Advice:
    """What the search found.

    Attributes:
        ep: plain EP's simulation.
        tried: all candidates, in the order in which they were tried.
        best: the fastest that fits; None: none fits.
        gain: EP's mean iteration over the best's, over the iterations that nothing was chosen on.
        low, high: its 95 % interval, where there `is_enough`.
        notes: what a reader must know.
    """

    ep: SystemResult
    tried: tuple[Tried, ...]
    best: Tried | None
    gain: float
    low: float
    high: float
    notes: tuple[str, ...]

    @property
    def held_out(self) -> int:
        """Iterations that the gain is judged on."""
        number = len(self.ep.iteration_s)
        return number - halves(self.ep.iteration_s) if number > 1 else 0

    @property
    def is_enough(self) -> bool:
        """Whether there are iterations enough for an interval and a verdict."""
        return self.held_out >= LEAST_HELD_OUT

    @property
    def is_worth_it(self) -> bool:
        """Whether FSSDP should be on."""
        return self.is_enough and self.best is not None and self.low > LEAST_GAIN


def halves(iteration_I: Float64Array) -> int:
    """Return how many iterations settings are chosen on; of one, that one."""
    return max(len(iteration_I) // 2, 1)


def tune(
    job: Job,
    cluster: Cluster,
    trace: Trace,
    *,
    num_iterations: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Advice:
    """Search settings. See the module.

    Args:
        job: as `simulate` takes it.
        cluster: the same.
        trace: the same.
        num_iterations: the same.
        progress: called with each candidate's flags before it is tried.

    Raises:
        ValueError: as `simulate`.
    """

    def run(system: str, options: Options) -> SystemResult:
        result = simulate(
            job, cluster, trace, [system], options=options, num_iterations=num_iterations
        )
        notes.extend(note for note in result.notes if note not in notes)
        return result.systems[0]

    notes: list[str] = []
    ep = run("ep", Options())
    tried: dict[Settings, Tried] = {}
    default = Settings()
    best = replace(default, num_replica_slots=min(default.num_replica_slots, _most_slots(job)))
    room = cluster.usable_bytes
    for candidates in _rounds(job, len(ep.iteration_s)):
        for settings in candidates(best):
            if settings not in tried:
                if progress is not None:
                    progress(settings.flags)
                result = run(settings.system, settings.options())
                fits = room is None or (result.peak_bytes or 0) <= room
                tried[settings] = Tried(settings, result, fits)
        fitting = [each for each in tried.values() if each.fits]
        if not fitting and room is not None and (ep.peak_bytes or 0) > room:
            notes.append(
                "nothing fits in memory, plain EP neither: take more nodes; this is by time"
            )
            room, tried = None, {key: replace(each, fits=True) for key, each in tried.items()}
            fitting = list(tried.values())
        if not fitting:
            break
        best = _choose(fitting, tried.get(best)).settings
    found = tried[best] if tried[best].fits else None
    gain, low, high = bootstrap(ep.iteration_s, tried[best].result.iteration_s)
    return Advice(ep, tuple(tried.values()), found, gain, low, high, tuple(notes))


def _most_slots(job: Job) -> int:
    """Return the slots that can be filled: as many as others have experts."""
    owned = job.shape.num_experts // job.layout.ep
    return max(job.shape.num_experts - owned, 1)


def _rounds(job: Job, num_iterations: int) -> Iterator[Callable[[Settings], list[Settings]]]:
    """Yield what to vary, one setting at a time, around the best so far."""
    slots = [each for each in SLOTS if each <= _most_slots(job)]
    yield lambda best: [
        replace(best, num_replica_slots=each, rematerializes=drops)
        for each in slots
        for drops in (False, True)
    ]
    yield lambda best: [replace(best, predictor=each) for each in PREDICTORS]
    yield lambda best: [replace(best, balance_tolerance=each) for each in TOLERANCES]
    # An interval that never comes round shows nothing.
    seen = [each for each in INTERVALS if each < num_iterations or each == 100]
    yield lambda best: [replace(best, reshard_interval=each) for each in seen]


def _choose(fitting: list[Tried], so_far: Tried | None) -> Tried:
    """Return the best so far unless others are surely faster; of those the fastest.

    Of equally fast ones it is that with the least memory, then the fewest flags.
    """
    if so_far is not None and so_far.fits:
        fitting = [each for each in fitting if _is_surely_faster(each, so_far)]
        if not fitting:
            return so_far
    fastest = min(each.choice_s() for each in fitting)
    near = [each for each in fitting if each.choice_s() <= fastest * (1 + EQUAL)]
    return min(
        near, key=lambda each: (each.result.peak_bytes or 0, len(each.settings.flags.split()))
    )


def _is_surely_faster(one: Tried, other: Tried) -> bool:
    """Whether it is, by more than `EQUAL`, on the iterations that settings are chosen on."""
    number = halves(one.result.iteration_s)
    _, low, _ = _ratio(other.result.iteration_s[:number], one.result.iteration_s[:number])
    return low > 1 + EQUAL


def bootstrap(
    ep_I: Float64Array, fssdp_I: Float64Array, seed: int = 0
) -> tuple[float, float, float]:
    """Return the gain and its 95 % interval, over the iterations that nothing was chosen on.

    Args:
        ep_I: (I,) seconds of plain EP's iterations.
        fssdp_I: (I,) seconds of the same iterations with the candidate.
        seed: of the draws.
    """
    first = halves(ep_I) if len(ep_I) > 1 else 0
    return _ratio(ep_I[first:], fssdp_I[first:], seed)


def _ratio(slow_I: Float64Array, fast_I: Float64Array, seed: int = 0) -> tuple[float, float, float]:
    """Return the ratio of the means and its 95 % interval.

    Blocks of iterations are drawn, of both systems alike: neighbours resemble each other, and both
    see the same loads. Blocks are as long as the square root of the iterations, rounded.
    """
    pairs = np.stack([slow_I, fast_I])
    number = pairs.shape[1]
    length = max(round(number**0.5), 1)
    blocks = -(-number // length)
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, number - length + 1, size=(DRAWS, blocks, 1))
    drawn = (starts + np.arange(length)).reshape(DRAWS, -1)[:, :number]
    means = pairs[:, drawn].mean(axis=2)
    low, high = np.percentile(means[0] / means[1], [2.5, 97.5])
    return float(pairs[0].mean() / pairs[1].mean()), float(low), float(high)

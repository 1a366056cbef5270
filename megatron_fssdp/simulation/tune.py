# SPDX-License-Identifier: Apache-2.0

"""Search the settings that make a job fastest on its trace, and say what they are worth.

One setting after the other is varied, and the default kept unless another value is surely faster:
replica slots and whether replicas are kept or re-materialized together, then predictor and window,
balance tolerance and re-sharding interval. Settings are chosen on the first half of the iterations
and judged on the second, so that luck in choosing does not count as gain. The gain's interval is a
bootstrap over blocks of iterations, which follow each other as they ran. What the simulator itself
gets wrong is not in it.

Not searched: `--fssdp-collectives` and `--fssdp-overlap`. Their defaults take what the cost model
finds faster for each plan, and hide what can be hidden; no trace makes another value faster here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np

from megatron_fssdp.planning.predict import DEFAULT_PREDICTOR, DEFAULT_WINDOW
from megatron_fssdp.simulation.cluster import Cluster
from megatron_fssdp.simulation.model import Job
from megatron_fssdp.simulation.result import Float64Array, SystemResult
from megatron_fssdp.simulation.simulate import simulate
from megatron_fssdp.simulation.spread import Trace
from megatron_fssdp.simulation.systems import Options
from megatron_fssdp.simulation.systems.planning import fssdp_planning

SLOTS = (1, 2, 4, 8)
# With the window, which counts for the sliding mean alone.
PREDICTORS = (
    ("exponential", DEFAULT_WINDOW),
    *(("sliding", window) for window in (2, DEFAULT_WINDOW, 10)),
    ("last", DEFAULT_WINDOW),
)
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
        num_replica_slots, predictor, prediction_window, balance_tolerance, reshard_interval: as
            the flags.
        rematerializes: `--fssdp-rematerialize`.
    """

    num_replica_slots: int = 2
    rematerializes: bool = False
    predictor: str = DEFAULT_PREDICTOR
    prediction_window: int = DEFAULT_WINDOW
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
        if self.prediction_window != default.prediction_window:
            words.append(f"--fssdp-prediction-window {self.prediction_window}")
        if self.balance_tolerance != default.balance_tolerance:
            words.append(f"--fssdp-balance-tolerance {self.balance_tolerance}")
        if self.reshard_interval != default.reshard_interval:
            words.append(f"--fssdp-reshard-interval {self.reshard_interval}")
        return " ".join(words)

    @property
    def system(self) -> str:
        """The simulator's name of it."""
        return "fssdp-rm" if self.rematerializes else "fssdp"

    @classmethod
    def of_options(cls, options: Options) -> Settings:
        """Return the settings of options, such as a preset's."""
        return cls(
            num_replica_slots=options.num_replica_slots,
            rematerializes=options.rematerializes,
            predictor=options.predictor,
            prediction_window=options.prediction_window,
            balance_tolerance=options.settings.balance_tolerance,
            reshard_interval=options.reshard_interval,
        )

    def options(self, planning_s: float | None = None) -> Options:
        """Return what the simulator takes; `planning_s` as `Options` has it."""
        options = Options(
            num_replica_slots=self.num_replica_slots,
            predictor=self.predictor,
            prediction_window=self.prediction_window,
            reshard_interval=self.reshard_interval,
            planning_s=planning_s,
            rematerializes=self.rematerializes,
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
        planning_s, planning_source: what quotas are charged, and where that is from.
        break_even_s: what they may take before the best (or the fastest, if none fits) is no faster
            than EP; None: it never is.
        notes: what a reader must know.
    """

    ep: SystemResult
    tried: tuple[Tried, ...]
    best: Tried | None
    gain: float
    low: float
    high: float
    planning_s: float
    planning_source: str
    break_even_s: float | None
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
    planning_s: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Advice:
    """Search settings. See the module.

    Args:
        job: as `simulate` takes it.
        cluster: the same.
        trace: the same.
        num_iterations: the same.
        planning_s: as `Options` has it.
        progress: called with each candidate's flags before it is tried.

    Raises:
        ValueError: as `simulate`.
    """
    simulated = partial(simulate, job, cluster, trace, num_iterations=num_iterations)

    def run(system: str, options: Options) -> SystemResult:
        result = simulated([system], options=options)
        notes.extend(note for note in result.notes if note not in notes)
        return result.systems[0]

    notes: list[str] = []
    ep = run("ep", Options())
    tried: dict[Settings, Tried] = {}
    default = Settings.of_options(Options.of_flags(job.fssdp_args))
    best = replace(
        default, num_replica_slots=min(default.num_replica_slots, max(job.most_slots, 1))
    )
    room = cluster.usable_bytes
    for candidates in _rounds(job, len(ep.iteration_s)):
        for settings in candidates(best):
            if settings not in tried:
                if progress is not None:
                    progress(settings.flags)
                result = run(settings.system, settings.options(planning_s))
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
    charged_s, source = fssdp_planning(cluster, planning_s, job.layout.ep)

    def judged_s(seconds: float) -> float:
        result = simulated([best.system], options=best.options(seconds))
        return _judged_s(result.systems[0].iteration_s)

    break_even = break_even_s(
        judged_s, _judged_s(ep.iteration_s), charged_s, _judged_s(tried[best].result.iteration_s)
    )
    found = tried[best] if tried[best].fits else None
    notes.extend(_against_preset(best, default))
    gain, low, high = bootstrap(ep.iteration_s, tried[best].result.iteration_s)
    return Advice(
        ep=ep,
        tried=tuple(tried.values()),
        best=found,
        gain=gain,
        low=low,
        high=high,
        planning_s=charged_s,
        planning_source=source,
        break_even_s=break_even,
        notes=tuple(notes),
    )


def _against_preset(best: Settings, preset: Settings) -> list[str]:
    """Say which flags must be given though they have their default: a preset's would stay."""
    notes, default = [], Settings()
    if preset.rematerializes and not best.rematerializes:
        notes.append("the preset re-materializes: add --fssdp-rematerialize=false to these flags")
    for name in (field.name for field in fields(Settings) if field.name != "rematerializes"):
        value, flag = getattr(best, name), f"--fssdp-{name.replace('_', '-')}"
        if value == getattr(default, name) != getattr(preset, name):
            notes.append(
                f"the preset has {flag} {getattr(preset, name)}: add {flag} {value} to these flags"
            )
    return notes


def _judged_s(iteration_I: Float64Array) -> float:
    """Mean seconds of the iterations that nothing was chosen on."""
    first = halves(iteration_I) if len(iteration_I) > 1 else 0
    return float(iteration_I[first:].mean())


def break_even_s(
    iteration_s: Callable[[float], float], ep_s: float, charged_s: float, took_s: float
) -> float | None:
    """Return the planning time at which an iteration takes as long as EP's.

    Iterations are longer the longer quotas take, first less than in proportion (copies hide under
    them), so secants come near in a few steps.

    Args:
        iteration_s: seconds of an iteration with quotas of so many seconds.
        ep_s: of EP's.
        charged_s: quotas of which the iteration is known.
        took_s: that iteration.

    Returns:
        Seconds to about 0.1 % of an iteration; None if quotas would have to take less than none.
    """
    least_s = iteration_s(0.0)
    if least_s >= ep_s:
        return None
    low, high = (0.0, least_s), (charged_s, took_s)
    if charged_s == 0.0:
        high = (1e-3, iteration_s(1e-3))
    for _ in range(8):
        if abs(high[1] - ep_s) <= 1e-3 * ep_s or high[1] <= low[1]:
            break
        at = low[0] + (ep_s - low[1]) * (high[0] - low[0]) / (high[1] - low[1])
        found = (at, iteration_s(at))
        # Keep EP's time between two points where that is known, else the later two.
        if found[1] < ep_s:
            low, high = (found, high) if high[1] > ep_s else (high, found)
        else:
            high = found
    return high[0]


def _rounds(job: Job, num_iterations: int) -> Iterator[Callable[[Settings], list[Settings]]]:
    """Yield what to vary, one setting at a time, around the best so far."""
    slots = [each for each in SLOTS if each <= max(job.most_slots, 1)]
    yield lambda best: [
        replace(best, num_replica_slots=each, rematerializes=drops)
        for each in slots
        for drops in (False, True)
    ]
    yield lambda best: [
        replace(best, predictor=each, prediction_window=window) for each, window in PREDICTORS
    ]
    yield lambda best: [replace(best, balance_tolerance=each) for each in TOLERANCES]
    # An interval that never comes round shows nothing, neither for it nor for never.
    seen = [each for each in INTERVALS if 0 < each < num_iterations]
    if seen:
        yield lambda best: [replace(best, reshard_interval=each) for each in (0, *seen)]


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

"""Pairwise covering: few cases in which every two values of two factors meet at least once.

Greedy and deterministic: each case starts from the first pair that no case has yet, and every
further factor takes the value that meets the most new pairs, if the constraints can still be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

# Values by factor; a pair is two factors with a value of each.
Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


@dataclass(frozen=True)
class Constraint:
    """What some factors' values must fulfil together."""

    names: tuple[str, ...]
    holds: Callable[..., bool]

    def allows(self, case: Case) -> bool:
        """Whether a case that may lack factors can still keep this."""
        return any(name not in case for name in self.names) or self.holds(
            *(case[name] for name in self.names)
        )


def covering_cases(
    factors: Mapping[str, Sequence[Any]], constraints: Sequence[Constraint]
) -> list[Case]:
    """Return cases that cover every pair that the constraints allow."""
    missing = feasible_pairs(factors, constraints)
    cases = []
    while missing:
        case = _complete(dict(missing[0]), factors, constraints, set(missing))
        assert case is not None, "only feasible pairs are left"
        cases.append({name: case[name] for name in factors})
        covered = pairs_of(case, factors)
        missing = [pair for pair in missing if pair not in covered]
    return cases


def feasible_pairs(
    factors: Mapping[str, Sequence[Any]], constraints: Sequence[Constraint]
) -> list[Pair]:
    """Return the pairs that are part of some allowed case, in the order of the factors."""
    return [
        pair
        for pair in _all_pairs(factors)
        if _complete(dict(pair), factors, constraints, set()) is not None
    ]


def pairs_of(case: Case, factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """Return the pairs that meet in a case."""
    return {((a, case[a]), (b, case[b])) for a, b in combinations(factors, 2)}


def spread(cases: Sequence[Case], factors: Mapping[str, Sequence[Any]], count: int) -> list[int]:
    """Return the positions of `count` cases, each adding the most pairs to those before it."""
    chosen: list[int] = []
    covered: set[Pair] = set()
    for _ in range(count):
        left = [position for position in range(len(cases)) if position not in chosen]
        best = max(left, key=lambda position: len(pairs_of(cases[position], factors) - covered))
        chosen.append(best)
        covered |= pairs_of(cases[best], factors)
    return chosen


def _all_pairs(factors: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    for a, b in combinations(factors, 2):
        for of_a, of_b in product(factors[a], factors[b]):
            yield (a, of_a), (b, of_b)


def _complete(
    case: Case,
    factors: Mapping[str, Sequence[Any]],
    constraints: Sequence[Constraint],
    wanted: set[Pair],
) -> Case | None:
    """Fill a case up, the values that meet the most wanted pairs first; None: it cannot be."""
    if not all(constraint.allows(case) for constraint in constraints):
        return None
    name = next((name for name in factors if name not in case), None)
    if name is None:
        return case

    def num_new(value: Any) -> int:
        given = case.items()
        return sum(
            (other, (name, value)) in wanted or ((name, value), other) in wanted for other in given
        )

    for value in sorted(factors[name], key=num_new, reverse=True):
        found = _complete({**case, name: value}, factors, constraints, wanted)
        if found is not None:
            return found
    return None

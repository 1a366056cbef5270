"""The covering suite covers: every allowed pair, in few cases, the same every time."""

from __future__ import annotations

from itertools import combinations, product

from tests.pairwise import Constraint, covering_cases, feasible_pairs, pairs_of, spread

FACTORS = {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1), "d": (0, 1)}
CONSTRAINTS = (
    Constraint(("a", "b"), lambda a, b: a + b < 3),
    Constraint(("b", "c", "d"), lambda b, c, d: not (b == c == d == 1)),
)


def _allowed() -> list[dict[str, int]]:
    """Every allowed case, by trying all."""
    cases = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    return [case for case in cases if all(each.allows(case) for each in CONSTRAINTS)]


def test_every_allowed_pair_is_covered_and_nothing_else_is_run() -> None:
    allowed = _allowed()
    pairs = set().union(*(pairs_of(case, FACTORS) for case in allowed))
    assert set(feasible_pairs(FACTORS, CONSTRAINTS)) == pairs
    cases = covering_cases(FACTORS, CONSTRAINTS)
    assert all(case in allowed for case in cases)
    assert set().union(*(pairs_of(case, FACTORS) for case in cases)) == pairs
    assert len(cases) < len(allowed) / 2
    assert cases == covering_cases(FACTORS, CONSTRAINTS)


def test_a_hidden_constraint_is_found() -> None:
    """No single constraint forbids a pair; two of them together do."""
    factors = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    constraints = (
        Constraint(("a", "c"), lambda a, c: a == 0 or c == 1),
        Constraint(("b", "c"), lambda b, c: b == 0 or c == 0),
    )
    assert (("a", 1), ("b", 1)) not in feasible_pairs(factors, constraints)
    assert len(feasible_pairs(factors, constraints)) == 3 + 3 + 3


def test_the_few_cover_the_most() -> None:
    cases = covering_cases(FACTORS, CONSTRAINTS)
    first, second = spread(cases, FACTORS, 2)
    together = len(pairs_of(cases[first], FACTORS) | pairs_of(cases[second], FACTORS))
    for one, other in combinations(range(len(cases)), 2):
        if one == first:
            both = pairs_of(cases[one], FACTORS) | pairs_of(cases[other], FACTORS)
            assert len(both) <= together

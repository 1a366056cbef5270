"""`make mutants` does what it says; the mutants themselves take minutes and are not run here."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import mutants, ranks
from tests.integration.test_equality import assert_equal_training, train
from tests.integration.tiny import Job

ROOT = Path(__file__).parent.parent


def test_a_fault_reaches_the_ranks_and_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(ep=2, steps=2, optimizer="sgd", lr=0.1)
    want, got = train(2, job, job.as_fssdp())
    assert_equal_training(got, want)
    name = "expert gradients doubled"
    monkeypatch.setattr(ranks, "_run_rank", partial(mutants.run_rank, name))
    want, got = train(2, job, job.as_fssdp())
    with pytest.raises(AssertionError, match="losses, rank 0"):
        assert_equal_training(got, want)


@pytest.mark.parametrize(
    ("passing", "status", "printed"),
    [
        ({None}, 0, "yes"),
        ({None, "auxiliary loss lost"}, 1, "NO"),
        (set(), 1, "repair them first"),
    ],
)
def test_a_survivor_fails_the_command(
    passing: set[str | None],
    status: int,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(mutants, "run_tests", lambda tests, mutant=None: mutant in passing)
    monkeypatch.setattr(sys, "argv", ["mutants", "auxiliary loss lost"])
    assert mutants.main() == status
    assert printed in capsys.readouterr().out


def _put_in(names: list[str]) -> None:
    for name in names:
        mutants.MUTANTS[name].apply()


def test_every_fault_can_be_put_in() -> None:
    """One replaced a function that was gone: its ranks died, which was taken for noticing it."""
    ranks.run_ranks(1, _put_in, list(mutants.MUTANTS))


def test_a_fault_that_cannot_be_put_in_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AttributeError("gone")

    monkeypatch.setitem(mutants.MUTANTS, "fault", mutants.Mutant(fail, ()))
    config: Any = SimpleNamespace(getoption=lambda option: "fault")
    with pytest.raises(pytest.UsageError, match=r"no fault: AttributeError\('gone'\)"):
        mutants.pytest_configure(config)


def test_mutants_name_tests_that_exist() -> None:
    for mutant in mutants.MUTANTS.values():
        for test in mutant.tests:
            path, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()

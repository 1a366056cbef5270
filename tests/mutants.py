"""Faults put into the package on purpose: each must make a test fail (`make mutants`).

    python -m tests.mutants [NAME ...]

runs, for each mutant, the tests that should notice it, in a process of their own and with the fault
in that process and in every rank that its tests start; then prints a table. Exits with 1 if a
mutant survives, or if the same tests fail without any fault. The package has no hooks for this:
a mutant replaces functions of it by wrong ones, through pytest's plugin interface.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import ranks

ROOT = Path(__file__).resolve().parent.parent


def _double_expert_gradients() -> None:
    from megatron_fssdp.experts.materialize import Visit

    stock = Visit.finish

    def finish(self: Any, grads: list[Any]) -> None:
        stock(self, grads)
        grads[:] = [grad * 2 for grad in grads]

    Visit.finish = finish  # type: ignore[method-assign]


def _change_replicas_gradients(change: Callable[[list[Any], int], None]) -> None:
    """Let `change` edit the gradients of a layer's replica slots, W for each, before they go."""
    from megatron_fssdp.experts.materialize import Materializer

    stock = Materializer.reduce

    def reduce(self: Any, placement: Any, grads: Any) -> Any:
        edited = list(grads)
        change(edited, len(self._template))
        return stock(self, placement, edited)

    Materializer.reduce = reduce  # type: ignore[method-assign]


def _drop_a_replicas_share() -> None:
    def change(grads: list[Any], num_weights: int) -> None:
        grads[:num_weights] = [grad * 0 for grad in grads[:num_weights]]

    _change_replicas_gradients(change)


def _swap_two_replicas_gradients() -> None:
    def change(grads: list[Any], num_weights: int) -> None:
        if len(grads) > num_weights:
            second = grads[num_weights : 2 * num_weights]
            grads[: 2 * num_weights] = [*second, *grads[:num_weights]]

    _change_replicas_gradients(change)


def _keep_stale_replicas() -> None:
    from megatron_fssdp.integration.runtime import FSSDPRuntime

    assert callable(FSSDPRuntime.forget_replicas)
    FSSDPRuntime.forget_replicas = lambda self: None  # type: ignore[method-assign]


def _forget_the_own_ranks_tokens() -> None:
    """Tell the dispatcher of no token that stays on its rank for a replicated expert."""
    from megatron_fssdp.planning import quotas

    stock = quotas._split_sources

    def split_sources(counts_RE: Any, rooms: Any, tables: Any, at_K: Any) -> Any:
        split_RK = stock(counts_RE, rooms, tables, at_K)
        split_RK[tables.rank_N[at_K], range(len(at_K))] -= rooms.local_N[at_K]
        return split_RK

    quotas._split_sources = split_sources


def _tell_the_dispatcher_what_was_told_before() -> None:
    from megatron_fssdp.integration.told_dispatch import ToldAlltoAllDispatcher

    stock = ToldAlltoAllDispatcher.tell

    def tell(self: Any, messages: Any, is_checked: bool = False) -> None:
        before, self.__dict__["before"] = self.__dict__.get("before", messages), messages
        stock(self, before, is_checked)

    ToldAlltoAllDispatcher.tell = tell  # type: ignore[method-assign]


def _skip_the_routers_reduction() -> None:
    """Megatron sums a router's gradient over tensor-parallel ranks by this mark."""
    _after_building(lambda layer: setattr(layer.router.weight, "sequence_parallel", False))


def _lose_the_auxiliary_loss() -> None:
    _after_building(lambda layer: setattr(layer.router, "routing_type", "none"))


def _after_building(change: Callable[[Any], None]) -> None:
    from megatron_fssdp.integration.layer import FSSDPMoELayer

    stock = FSSDPMoELayer.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        stock(self, *args, **options)
        change(self)

    FSSDPMoELayer.__init__ = init  # type: ignore[method-assign]


def _translate_wrongly(change: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any, Any]]) -> None:
    from megatron_fssdp.integration import layer

    stock = layer.translate_routing

    def translate(*args: Any) -> Any:
        routing_map, probs, split_EI, physical_EI, num_physical = args
        return stock(*change(routing_map, probs, split_EI, physical_EI), num_physical)

    layer.translate_routing = translate


def _cut_the_routers_gradient() -> None:
    _translate_wrongly(lambda routing, probs, split, slots: (routing, probs.detach(), split, slots))


def _miscount_a_quota() -> None:
    def change(routing: Any, probs: Any, split_EI: Any, slots: Any) -> tuple[Any, ...]:
        wrong = split_EI.clone()
        # One token too few for each owner whose expert has replicas.
        wrong[:, 0] -= ((split_EI[:, 0] > 0) & (split_EI[:, 1:].sum(1) > 0)).long()
        return routing, probs, wrong, slots

    _translate_wrongly(change)


def _send_to_the_next_slot() -> None:
    def change(routing: Any, probs: Any, split: Any, physical_EI: Any) -> tuple[Any, ...]:
        wrong = physical_EI.clone()
        wrong[:, 1:] = (wrong[:, 1:] - 1).clamp_min(0)
        return routing, probs, split, wrong

    _translate_wrongly(change)


def _keep_only_the_last_micro_batch() -> None:
    from megatron_fssdp.experts.gradients import GradientSums

    stock = GradientSums.add

    def add(self: Any, transport: Any, contents: Any, grads: Any) -> Any:
        for row in self._open(transport, contents).rows.values():
            row.zero_()
        return stock(self, transport, contents, grads)

    GradientSums.add = add  # type: ignore[method-assign]


def _sum_in_any_order() -> None:
    """Copies of a stage in an order of chance, the same on all ranks, another at each call."""
    from megatron_fssdp.experts import replicas

    stock, calls = replicas.sparse_reduce_scatter, []

    def reduce(rows: Any, schedule: Any, *rest: Any) -> None:
        calls.append(1)
        stages = [list(stage) for stage in schedule.stages]
        for stage in stages:
            random.Random(len(calls)).shuffle(stage)
        stock(rows, replace(schedule, stages=tuple(map(tuple, stages))), *rest)

    replicas.sparse_reduce_scatter = reduce


def _save_moved_experts_under_old_names() -> None:
    from megatron_fssdp.integration import spec

    assert callable(spec.describe_experts)
    spec.describe_experts = lambda state, ownerships: state


def _let_the_wrong_rank_save() -> None:
    """The dense tensor-parallel rank decides who writes, as it once did."""
    from types import SimpleNamespace

    from megatron_fssdp.integration import saved_state

    state = saved_state.parallel_state
    wrong = {**vars(state), "get_expert_tensor_parallel_rank": state.get_tensor_model_parallel_rank}
    saved_state.parallel_state = SimpleNamespace(**wrong)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Mutant:
    """A fault, and the tests that must notice it (pytest's names of them)."""

    apply: Callable[[], None]
    tests: tuple[str, ...]


_EQUALITY = "tests/integration/test_equality.py::"
_TOLD = "tests/integration/test_told_dispatch.py::test_it_is_told_what_stock_finds[model0]"
_VARIANT = _EQUALITY + "test_variants_equal_ep"
_LAYOUT = "tests/integration/test_layouts.py::test_layout_equals_ep"

MUTANTS: dict[str, Mutant] = {
    "expert gradients doubled": Mutant(_double_expert_gradients, (f"{_VARIANT}[sgd]",)),
    "a replica's share of the gradient dropped": Mutant(
        _drop_a_replicas_share, (f"{_VARIANT}[sgd]",)
    ),
    "two replicas' gradients swapped": Mutant(
        _swap_two_replicas_gradients, (f"{_VARIANT}[more-replicas-than-needed]",)
    ),
    "replicas' weights one step old": Mutant(_keep_stale_replicas, (f"{_VARIANT}[sgd]",)),
    "router's gradient not reduced": Mutant(
        _skip_the_routers_reduction,
        ("tests/integration/test_layout_features.py::test_a_layout_changes_no_training",),
    ),
    "router gets no gradient from the loss": Mutant(
        _cut_the_routers_gradient, (f"{_VARIANT}[sgd]",)
    ),
    "auxiliary loss lost": Mutant(_lose_the_auxiliary_loss, (f"{_VARIANT}[aux-loss]",)),
    "a quota off by one": Mutant(_miscount_a_quota, (f"{_VARIANT}[sgd]",)),
    "own rank's tokens not expected": Mutant(_forget_the_own_ranks_tokens, (_TOLD,)),
    "dispatcher told of the dispatch before": Mutant(
        _tell_the_dispatcher_what_was_told_before, (_TOLD,)
    ),
    "tokens sent to the slot beside": Mutant(_send_to_the_next_slot, (f"{_VARIANT}[sgd]",)),
    "only the last micro-batch's gradient sent": Mutant(
        _keep_only_the_last_micro_batch, (f"{_VARIANT}[micro-batches]",)
    ),
    "replicas' gradients summed in any order": Mutant(
        _sum_in_any_order, (f"{_EQUALITY}test_runs_repeat_bit_for_bit",)
    ),
    "moved experts saved under their old names": Mutant(
        _save_moved_experts_under_old_names,
        ("tests/integration/test_resharding.py::test_checkpoints_of_moved_experts_are_plain",),
    ),
    "loads saved by the wrong rank": Mutant(
        _let_the_wrong_rank_save,
        ("tests/integration/test_etp.py::test_one_rank_speaks_and_one_saves",),
    ),
}


def run_rank(name: str, *rest: Any) -> None:
    """Put a fault into a fresh rank, then do what `tests.ranks` would have."""
    MUTANTS[name].apply()
    ranks._run_rank(*rest)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take `--mutant NAME`, where this file is given as a plugin: `-p tests.mutants`."""
    parser.addoption("--mutant", choices=list(MUTANTS))


def pytest_configure(config: pytest.Config) -> None:
    """Put the fault into this process and into the ranks that it will start.

    Raises:
        pytest.UsageError: it cannot be put in, which would fail the tests as well.
    """
    name = config.getoption("--mutant")
    if name is not None:
        try:
            MUTANTS[name].apply()
        except Exception as error:
            raise pytest.UsageError(f"no {name}: {error!r}") from error
        ranks._run_rank = partial(run_rank, name)


def run_tests(tests: tuple[str, ...], mutant: str | None = None) -> bool:
    """Run tests in a process of their own; return whether all of them passed.

    Raises:
        RuntimeError: they could not be run at all.
    """
    plugin = ["-p", "tests.mutants", "--mutant", mutant] if mutant else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugin, *tests]
    answer = subprocess.run(
        command,
        cwd=ROOT,
        # A named case may be one that the default run leaves out.
        env={**os.environ, "OMP_NUM_THREADS": "1", "FSSDP_ALL": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}:\n{answer.stdout}\n{answer.stderr}")
    return answer.returncode == 0


def main() -> int:
    """Run the mutants asked for; all by default."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; all by default")
    names = parser.parse_args().names or list(MUTANTS)
    if unknown := sorted(set(names) - set(MUTANTS)):
        parser.error(f"no mutant {', '.join(unknown)}; there are: {', '.join(MUTANTS)}")
    console = Console()
    tests = tuple(dict.fromkeys(test for name in names for test in MUTANTS[name].tests))
    if not run_tests(tests):
        console.print("The tests fail without any mutant: repair them first.")
        return 1
    table = Table("mutant", "noticed", "s", "by", title="Faults put in on purpose")
    survivors = []
    for name in names:
        begin = time.perf_counter()
        noticed = not run_tests(MUTANTS[name].tests, name)
        survivors += [] if noticed else [name]
        by = "\n".join(test.rpartition("::")[2] for test in MUTANTS[name].tests)
        seconds = f"{time.perf_counter() - begin:.0f}"
        table.add_row(name, "yes" if noticed else "NO", seconds, by)
    console.print(table)
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())

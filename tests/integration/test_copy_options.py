"""However copies travel, whenever they do and however long they stay: the training is the same.

Every combination of flat or tree, overlap on or off, replicas kept or re-materialized, 1 or 4
micro-batches, distributed optimizer, recompute of the MoE layer; on 2 pretended nodes of 2 ranks.
Tolerances as in test_equality.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.integration.test_equality import assert_equal_training, assert_replicated, train
from tests.integration.tiny import Job, Trained, merge
from tests.ranks import a_few

RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def _options(**fixed: str | bool) -> list[dict[str, str | bool]]:
    choices = {
        "fssdp_collectives": ("flat", "tree"),
        "fssdp_rematerialize": (False, True),
        "fssdp_overlap": ("on", "off"),
    }
    names = list(choices)
    each = [dict(zip(names, values, strict=True)) for values in product(*choices.values())]
    return [{**options, **fixed} for options in each]


def _bit_equal(first: list[Trained], second: list[Trained]) -> bool:
    ours, theirs = merge(first, "params"), merge(second, "params")
    return first[0].losses == second[0].losses and all(
        torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


# By default all three. Each runs all eight ways for copies.
SETTINGS = list(product((1, 4), (False, True), (False, True)))


@pytest.mark.parametrize(
    ("num_microbatches", "distributed_optimizer", "recompute"), a_few(SETTINGS, (7,))
)
def test_every_combination_equals_ep(
    num_microbatches: int, distributed_optimizer: bool, recompute: bool
) -> None:
    job = Job(
        ep=4,
        steps=3,
        num_microbatches=num_microbatches,
        distributed_optimizer=distributed_optimizer,
        model=RECOMPUTE if recompute else {},
    )
    all_options = _options()
    # Spares depend on how often they travel: the paper's planner makes none, and so equal plans.
    equal = [{"fssdp_planner": "load", "fssdp_rematerialize": again} for again in (False, True)]
    jobs = [
        job.as_fssdp(fssdp_ranks_per_node=2, **options)
        for options in (*all_options, *(equal if num_microbatches == 1 else []))
    ]
    want, *runs = train(4, job, *jobs)
    for run in runs:
        assert_replicated(run)
        assert_equal_training(run, want)
    # Options come in pairs that differ in the overlap only.
    ways = runs[: len(all_options)]
    for with_overlap, without in zip(ways[::2], ways[1::2], strict=True):
        assert _bit_equal(with_overlap, without)
    if num_microbatches == 1:
        kept, fetched_again = runs[-2:]
        assert _bit_equal(kept, fetched_again), "one micro-batch: the same sums in the same order"


LAYOUTS = {
    "edp": {"ep": 4, "num_microbatches": 2},
    "edp-overlaps": {
        "ep": 4,
        "num_microbatches": 2,
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "pipeline": {"ep": 4, "pp": 2, "num_microbatches": 4, "num_layers": 4},
    "full-recompute": {
        "ep": 4,
        "num_microbatches": 2,
        "model": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    },
    "biases": {"ep": 4, "model": {"add_bias_linear": True, "gated_linear_unit": False}},
    "frozen-fc1": {"ep": 4, "freeze": "linear_fc1"},
    "frozen-experts": {"ep": 4, "freeze": "experts"},
}


@pytest.mark.parametrize("layout", a_few(list(LAYOUTS), (1, 2)))
def test_layouts_with_trees_on_eight_ranks(layout: str) -> None:
    """Expert data parallelism 2 or two pipeline stages; replicas kept, and re-materialized."""
    job = Job(steps=3, **LAYOUTS[layout])
    options = _options(fssdp_collectives="tree", fssdp_overlap="on")[:4:2]
    jobs = [job.as_fssdp(fssdp_ranks_per_node=2, **each) for each in options]
    want, *runs = train(8, job, *jobs)
    for run in runs:
        assert_replicated(run)
        if job.pp == 1:
            assert_equal_training(run, want)
        for ours, theirs in zip(run, want, strict=True):
            assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
            assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-5)


# Products so slow that any balance pays, and a network so slow that none does.
SLOW_COMPUTE = """
topology:
  ranks_per_node: 2
  intra_node: {bytes_per_s: 1.0e12, latency_s: 0}
  inter_node: {bytes_per_s: 1.0e12, latency_s: 0}
compute: {flops_per_s: 1.0e6}
"""
SLOW_NETWORK = SLOW_COMPUTE.replace("1.0e12, latency_s: 0", "1.0e12, latency_s: 1.0e6")


@pytest.mark.parametrize("num_microbatches", a_few((1, 4), (1,)))
def test_calibration_equals_ep_and_balances_the_first_iteration(
    num_microbatches: int, tmp_path: Path
) -> None:
    """No replica is planned for the first iteration; calibration fetches them after the gate."""
    job = Job(ep=4, steps=4, num_microbatches=num_microbatches)
    cluster, slow = tmp_path / "cluster.yaml", tmp_path / "slow.yaml"
    cluster.write_text(SLOW_COMPUTE)
    slow.write_text(SLOW_NETWORK.replace("1.0e6", "1.0e15"))
    calibrated = job.as_fssdp(fssdp_calibration=True, fssdp_cluster=str(cluster))
    want, kept, fetched_again, not_worth_it = train(
        4,
        job,
        calibrated,
        calibrated.as_fssdp(fssdp_rematerialize=True),
        calibrated.as_fssdp(fssdp_cluster=str(slow)),
    )
    for run in (kept, fetched_again, not_worth_it):
        assert_equal_training(run, want)
    for run in (kept, fetched_again):
        assert run[0].replicas[0] > 0
        assert run[0].calibrated >= run[0].replicas[0]
    assert not_worth_it[0].replicas[0] == not_worth_it[0].calibrated == 0


@pytest.mark.parametrize("grad_dtype", a_few(("fp32", "param"), (0,)))
def test_bf16(grad_dtype: str) -> None:
    """As test_equality's: gradients to a few per cent of each tensor's largest element."""
    job = Job(ep=4, steps=2, num_microbatches=4, params_dtype=torch.bfloat16)
    all_options = _options(fssdp_overlap="on", fssdp_grad_dtype=grad_dtype)[::2]
    jobs = [job.as_fssdp(fssdp_ranks_per_node=2, **options) for options in all_options]
    want, *runs = train(4, job, *jobs)
    theirs = merge(want, "grads")
    for run in runs:
        assert_replicated(run)
        assert run[0].losses == want[0].losses
        for name, ours in merge(run, "grads").items():
            error = (ours - theirs[name]).abs().max() / theirs[name].abs().max()
            assert error < 0.05, f"{name}: {error:.3f}"

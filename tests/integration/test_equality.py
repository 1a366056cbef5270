"""FSSDP trains like plain expert parallelism: losses, gradient norms, weights, Adam moments.

Tolerances: fp32 unless said otherwise. A replica's gradient is summed at its owner, so sums run in
another order than EP's: losses and gradient norms agree to relative 1e-5 after 20 steps; weights,
gradients and moments to 1e-4 of each tensor's largest element, because an element near zero carries
the rounding of the large terms that made it. The first forward has no sum in another order (top-2:
a + b = b + a), so it is bit-equal.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.integration.tiny import Job, Trained, merge, run_many
from tests.ranks import a_few, run_ranks

RTOL = 1e-5


def train(world_size: int, *jobs: Job, timeout_s: float = 240) -> list[list[Trained]]:
    """Train the jobs on the same ranks; result[job][rank]."""
    results = run_ranks(world_size, run_many, list(jobs), timeout_s=timeout_s)
    return [list(by_rank) for by_rank in zip(*results, strict=True)]


def assert_equal_training(got: list[Trained], want: list[Trained], rtol: float = RTOL) -> None:
    """Compare two runs: losses and norms on every rank, tensors by global expert id."""
    assert want[0].losses[0] != want[0].losses[-1], "the run did not learn: it proves nothing"
    for rank, (ours, theirs) in enumerate(zip(got, want, strict=False)):
        for name in ("losses", "grad_norms"):
            torch.testing.assert_close(
                torch.tensor(getattr(ours, name)),
                torch.tensor(getattr(theirs, name)),
                rtol=rtol,
                atol=0,
                msg=lambda text, name=name, rank=rank: f"{name}, rank {rank}: {text}",
            )
    for name in ("params", "grads", "moments"):
        ours_all, theirs_all = merge(got, name), merge(want, name)
        assert ours_all.keys() == theirs_all.keys()
        for key, tensor in ours_all.items():
            # Elements near zero carry the rounding of the sums that made them.
            scale = theirs_all[key].abs().max().item()
            torch.testing.assert_close(
                tensor,
                theirs_all[key],
                rtol=100 * rtol,
                atol=10 * rtol * scale,
                msg=lambda text, key=key: f"{key}: {text}",
            )


def assert_replicated(results: list[Trained]) -> None:
    """The run must have made replicas and lowered the imbalance, or its equality is no news."""
    run = results[0]
    assert sum(run.replicas) > 0
    before = sum(pair[0] for pair in run.imbalance)
    after = sum(pair[1] for pair in run.imbalance)
    assert after < before


@pytest.mark.parametrize(
    ("world_size", "ep"), a_few([(2, 2), (4, 4), (8, 8), (4, 2), (8, 4)], (0, 1, 4))
)
def test_twenty_steps_equal_ep(world_size: int, ep: int) -> None:
    job = Job(ep=ep, steps=20, num_experts=16)
    want, got = train(world_size, job, job.as_fssdp())
    assert_replicated(got)
    assert_equal_training(got, want)


@pytest.mark.parametrize("planner", ["gain", "load"])
def test_first_forward_bit_equal_and_moments_after_five_steps(planner: str) -> None:
    job = Job(ep=4, steps=5, num_experts=8)
    want, got = train(4, job, job.as_fssdp(fssdp_planner=planner))
    for rank in range(4):
        assert got[rank].losses[0] == want[rank].losses[0]
        # The second step is the first that computes on replicas.
        assert got[rank].losses[1] == want[rank].losses[1]
    moments = merge(want, "moments")
    assert sum("exp_avg_sq" in name and "experts" in name for name in moments) == 2 * 8 * 2
    assert_replicated(got)
    assert_equal_training(got, want)


def test_one_process_agrees() -> None:
    job = Job(ep=1, steps=5)
    (want,) = train(1, job)
    (got,) = train(4, replace(job, ep=4).as_fssdp())
    assert_replicated(got)
    assert_equal_training(got, want)


VARIANTS = {
    "allgather": {"dispatcher": "allgather"},
    "micro-batches": {"num_microbatches": 4},
    "distributed-optimizer": {"distributed_optimizer": True},
    "overlap-grad-reduce": {"overlap_grad_reduce": True, "num_microbatches": 2},
    "overlap-param-gather": {
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "num_microbatches": 2,
    },
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "no-clipping": {"clip_grad": 0.0},
    "biases": {"model": {"add_bias_linear": True, "gated_linear_unit": False}},
    "top-1": {"topk": 1, "model": {"moe_router_pre_softmax": True}},
    "top-4": {"topk": 4},
    "shared-expert": {"model": {"moe_shared_expert_intermediate_size": 24}},
    "aux-loss": {
        "model": {
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "moe_z_loss_coeff": 0.001,
        }
    },
    "expert-bias": {
        "model": {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.01,
        }
    },
    "dense-first-layer": {"num_layers": 2, "model": {"moe_layer_freq": [0, 1]}},
    "recompute-moe": {
        "model": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    },
    "recompute-full": {
        "num_microbatches": 2,
        "model": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    },
    "frozen-experts": {"freeze": "experts"},
    "frozen-fc1": {"freeze": "linear_fc1"},
    # The paper's planner fills them: a rank has several replicas, and their gradients.
    "more-replicas-than-needed": {
        "optimizer": "sgd",
        "lr": 0.1,
        "fssdp": {"fssdp_planner": "load", "fssdp_num_replica_slots": 4},
    },
    "no-replica-slots": {"fssdp": {"fssdp_num_replica_slots": 0}},
}


# Those of the others that test_layouts.py covers in fp64 wait for FSSDP_ALL.
@pytest.mark.parametrize(
    "variant", a_few(list(VARIANTS), (0, 4, 5, 6, 7, 8, 9, 15, 16, 17, 18, 19))
)
def test_variants_equal_ep(variant: str) -> None:
    """4 ranks, EP 2, expert data parallelism 2: every kind of group has two members."""
    job = Job(ep=2, steps=5, **VARIANTS[variant])
    want, got = train(4, job, job.as_fssdp())
    if variant != "no-replica-slots":
        assert_replicated(got)
    assert_equal_training(got, want)
    if variant in ("overlap-param-gather", "overlap-grad-reduce", "distributed-optimizer"):
        # Not only like EP with the same flags: like EP without them.
        (plain,) = train(4, Job(ep=2, steps=5, num_microbatches=job.num_microbatches))
        for rank in range(4):
            torch.testing.assert_close(
                torch.tensor(got[rank].losses), torch.tensor(plain[rank].losses), rtol=RTOL, atol=0
            )


def test_pipeline_parallel() -> None:
    job = Job(ep=2, pp=2, steps=4, num_microbatches=2)
    want, got = train(4, job, job.as_fssdp())
    for rank in range(4):
        assert got[rank].losses == pytest.approx(want[rank].losses, rel=RTOL)
        assert got[rank].grad_norms == pytest.approx(want[rank].grad_norms, rel=RTOL)
    assert_replicated(got)


def test_bf16() -> None:
    """bf16 keeps 8 bits: gradients agree to a few per cent of each tensor's largest element.

    A missing replica's share would be tens of per cent. The second step is the first on replicas
    and the last whose weights are equal: after it, rounding may flip a token's expert.
    """
    job = Job(ep=2, steps=2, params_dtype=torch.bfloat16)
    want, got = train(2, job, job.as_fssdp())
    assert_replicated(got)
    assert got[0].losses == want[0].losses
    assert got[0].grad_norms == pytest.approx(want[0].grad_norms, rel=0.02)
    ours, theirs = merge(got, "grads"), merge(want, "grads")
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).abs().max() / gradient.abs().max()
        assert error < 0.05, f"{name}: {error:.3f}"


def test_runs_repeat_bit_for_bit() -> None:
    job = Job(ep=4, steps=6).as_fssdp()
    first, second = train(4, job, job)
    assert first[0].losses == second[0].losses
    for name, tensor in merge(first, "params").items():
        assert torch.equal(tensor, merge(second, "params")[name]), name

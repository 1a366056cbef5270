"""FSSDP's path through Transformer Engine: TEGroupedMLP owns, a second one computes on slots.

TE's Python part and Megatron's are the real ones; only TE's compiled module is a stub
(tests/te_stub), so that an attribute that either renames breaks a test and not a cluster job. The
ranks are processes of their own: in these tests' process Megatron must not see TE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.integration.test_equality import assert_equal_training, assert_replicated
from tests.integration.tiny import Job
from tests.te_stub import jobs
from tests.te_stub.jobs import LayerJob, LayerRun

# Of the largest element of a gradient: a replica's share is summed at its owner, in another order,
# and what differs then passes through three steps.
TOLERANCE = 3e-6
# What is left when the tokens' shares cancel carries the rounding of terms many times its size.
CANCELLING = {"router.bias": 10, "router.weight": 10}


VARIANTS = {
    "2 ranks": (2, {}),
    "4 ranks": (4, {"ep": 4}),
    "2 x 2 ranks, micro-batches": (4, {"num_microbatches": 2}),
    "biases": (2, {"model": {"add_bias_linear": True, "gated_linear_unit": False}}),
    # Rank 0 owns all that is used: at first the others compute no row, then their replicas do.
    "ranks without tokens": (4, {"ep": 4, "logit_bias": (50.0, 50.0, *[0.0] * 6)}),
    "recompute": (
        2,
        {"model": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_trains_like_ep(run_with_te: Callable, variant: str) -> None:
    world_size, settings = VARIANTS[variant]
    job = LayerJob(**settings)
    results = run_with_te(world_size, jobs.train_layers, [job, job.as_fssdp()])
    assert_layers_equal(results, TOLERANCE)
    rows_R = results[0][1].rows_R
    if variant == "ranks without tokens":
        assert rows_R[0][1:] == [0, 0, 0]
        assert min(rows_R[-1]) > 0


def test_bf16_layer_trains_like_ep(run_with_te: Callable) -> None:
    """8 bits of mantissa, and gradients of replicas that are rounded before they are summed."""
    job = LayerJob(params_dtype=torch.bfloat16)
    assert_layers_equal(run_with_te(2, jobs.train_layers, [job, job.as_fssdp()]), 0.02)


def assert_layers_equal(results: list[list[LayerRun]], tolerance: float) -> None:
    """Compare EP and FSSDP, rank by rank: outputs, gradients, parameters."""
    busiest = results[0][0].grads[-1]["experts.linear_fc1.weight0"]
    assert busiest.any(), "no gradient: it proves nothing"
    for rank, (want, got) in enumerate(results):
        assert torch.equal(got.outputs[0], want.outputs[0]), f"rank {rank}, first forward"
        assert got.replicas[0] == 0
        assert min(got.replicas[1:]) > 0
        pairs = [("eval output", got.eval_output, want.eval_output)]
        pairs += [(name, got.params[name], want.params[name]) for name in want.params]
        for i, output in enumerate(want.outputs):
            pairs.append((f"output {i}", got.outputs[i], output))
            assert list(got.grads[i]) == list(want.grads[i])
            pairs += [
                (f"grad {i} {name}", got.grads[i][name], grad)
                for name, grad in want.grads[i].items()
            ]
        for name, ours, theirs in pairs:
            torch.testing.assert_close(
                ours,
                theirs,
                rtol=0,
                atol=tolerance * CANCELLING.get(name.split()[-1], 1) * theirs.abs().max().item(),
                msg=lambda text, name=name, rank=rank: f"rank {rank}, {name}: {text}",
            )


def test_model_trains_like_ep(run_with_te: Callable) -> None:
    """The tiny GPT under Megatron's DDP, whose hooks run from TE's modules, and its optimizer."""
    job = Job(
        ep=2,
        steps=4,
        num_microbatches=2,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    results = run_with_te(4, jobs.train_models, [job, job.as_fssdp()])
    want, got = (list(by_rank) for by_rank in zip(*results, strict=True))
    assert_replicated(got)
    assert_equal_training(got, want)


@pytest.mark.parametrize(("rematerialize", "etp"), [(False, 2), (True, 1)])
def test_moved_and_rematerialized_experts_train_like_ep(
    run_with_te: Callable, rematerialize: bool, etp: int
) -> None:
    """TE's module is built anew when a layer's number of slots changes."""
    fused = {"gradient_accumulation_fusion": True}
    job = Job(ep=2, etp=etp, steps=5, num_layers=3, distributed_optimizer=True, model=fused)
    moved = replace(job.as_fssdp(fssdp_rematerialize=rematerialize), reshard_every=2)
    results = run_with_te(4, jobs.train_models, [job, moved])
    want, got = (list(by_rank) for by_rank in zip(*results, strict=True))
    assert [each.is_done for each in got[0].reshards] == [True, True]
    assert_equal_training(got, want)


def test_te_optimizer_ends_an_iteration(run_with_te: Callable) -> None:
    assert run_with_te(1, jobs.optimizer_hook_runs) == [True]


@pytest.mark.parametrize("biases", [False, True], ids=["no biases", "biases"])
def test_stock_parameters_are_those_of_ep(run_with_te: Callable, biases: bool) -> None:
    job = LayerJob(model={"add_bias_linear": biases, "gated_linear_unit": not biases})
    for want, got in zip(
        run_with_te(2, jobs.describe_layer, job),
        run_with_te(2, jobs.describe_layer, job.as_fssdp()),
        strict=True,
    ):
        assert list(got["params"]) == list(want["params"])
        for name, values in want["params"].items():
            assert torch.equal(got["params"][name], values), name
        assert got["state"] == want["state"]
        assert torch.equal(got["random"], want["random"])
        assert got["tracked"].keys() == want["tracked"].keys()
        for name, state in want["tracked"].items():
            assert torch.equal(got["tracked"][name], state), name


@pytest.mark.parametrize("biases", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize("on_cpu", [False, True], ids=["", "use_cpu_initialization"])
def test_slots_own_nothing(run_with_te: Callable, biases: bool, on_cpu: bool) -> None:
    job = LayerJob(
        model={
            "add_bias_linear": biases,
            "gated_linear_unit": not biases,
            "use_cpu_initialization": on_cpu,
        }
    ).as_fssdp()
    kinds = ["weight", "bias"] if biases else ["weight"]
    families = [f"linear_{fc}.{kind}" for fc in ("fc1", "fc2") for kind in kinds]
    for facts in run_with_te(2, jobs.describe_layer, job):
        assert facts["families"] == families
        assert facts["owned"] == [[f"{family}{i}" for family in families] for i in range(4)]
        assert facts["num_slots"] == 6
        assert sorted(facts["slot_names"]) == sorted(
            f"{family}{slot}" for family in families for slot in range(6)
        )
        assert facts["real_bytes"] == 0
        assert facts["fused"] == [True, True]
        assert facts["stock_fused"] == [True, True]
        assert facts["stock_config"] == {
            "gradient_accumulation_fusion": True,
            "init_model_with_meta_device": False,
            "perform_initialization": True,
            "use_cpu_initialization": on_cpu,
        }


def test_gpu_check_compares_right_on_a_cpu(run_with_te: Callable) -> None:
    (rows,) = run_with_te(1, jobs.check_on_one_device)
    assert [(is_right, reason) for _, is_right, reason in rows] == [(True, "")] * 7


def test_slots_draw_no_random_numbers(run_with_te: Callable) -> None:
    assert run_with_te(2, jobs.draw_nothing, LayerJob()) == [True, True]


@pytest.mark.parametrize("whose", ["owned", "slots"])
def test_other_parameter_names_are_refused(run_with_te: Callable, whose: str) -> None:
    message, _ = run_with_te(2, jobs.build_with_other_names, LayerJob(), whose)
    assert "linear_fc2.weight1" in message
    assert "transformer-engine" in message

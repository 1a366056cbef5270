"""Weights' gradients that Transformer Engine's products add in place.

--gradient-accumulation-fusion, Megatron's default: owned slots' go to main_grad, replicas' to the
rows that spRS sums. See tests/te_stub for what is real here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.integration.test_equality import assert_equal_training, assert_replicated
from tests.integration.test_transformer_engine import TOLERANCE, assert_layers_equal
from tests.integration.tiny import Job
from tests.ranks import a_few
from tests.te_stub import jobs
from tests.te_stub.jobs import LayerJob

FUSED = {"gradient_accumulation_fusion": True}


def test_no_gradient_of_a_weight_takes_memory_of_its_own(run_with_te: Callable) -> None:
    """2 linears x 4 micro-batches x 6 slots: 4 owned, 2 for replicas, which may be empty."""
    job = LayerJob(num_microbatches=4).as_fssdp()
    by_rank = run_with_te(2, jobs.find_gradients, job)
    for first, *later in by_rank:
        assert (first["main_grad"], first["sums"], first["scrap"]) == (32, 0, 16)
        for found in (first, *later):
            assert found["main_grad"] == 32
            assert found["sums"] + found["scrap"] == 16
            assert found["elsewhere"] == found["unmarked"] == 0
    for iteration in range(1, job.iterations):
        # A replica's slot in 2 linears and 4 micro-batches.
        assert sum(found[iteration]["sums"] for found in by_rank) >= 8


def test_experts_without_tokens_have_zeros_in_main_grad(run_with_te: Callable) -> None:
    """Two experts take all tokens: TE's products get groups, and ranks, without rows.

    Each weight still says that its gradient is there, or Megatron's DDP would wait for it.
    """
    job = LayerJob(ep=4, logit_bias=(50.0, 50.0, *[0.0] * 6))
    for rank, iterations in enumerate(run_with_te(4, jobs.find_gradients, job.as_fssdp())):
        for found in iterations:
            assert found["unmarked"] == found["elsewhere"] == 0
            # 2 experts of rank 0, 2 weights each; also where replicas have computed all rows.
            assert found["nonzero"] == (4 if rank == 0 else 0)


LAYERS = {
    "micro-batches": LayerJob(num_microbatches=4),
    "re-materialized": LayerJob(num_microbatches=4, fssdp={"fssdp_rematerialize": True}),
    "biases": LayerJob(
        num_microbatches=2, model={"add_bias_linear": True, "gated_linear_unit": False}
    ),
    "overlap": LayerJob(ddp={"overlap_grad_reduce": True, "bucket_size": 500}),
    "recompute": LayerJob(
        num_microbatches=4,
        model={"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    ),
    "not fused": LayerJob(num_microbatches=2, model={"gradient_accumulation_fusion": False}),
}


@pytest.mark.parametrize("world_size", a_few([2, 4], [0]))
def test_layers_train_like_ep(run_with_te: Callable, world_size: int) -> None:
    """On 4 ranks experts have 2 data-parallel copies, which DDP reduces when it thinks fit."""
    pairs = [each for job in LAYERS.values() for each in (job, job.as_fssdp())]
    results = run_with_te(world_size, jobs.train_layers, pairs)
    for index, name in enumerate(LAYERS):
        pair = [by_rank[2 * index : 2 * index + 2] for by_rank in results]
        try:
            assert_layers_equal(pair, TOLERANCE)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_bf16_layers_train_like_ep(run_with_te: Callable) -> None:
    """With main_grad in bf16 and in fp32; replicas' gradients sent in either."""
    base = LayerJob(params_dtype=torch.bfloat16, num_microbatches=2, iterations=2)
    wide = replace(base, ddp={"grad_reduce_in_fp32": True})
    narrow = {"fssdp_grad_dtype": "param"}
    group = [
        *(base, base.as_fssdp(), base.as_fssdp(**narrow)),
        *(wide, wide.as_fssdp(), wide.as_fssdp(**narrow)),
    ]
    results = run_with_te(2, jobs.train_layers, group)
    for want, got, tolerance in ((0, 1, 0.02), (0, 2, 0.02), (3, 4, 0.02), (3, 5, 0.02)):
        assert_layers_equal([[each[want], each[got]] for each in results], tolerance)


MODELS = {
    "overlap": Job(
        steps=4,
        num_microbatches=4,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    ),
    "plain": Job(steps=4),
    "recompute": Job(
        steps=4,
        num_microbatches=2,
        overlap_grad_reduce=True,
        model={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "recompute moe": Job(
        steps=3,
        num_microbatches=2,
        model={"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ),
    "frozen fc1": Job(steps=3, num_microbatches=2, freeze="linear_fc1"),
    "pipeline": Job(steps=3, pp=2, num_microbatches=4),
}


@pytest.mark.parametrize("name", a_few(list(MODELS), [0, 2]))
def test_models_train_like_ep(run_with_te: Callable, name: str) -> None:
    """The tiny GPT; its other layers add their gradients in place too (an Apex stand-in)."""
    job = replace(MODELS[name], model={**MODELS[name].model, **FUSED})
    again = job.as_fssdp(fssdp_rematerialize=True)
    results = run_with_te(4, jobs.train_models, [job, job.as_fssdp(), again])
    want, got, also = (list(by_rank) for by_rank in zip(*results, strict=True))
    assert_replicated(got)
    assert_replicated(also)
    if name == "pipeline":
        for ours, theirs in zip(got, want, strict=True):
            assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
            assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-5)
        return
    assert_equal_training(got, want)
    assert_equal_training(also, want)


def test_sequential_mlp_trains_like_ep(run_with_te: Callable) -> None:
    """EP's kernel adds to main_grad; FSSDP's experts hand gradients to autograd, and DDP adds."""
    job = Job(steps=3, num_microbatches=2, overlap_grad_reduce=True, model=FUSED)
    results = run_with_te(4, jobs.train_local_models, [job, job.as_fssdp()])
    want, got = (list(by_rank) for by_rank in zip(*results, strict=True))
    assert_replicated(got)
    assert_equal_training(got, want)

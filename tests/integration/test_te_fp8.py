"""Training in fp8 through Transformer Engine: weights travel as they are, TE quantizes the slots'.

The formats are quantized and rounded for real (tests/te_stub/fp8.py). FSSDP splits an expert's
tokens over its instances, and a scale that several tokens share is another one then: the runs agree
as fp8 does with fp32, not bit for bit. So both are held against training without fp8, which tells a
wrong gradient from a rounded one. Where scales are powers of two (MXFP8, blockwise) only values
that are small in their block are rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.ranks import a_few
from tests.te_stub import jobs
from tests.te_stub.jobs import LayerJob, LayerRun

RECIPES = ("mxfp8", "tensorwise", "blockwise")
EXACT = LayerJob(hidden=32, ffn=64, tokens=64, num_microbatches=2)


def _in_fp8(recipe: str, **model: object) -> LayerJob:
    return replace(EXACT, model={**EXACT.model, "fp8": "e4m3", "fp8_recipe": recipe, **model})


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Length of the difference over the length of what is wanted."""
    return ((got - want).norm() / want.norm()).item() if want.any() else got.abs().max().item()


def _measures(run: LayerRun) -> dict[str, torch.Tensor]:
    assert run.eval_output is not None
    found = {"eval": run.eval_output}
    for i, (output, grads) in enumerate(zip(run.outputs, run.grads, strict=True)):
        found[f"output {i}"] = output
        found.update({f"grad {i} {name}": grad for name, grad in grads.items()})
    return found


def assert_as_exact_as_ep(
    exact: LayerRun, ep: LayerRun, ours: LayerRun, *, power_of_2: bool
) -> None:
    """Compare with EP in fp8, and both with EP in fp32."""
    want, theirs, got = map(_measures, (exact, ep, ours))
    for name, true in want.items():
        rounding, difference = _error(theirs[name], true), _error(got[name], theirs[name])
        assert rounding < 0.15, f"{name}: EP itself is off by {rounding}"
        assert _error(got[name], true) <= 1.25 * rounding, name
        # Two roundings of one value are apart by at most both.
        assert difference <= (1e-3 if power_of_2 else 2 * rounding), f"{name}: {difference}"


@pytest.mark.parametrize("recipe", a_few(RECIPES, [0, 1]))
def test_layer_trains_like_ep(run_with_te: Callable, recipe: str) -> None:
    ep = _in_fp8(recipe)
    ours = [ep.as_fssdp(), ep.as_fssdp(fssdp_rematerialize=True)]
    if recipe == "mxfp8":
        # TE quantizes again what is recomputed; Megatron pads tokens before it dispatches them.
        for model in (
            {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
            {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
            {"moe_router_padding_for_quantization": True},
        ):
            ours.append(_in_fp8(recipe, **model).as_fssdp())
    for rank, (exact, stock, *runs) in enumerate(
        run_with_te(2, jobs.train_layers, [EXACT, ep, *ours])
    ):
        for job, run in zip(ours, runs, strict=True):
            assert min(run.replicas[1:]) > 0
            try:
                assert_as_exact_as_ep(exact, stock, run, power_of_2=recipe != "tensorwise")
            except AssertionError as error:
                raise AssertionError(f"rank {rank}, {job}: {error}") from error


@pytest.mark.parametrize("recipe", a_few(["mxfp8", "blockwise"], [0]))
def test_fp8_parameters_travel_quantized(run_with_te: Callable, recipe: str) -> None:
    """Below Megatron's own optimizer, which --fp8-param-gather needs and no test here runs.

    A step of SGD rounds parameters to fp8 again: one that falls to the other side is 6 % off.
    """
    job = _in_fp8(recipe, fp8_param=True)
    for want, got in run_with_te(2, jobs.train_layers, [job, job.as_fssdp()]):
        assert min(got.replicas[1:]) > 0
        ours = _measures(got)
        for name, theirs in _measures(want).items():
            assert _error(ours[name], theirs) < 0.02, name


def test_each_slot_is_quantized_once_an_iteration(run_with_te: Callable) -> None:
    """TE keeps what it made of weights: never for another expert, or the weights of before.

    Each iteration ends with an evaluation on new weights, which MXFP8 quantizes without the second
    form that the backward needs: so the next iteration quantizes them once more.
    """
    job = replace(EXACT, num_microbatches=3)
    model = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
    for counts in run_with_te(
        2, jobs.count_quantized_weights, replace(job, model=model).as_fssdp()
    ):
        assert counts == [2 * 6] + [2 * 2 * 6] * (job.iterations - 1)

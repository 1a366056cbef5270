"""Megatron's flex dispatcher through physical experts, on a stand-in for the fused kernels.

Megatron's own code runs down to the calls of `deep_ep` (tests/deep_ep_stub), which demands of its
inputs what the kernels demand. Tolerances are those of test_equality.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fssdp.experts.routing import translate_routing
from megatron_fssdp.integration import cpu_platform
from tests.deep_ep_stub.install import install
from tests.integration.test_equality import RTOL, assert_equal_training, assert_replicated
from tests.integration.tiny import Job, Trained, run_many
from tests.ranks import a_few, run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "ep4": {"ep": 4},
    "etp2": {"tp": 2, "ep": 2, "etp": 2},
    "edp2": {"ep": 2, "num_microbatches": 2, "distributed_optimizer": True},
    "top-1": {"ep": 4, "topk": 1, "model": {"moe_router_pre_softmax": True}},
}


def _train(jobs: list[Job]) -> list[Trained]:
    install()
    from megatron.core.transformer.moe import fused_a2a

    results = []
    for job in jobs:
        # Its one buffer keeps the process group of the job before.
        fused_a2a.reset_hybrid_ep_buffer()
        results += run_many([job])
    return results


def _flex(layout: dict[str, Any], backend: str) -> Job:
    model = {"moe_flex_dispatcher_backend": backend, "moe_router_dtype": "fp32"}
    model |= {"moe_flex_dispatcher_num_sms": 16, **layout.get("model", {})}
    return Job(**{"steps": 3, "dispatcher": "flex", **layout, "model": model})


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_flex_equals_ep(backend: str) -> None:
    """Plain EP with the same dispatcher, and with all-to-all; experts move once on the way."""
    jobs = []
    for name in a_few(list(LAYOUTS), (0, 1)):
        job = _flex(LAYOUTS[name], backend)
        stock = replace(job, dispatcher="alltoall")
        jobs += [stock, job, replace(job, reshard_every=2).as_fssdp(fssdp_check_plans=True)]
    results = [list(by_rank) for by_rank in zip(*run_ranks(4, _train, jobs), strict=True)]
    for stock, want, got in zip(results[::3], results[1::3], results[2::3], strict=True):
        assert_replicated(got)
        assert_equal_training(got, want)
        # A token's results are added up in another order, and not before the second step.
        assert got[0].losses[0] == want[0].losses[0]
        assert got[0].losses == pytest.approx(stock[0].losses, rel=RTOL)
        assert got[0].grad_norms == pytest.approx(stock[0].grad_norms, rel=RTOL)


def _compare(backend: str) -> dict[str, float]:
    """What scripts/gpu_check_flex.py does on GPUs."""
    install()
    cpu_platform.enable()
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    check = importlib.import_module("gpu_check_flex")
    check.HIDDEN, check.FFN, check.TOKENS = 64, 32, 128
    return check.compare(backend, torch.float32)


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_the_check_for_gpus_compares_right(backend: str) -> None:
    for differences in run_ranks(2, _compare, backend):
        assert {"output", "inputs", "probs"} < set(differences)
        assert all(value < 1e-5 for value in differences.values()), differences


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), num_tokens=st.integers(1, 30), topk=st.integers(1, 4))
def test_the_k_largest_probabilities_are_the_k_chosen(
    seed: int, num_tokens: int, topk: int
) -> None:
    """DeepEP is told indices, which Megatron finds as the k largest of the slots' probabilities."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(num_tokens, 6, generator=generator) + 1e-30
    chosen = weights.topk(topk).indices
    routing = torch.zeros(num_tokens, 6, dtype=torch.bool).scatter_(1, chosen, True)
    counts_E = routing.sum(0)
    split_EI = torch.stack([counts_E - counts_E // 3, counts_E // 3], dim=1)
    physical_EI = torch.randperm(12, generator=generator).view(6, 2)
    slots, probs = translate_routing(routing, weights * routing, split_EI, physical_EI, 12)
    found = torch.zeros_like(slots).scatter_(1, probs.topk(topk).indices, True)
    assert torch.equal(found, slots)
    assert (slots.sum(1) == topk).all()

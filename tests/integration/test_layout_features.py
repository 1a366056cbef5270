"""Features of a layout that the pairwise suite lacks, and what must agree between layouts.

In fp64 with SGD, tolerances as in test_layouts.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fssdp.integration import versions
from tests.deep_ep_stub.install import install
from tests.integration.double import in_double
from tests.integration.shards import join
from tests.integration.test_equality import assert_equal_training, assert_replicated
from tests.integration.test_layouts import (
    MLA,
    SHARED,
    TOLERANCE,
    assert_equals_ep,
    double,
    train_in_double,
)
from tests.integration.tiny import Job, TinyRun, Trained, merge, run_many
from tests.ranks import a_few, run_ranks

AUX = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
SELECTIVE = {"recompute_granularity": "selective"}

FEATURES: dict[str, tuple[int, Job]] = {
    # Per-token loss scales aux losses by tokens: once with each kind of sequence sharding.
    "per-token-loss-tp": (
        4,
        double(
            ep=4,
            tp=2,
            model={
                "calculate_per_token_loss": True,
                "moe_router_load_balancing_type": "aux_loss",
                **AUX,
            },
        ),
    ),
    "per-token-loss-cp": (
        4,
        double(
            ep=2,
            cp=2,
            num_microbatches=2,
            model={
                "calculate_per_token_loss": True,
                "moe_router_load_balancing_type": "seq_aux_loss",
                **AUX,
            },
        ),
    ),
    "padding-mask": (
        4,
        double(
            ep=2,
            tp=2,
            num_padding=5,
            model={"moe_router_load_balancing_type": "aux_loss", **AUX},
        ),
    ),
    "capacity-by-probs": (
        4,
        double(
            ep=4,
            model={"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "probs"},
        ),
    ),
    "capacity-by-position-allgather": (
        4,
        double(
            ep=2,
            dispatcher="allgather",
            model={"moe_expert_capacity_factor": 1.2, "moe_token_drop_policy": "position"},
        ),
    ),
    "two-aux-losses": (
        4,
        double(
            ep=2,
            model={
                "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
                "moe_aux_loss_coeff": [0.1, 0.05],
            },
        ),
    ),
    # The one MTP layer runs twice in each forward.
    "mtp-repeated-layer": (
        4,
        double(
            ep=2,
            num_microbatches=2,
            model={"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
        ),
    ),
    "shared-expert-gate": (
        4,
        double(ep=2, tp=2, model={**SHARED["overlap"], "moe_shared_expert_gate": True}),
    ),
    "shared-expert-overlap-etp": (
        4,
        double(ep=2, etp=2, model=SHARED["overlap"], fssdp={"fssdp_etp_schedule": "fused"}),
    ),
    "recompute-moe_act": (4, double(ep=2, model={**SELECTIVE, "recompute_modules": ["moe_act"]})),
    "recompute-shared_experts": (
        4,
        double(
            ep=2,
            model={**SELECTIVE, "recompute_modules": ["shared_experts"], **SHARED["plain"]},
        ),
    ),
    "recompute-mlp": (
        4,
        double(ep=2, model={**SELECTIVE, "recompute_modules": ["mlp"], "moe_layer_freq": [0, 1]}),
    ),
    "tp-4": (4, double(ep=2, tp=4, model={"num_attention_heads": 4})),
    # Stages 0: dense, MoE; 1: MoE, dense. Megatron's optimizer sorts its groups on each (fault 29).
    "dense-at-both-ends": (
        4,
        double(
            ep=2, pp=2, num_layers=4, num_microbatches=2, model={"moe_layer_freq": [0, 1, 1, 0]}
        ),
    ),
    "input-jitter": (4, double(ep=2, model={"moe_input_jitter_eps": 0.1})),
}


@pytest.mark.parametrize("feature", a_few(list(FEATURES), (0, 2, 4, 8, 13)))
def test_feature_equals_ep(feature: str) -> None:
    world_size, job = FEATURES[feature]
    ranks = assert_equals_ep(world_size, job)
    assert sum(sum(rank.replicas) for rank in ranks) > 0, "no replica: equality is no news"


@pytest.mark.parametrize("rematerialize", a_few((False, True), (1,)))
def test_a_repeated_layer_fetches_its_replicas_again(rematerialize: bool) -> None:
    """MTP's one layer runs twice a forward: two visits are in flight (fault 21)."""
    job = double(ep=4, model={"mtp_num_layers": 2, "mtp_use_repeated_layer": True, **MLA})
    assert_equals_ep(4, job, fssdp_rematerialize=rematerialize)


def _numbers(job: Job) -> list[int]:
    return [layer.number for layer in TinyRun(job).runtime._layers]


def test_mtp_layers_are_counted_on() -> None:
    """Megatron-LM#6748 (fault 39): MTP's layer was taken for the decoder's first.

    --fssdp-owners would have moved the experts of both.
    """
    job = Job(ep=2, num_layers=2, model={"moe_layer_freq": [0, 1], "mtp_num_layers": 2})
    assert run_ranks(2, _numbers, job.as_fssdp()) == [[2, 3, 4]] * 2


def test_aux_losses_do_not_depend_on_stages() -> None:
    """megablocks#64 (fault 27): the same loss and gradients with 1 and with 2 stages."""
    model = {"moe_router_load_balancing_type": "aux_loss", **AUX}
    job = double(ep=2, num_microbatches=2, model=model).as_fssdp()
    one = [runs[0] for runs in run_ranks(2, train_in_double, [job])]
    two = [runs[0] for runs in run_ranks(4, train_in_double, [replace(job, pp=2)])]
    assert two[-1].losses == pytest.approx(one[-1].losses, rel=TOLERANCE)
    assert two[-1].grad_norms == pytest.approx(one[-1].grad_norms, rel=TOLERANCE)
    gradients = merge(two, "grads")
    for name, tensor in merge(one, "grads").items():
        error = (gradients[name] - tensor).abs().max().item()
        assert error <= TOLERANCE * tensor.abs().max().item(), name


def _train_with_flex(jobs: list[Job]) -> list[Trained]:
    install()
    return run_many(jobs)


@pytest.mark.skipif(versions.core_release() < (0, 18), reason="0.17 overlaps with alltoall alone")
def test_flex_with_capacity_and_overlapped_shared_expert() -> None:
    """In fp32, as in test_equality: the stand-in for DeepEP's kernels takes no fp64."""
    model = {
        **SHARED["overlap"],
        "moe_expert_capacity_factor": 0.8,
        "moe_flex_dispatcher_backend": "deepep",
        "moe_flex_dispatcher_num_sms": 16,
        "moe_router_dtype": "fp32",
    }
    job = Job(ep=4, steps=3, dispatcher="flex", model=model)
    ranks = run_ranks(4, _train_with_flex, [job, job.as_fssdp()])
    want, got = ([of_rank[kind] for of_rank in ranks] for kind in (0, 1))
    assert_replicated(got)
    assert_equal_training(got, want)


@pytest.mark.skipif(
    importlib.util.find_spec("einops") is None, reason="Megatron's instances need einops"
)
def test_optimizer_instances_equal_ep() -> None:
    """Expert data parallelism 4 as 2 instances of 2 (fault 33)."""
    job = double(ep=2, distributed_optimizer=True, optimizer_instances=2)
    assert_equals_ep(8, job)


# One model and its data on 4 ranks, whatever the layout. Clipping is off: Megatron's loss under
# context parallelism is scaled by its size, and SGD's step with it.
SAME: dict[str, dict[str, int]] = {
    "ep4": {"ep": 4},
    "ep2": {"ep": 2},
    "tp2-ep2": {"ep": 2, "tp": 2},
    "tp2-ep4": {"ep": 4, "tp": 2},
    "pp2-ep2": {"ep": 2, "pp": 2, "num_microbatches": 2},
    "pp2-vpp2-ep2": {"ep": 2, "pp": 2, "vpp": 2, "num_microbatches": 2},
}


def test_a_layout_changes_no_training() -> None:
    """Losses, norms and every gradient, by global name: one process with plain EP says which.

    DeepSpeed#5259 (fault 9): exactly twice the expert gradients at EP 2. Megatron-LM#2263
    (fault 14): one norm of all gradients together.
    """
    job = double(num_layers=4, clip_grad=0.0)
    ((want,),) = run_ranks(1, train_in_double, [replace(job, ep=1)])
    layouts = [replace(job, **layout).as_fssdp() for layout in SAME.values()]
    ranks = run_ranks(4, train_in_double, layouts, timeout_s=240)
    for position, name in enumerate(SAME):
        runs = [of_rank[position] for of_rank in ranks]
        losses = next(run.losses for run in runs if any(run.losses))
        assert losses == pytest.approx(want.losses, rel=TOLERANCE), name
        gradients = join(merge(runs, "grads"))
        assert gradients.keys() == want.grads.keys(), name
        for key, tensor in want.grads.items():
            error = (gradients[key] - tensor).abs().max().item()
            assert error <= TOLERANCE * tensor.abs().max().item(), f"{name}: {key}"
        norm = sum(tensor.square().sum() for tensor in gradients.values()).sqrt().item()
        for run in runs:
            assert run.grad_norms[-1] == pytest.approx(norm, rel=TOLERANCE), name


def _bias(job: Job) -> torch.Tensor:
    from megatron.core.transformer.moe.router import TopKRouter

    with in_double():
        run = TinyRun(job)
        run.step(0)
        (router, *_) = (m for m in run.model[0].modules() if isinstance(m, TopKRouter))
        bias: torch.Tensor = router.expert_bias.clone()
    return bias


def _biases(jobs: list[Job]) -> list[torch.Tensor]:
    from megatron_fssdp.integration import cpu_platform

    cpu_platform.enable()
    return [_bias(job) for job in jobs]


def test_expert_bias_moves_once_an_iteration() -> None:
    """torchtitan#1304 (fault 35): it moved with each micro-batch."""
    model = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.1,
    }
    job = double(ep=2, num_layers=1, model=model)
    jobs = [job, job.as_fssdp(), replace(job, num_microbatches=4).as_fssdp()]
    for stock, one, four in run_ranks(2, _biases, jobs):
        assert stock.abs().max() > 0
        assert torch.equal(one, stock)
        assert torch.equal(four, stock)


def _without_moe_layers(job: Job) -> tuple[list[str], list[float]]:
    """Report as a job with all flags on does; return what was printed and the losses."""
    import contextlib
    import io

    from megatron_fssdp.config import FSSDPConfig
    from megatron_fssdp.integration import metrics

    run = TinyRun(job)
    config = FSSDPConfig(moe_parallel="fssdp", fssdp_log_plan=1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        metrics.attach(run.runtime, config)
        run.train()
    return printed.getvalue().splitlines(), run.result.losses


def test_stages_without_moe_layers_report_nothing_and_train() -> None:
    """Ranks without MoE layers skipped a collective, and the job hung (fault 24)."""
    freq = {"moe_layer_freq": [0, 0, 1, 1]}
    job = Job(steps=3, distributed_optimizer=True, pp=2, num_layers=4, num_microbatches=2)
    job = replace(job, model=freq).as_fssdp()
    answers = run_ranks(4, _without_moe_layers, job, timeout_s=60)
    lines = [[line for line in printed if "fssdp iteration" in line] for printed, _ in answers]
    assert [len(each) for each in lines] == [0, 0, 3, 0]


class _TwoSizes:
    """Two MoE layers, of 4 and of 8 experts, one after the other."""

    def __init__(self, moe_parallel: str) -> None:
        from megatron.core.models.backends import LocalSpecProvider
        from megatron.core.models.gpt import moe_module_specs

        from megatron_fssdp.config import FSSDPConfig
        from megatron_fssdp.integration import spec

        run = TinyRun(Job(ep=2, steps=1))  # the groups, and a configuration to start from
        self.plans: list[Any] = []
        if moe_parallel == "fssdp":
            self.runtime = spec.register(FSSDPConfig(moe_parallel="fssdp"))
            self.runtime.listeners.append(lambda record: self.plans.append(record))
        torch.manual_seed(dist.get_rank())
        self.layers = torch.nn.ModuleList()
        for number, num_experts in enumerate((4, 8)):
            config = replace(run.config, num_moe_experts=num_experts)
            build = moe_module_specs.get_moe_module_spec_for_backend(
                LocalSpecProvider(), num_experts=num_experts, moe_grouped_gemm=True
            )
            layer = build(config)
            layer.set_layer_number(number + 1)
            with torch.no_grad():
                layer.router.weight.copy_(layer.router.weight[:1] * torch.randn(num_experts, 1))
                dist.broadcast(layer.router.weight, 0)
            self.layers.append(layer)
        spec.unregister()

    def train(self) -> list[float]:
        optimizer = torch.optim.SGD(self.layers.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        rows = torch.randn(64, 1, 32, generator=generator)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            output = rows
            for layer in self.layers:
                output = output + layer(output)[0]
            loss = output.square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


def _two_sizes() -> list[Any]:
    stock, ours = _TwoSizes("ep"), _TwoSizes("fssdp")
    return [stock.train(), ours.train(), [sum(r.num_replicas for r in ours.plans)]]


def test_layers_with_different_numbers_of_experts() -> None:
    """Megatron-LM#5573 (fault 38): counts of unequal layers were stacked."""
    for want, got, (replicas,) in run_ranks(2, _two_sizes):
        assert got == pytest.approx(want, rel=1e-5)
        assert replicas > 0

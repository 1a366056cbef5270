"""Spare replicas in training: where they pay, by the same rule on every rank and in simulations."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.planning.cost import LayerShape
from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.predict import DEFAULT_PREDICTOR, PREDICTORS
from megatron_fssdp.planning.quotas import balance, rank_loads
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.loads import training_series
from tests.integration.tiny import Job, TinyRun
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent.parent
H100 = str(ROOT / "configs" / "clusters" / "h100_dgx.yaml")
# Mixtral 8x7B's, with gradients in fp32; and that of `make train`.
MIXTRAL = LayerShape(hidden_size=4096, ffn_size=14336, grad_bytes=4)
SMALL = LayerShape(hidden_size=256, ffn_size=512, param_bytes=4, grad_bytes=4, activation_bytes=4)
WARM_UP = 5


def _settings(
    shape: LayerShape, rows: int, num_microbatches: int, flags: dict[str, Any]
) -> tuple[PlanSettings, Topology]:
    """What a rank plans with, where each rank computes so many tokens of a micro-batch."""
    import torch.distributed as dist

    from megatron_fssdp.integration.owners import settings_for
    from megatron_fssdp.integration.runtime import FSSDPRuntime

    config = FSSDPConfig(moe_parallel="fssdp", **flags)
    runtime = FSSDPRuntime(config)
    runtime.add_layer(8, dist.group.WORLD, dist.group.WORLD, shape)
    layer = runtime.layers[0]
    load_E = np.full(8, rows * dist.get_world_size() // 8)
    settings = settings_for(load_E, layer, config, num_microbatches)
    runtime.close()
    return settings, layer.shared.topology


@pytest.mark.parametrize(
    ("num_microbatches", "flags", "slots"),
    [
        (128, {}, 2),
        (1, {}, 1),
        (128, {"fssdp_rematerialize": True}, 1),
        # Weights stay, but gradients return with each micro-batch.
        (128, {"fssdp_calibration": True}, 1),
    ],
)
def test_large_experts_fill_the_slots_that_pay(
    num_microbatches: int, flags: dict[str, Any], slots: int
) -> None:
    flags = {"fssdp_cluster": H100, **flags}
    first, second = run_ranks(2, _settings, MIXTRAL, 8192, num_microbatches, flags)
    assert first == second
    assert first[0].spare_slots == slots


def _plans_before_and_after_a_resume() -> list[bytes]:
    """What follows 128 micro-batches; resumed before one; and what one by itself would get."""
    import torch
    import torch.distributed as dist

    from megatron_fssdp.integration.runtime import FSSDPRuntime

    plans, state = [], None
    counts_RE = torch.full((dist.get_world_size(), 16), 1024)
    counts_RE[:, 0] *= 8
    for num_microbatches, resumes in ((128, False), (1, True), (1, False)):
        runtime = FSSDPRuntime(FSSDPConfig(moe_parallel="fssdp", fssdp_cluster=H100))
        runtime.add_layer(16, dist.group.WORLD, dist.group.WORLD, MIXTRAL)
        runtime.num_microbatches = partial(int, num_microbatches)
        if resumes:
            assert state is not None
            runtime.load_state_dict(runtime.check_state_dict(state))
        step = runtime.begin_forward(0, torch.device("cpu"))
        if not resumes:
            runtime.record(0, counts_RE, counts_RE.sum(dim=1))
            weight = torch.nn.Parameter(torch.zeros(1))
            weight.grad = torch.zeros(1)
            torch.optim.SGD([weight]).step()
            step = runtime.begin_forward(0, torch.device("cpu"))
            state = runtime.state_dict()
        plans.append(step.plan.slot_expert_RS.tobytes())
        runtime.close()
    return plans


def test_a_resumed_run_plans_for_the_micro_batches_that_were() -> None:
    """Where batches grow, it planned for the next iteration's: other spares, another loss."""
    for before, resumed, another in run_ranks(4, _plans_before_and_after_a_resume):
        assert before == resumed
        assert before != another


def test_our_own_training_keeps_its_spares() -> None:
    """The loads of `make train`, planned as on gloo; an H100's rates leave one slot of spares."""
    settings, topology = run_ranks(4, _settings, SMALL, 1024, 1, {})[0]
    counts = training_series(ROOT / "benchmarks" / "data" / "training_loads.npz")
    assert counts is not None
    assert counts[0, 0].sum() == 4 * 1024
    found = [_fullest(counts[:, layer], topology, settings) for layer in range(counts.shape[1])]
    values = np.concatenate(found)
    assert values.mean() <= 1.01
    assert np.quantile(values, 0.95) <= 1.03
    assert settings.spare_slots == 2
    without = replace(settings, spare_tokens=None)
    assert _fullest(counts[:, 0], topology, without).mean() > 1.01


def _fullest(counts_TRE: Int64Array, topology: Topology, settings: PlanSettings) -> np.ndarray:
    """(T,) tokens of the fullest rank over the mean, after a warm-up."""
    num_ranks, num_experts = counts_TRE.shape[1:]
    owner_LE, predictor = shard_evenly(1, num_experts, num_ranks), PREDICTORS[DEFAULT_PREDICTOR]()
    values = []
    for counts_RE in counts_TRE:
        plan = plan_layers(predictor.predict(), owner_LE, topology, settings).layer(0)
        load_R = rank_loads(balance(counts_RE, plan, topology.node_of_rank), plan)
        values.append(load_R.max() / load_R.mean())
        predictor.update(counts_RE.sum(axis=0)[None])
    return np.array(values[WARM_UP:])


def _look(job: Job) -> Any:
    run = TinyRun(job)
    run.step(0)
    (resharder,) = run.runtime.owners.resharders.values()
    load_LE = np.ones((len(resharder.mover.ownership.owner_LE), job.num_experts), dtype=np.int64)
    load_LE[:, : job.num_experts // 2] = 1000
    result = resharder.look(load_LE)
    run.runtime.close()
    return result


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_groups_side_by_side_do_not_save_twice(distributed_optimizer: bool) -> None:
    """A move's worth was that of all expert-parallel groups' loads on the ranks of one.

    Its price was that of all their bytes over one link; each group sends over its own.
    """
    job = Job(ep=2, steps=2, distributed_optimizer=distributed_optimizer)
    job = job.as_fssdp(fssdp_num_replica_slots=0)
    alone, two = run_ranks(2, _look, job)[0], run_ranks(4, _look, job)[0]
    assert alone.saved_s > 0
    assert two.saved_s == alone.saved_s
    assert two.num_bytes > alone.num_bytes
    # Where groups share the optimizer's state, one may have all of an expert's, or a part.
    assert 0 < two.move_s <= alone.move_s

"""What data-parallel traffic and replicas take from each other."""

import numpy as np
import pytest

from megatron_fssdp.simulation.costs import Costs
from megatron_fssdp.simulation.layers import LayerWork, Traits
from megatron_fssdp.simulation.passes import FIRST, walk_stages
from megatron_fssdp.simulation.simulate import simulate
from megatron_fssdp.simulation.spread import ZipfTrace
from megatron_fssdp.simulation.systems import SYSTEMS, Options
from tests.simulation.cases import make_cluster, make_job


def passes(fetch_s: float, return_s: float, ep: int = 4, **flags):
    """One stage of 2 layers on 8 ranks, 1 s of attention each, and its costs."""
    costs = Costs(make_job(8, expert_model_parallel_size=ep, **flags), make_cluster())
    ones_R = np.ones(ep)
    work = LayerWork(
        dense_s=1.0,
        tokens_s=0.1,
        experts_R=ones_R,
        fetch_R=fetch_s * ones_R,
        return_R=return_s * ones_R,
        traits=Traits(fetch="attention", returns="attention"),
    )
    return walk_stages(costs, [work, work])[0], costs


def test_gradients_are_not_reduced_while_replicas_travel() -> None:
    """0.5 s of spRS hide under the attention's backward, but not from the reduction."""
    slow = make_cluster(inter_node=make_cluster().inter_node)
    exposed = []
    for return_s in (0.0, 0.5):
        found, costs = passes(0.0, return_s, overlap_grad_reduce=True)
        # Links so slow that the second layer's gradients are under way to the end.
        costs = Costs(costs.job, slow.with_links(1e-6))
        exposed.append(found.exposed_reduction_s(costs, 0))
    assert exposed[0] > 0
    assert exposed[1] - exposed[0] == pytest.approx(0.5)


def test_the_first_fetch_waits_for_gathered_parameters() -> None:
    """2 expert-data-parallel ranks must gather an expert before its owner can send it."""
    ends = []
    for flags in ({}, {"overlap_param_gather": True}, {"overlap_param_gather": True, "ep": 8}):
        found, _ = passes(1.0, 0.0, **flags)
        first = found.clocks[FIRST][0]
        assert first is not None
        ends.append(first.end_s)
    assert ends[0] == ends[2] < ends[1]


@pytest.mark.parametrize("name", ["flexmoe", "eplb"])
def test_rivals_optimizer_state_is_cut_as_owned_experts_is(name) -> None:
    """Of a replica's 12 bytes a parameter half is there with 2 expert-data-parallel ranks."""
    costs = {num: Costs(make_job(num), make_cluster()) for num in (4, 8)}
    one, two = (SYSTEMS[name](costs[num], Options()).replica_bytes(2) for num in (4, 8))
    assert one - two == 2 * 2 * 3 * 64 * 128 * 12 / 2


def test_memory_of_moves_and_shadows() -> None:
    costs = Costs(make_job(8, expert_model_parallel_size=4), make_cluster())
    sharded = Costs(
        make_job(
            8, tensor_model_parallel_size=2, expert_tensor_parallel_size=2, sequence_parallel=True
        ),
        make_cluster(),
    )
    for name in ("hecate", "flexmoe", "smartmoe", "fssdp"):
        whole, half = (SYSTEMS[name](each, Options()).move_bytes() for each in (costs, sharded))
        assert whole == 2 * half > 0
        never = Options(reshard_interval=0, rearrange_interval=0)
        assert SYSTEMS[name](costs, never).move_bytes() == 0
    params = 3 * 64 * 128
    shadows = SYSTEMS["fastermoe"](costs, Options()).replica_bytes(6)
    # Weights of 2 slots in 6 layers, fp32 gradients of one layer.
    assert shadows == 2 * params * (6 * 2 + 4)


def test_no_interval_moves_nothing() -> None:
    options = Options(reshard_interval=0, rearrange_interval=0)
    trace = ZipfTrace(1.0, 8, 2, 4, 8, tokens=512)
    names = ("smartmoe", "fssdp")
    result = simulate(make_job(), make_cluster(), trace, names, options=options)
    assert not any(system.moved_I.any() for system in result.systems)

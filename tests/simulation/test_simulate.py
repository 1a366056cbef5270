# SPDX-License-Identifier: Apache-2.0

"""Whole simulations: one worked by hand, and what must hold for every system."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from megatron_fssdp.planning.cost import ComputeRate
from megatron_fssdp.planning.planner import PlanSettings
from megatron_fssdp.planning.topology import LinkClass
from megatron_fssdp.presets.files import find_file
from megatron_fssdp.simulation.cluster import load_cluster
from megatron_fssdp.simulation.costs import ADAM_PASSES_BYTES, DENSE_PASSES, SOURCE_PASSES, Costs
from megatron_fssdp.simulation.flow import flow_of_owners
from megatron_fssdp.simulation.layers import Traits
from megatron_fssdp.simulation.model import read_job
from megatron_fssdp.simulation.result import PARTS, SystemResult
from megatron_fssdp.simulation.simulate import simulate
from megatron_fssdp.simulation.spread import Spread, ZipfTrace, scale_rows
from megatron_fssdp.simulation.systems import SYSTEMS, Options
from megatron_fssdp.simulation.systems.planning import FUSED_S
from megatron_fssdp.simulation.timeline import chrome_trace
from tests.simulation.cases import make_cluster, make_job


class Repeated:
    """The same (L, R, E) counts in every iteration."""

    def __init__(self, counts_LRE, num_iterations: int = 8) -> None:
        self.counts_LRE = np.array(counts_LRE)
        self.num_layers, self.num_ranks, self.num_experts = self.counts_LRE.shape
        self.num_iterations = num_iterations
        self.iterations = tuple(range(100, 100 + num_iterations))
        self.notes = ("a note of the trace",)

    def counts(self, iteration: int):
        return self.counts_LRE


def zipf(exponent: float = 1.0, num_ranks: int = 4, num_iterations: int = 10) -> ZipfTrace:
    return ZipfTrace(exponent, 8, 2, num_ranks, num_iterations, tokens=512, seed=3)


BALANCED = Repeated(np.full((2, 4, 8), 64))


def test_one_layer_on_two_ranks_by_hand() -> None:
    """2 ranks, 1 layer, 2 experts; all of rank 0's tokens and half of rank 1's go to expert 0.

    128 tokens a rank, top-1: rank 0 computes 192, rank 1 64. Expert: 3 x 64 x 128 parameters.
    """
    job = make_job(
        2,
        num_layers=1,
        num_experts=2,
        moe_router_topk=1,
        expert_model_parallel_size=2,
        micro_batch_size=1,
        global_batch_size=2,
        disable_bias_linear=True,
    )
    cluster = make_cluster()
    trace = Repeated([[[128, 0], [64, 64]]], 1)
    result = simulate(job, cluster, trace, ("ep",), warm_up=0)
    params = 3 * 64 * 128
    experts_s = 192 * 2 * params / 1e12
    # Rank 1 sends 64 tokens of 64 numbers of 2 bytes over 10 GB/s; each of 4 exchanges.
    tokens_s = 64 * 64 * 2 / 1e10
    # Attention, two norms of weight and bias, the router; a token sees 64 others on average.
    dense = 4 * 64 * 64 + 2 * 2 * 64 + 64 * 2
    dense_s = 128 * (2 * dense + 2 * (64 + 64) * 128 / 2) / 1e12
    head_s = 2 * 128 * 64 * 64 / 1e12
    outer = 64 * 64 + 128 * 64 + 2 * 64  # words, positions, the last norm
    # Gradients (4 bytes) and parameters (2 bytes) of the dense part over 2 ranks: half is sent.
    # Experts have one owner each: nothing to reduce. No overlap was asked for.
    reduce_s = (dense + outer) * (4 + 2) / 2 / 1e10
    expected = 3 * (dense_s + head_s + experts_s) + 4 * tokens_s + reduce_s
    assert result.system("ep").mean_s == pytest.approx(expected, rel=1e-12)
    assert result.owner_straggler_IL.tolist() == [[1.5]]
    parts = {name: float(value[0]) for name, value in result.system("ep").parts_s.items()}
    assert parts["experts"] == pytest.approx(3 * 128 * 2 * params / 1e12)
    assert parts["straggling"] == pytest.approx(3 * 64 * 2 * params / 1e12)
    assert parts["reduction"] == pytest.approx(reduce_s)


def test_passes_over_memory_count() -> None:
    job, cluster = make_job(), make_cluster(memory_bytes_per_s=1e9)
    costs, free = Costs(job, cluster), Costs(job, make_cluster())
    moved = 256 * 64 * 2 * (DENSE_PASSES + 2 * SOURCE_PASSES)
    assert costs.dense_s(1) - free.dense_s(1) == pytest.approx(moved / 1e9)
    # Experts' optimizer is cut over 1 rank, the dense part's over 4.
    params = costs.dense_params(0) / 4 + costs.expert_params(0)
    assert costs.optimizer_s(0) == pytest.approx(params * ADAM_PASSES_BYTES / 1e9)
    # Gradients of 4 bytes are set to zero, and read and written to be scaled; alone, not scaled.
    for each, passes in (
        (costs, 3),
        (Costs(make_job(1, expert_model_parallel_size=1), cluster), 1),
    ):
        params = each.dense_params(0) + each.expert_params(0)
        buffers_s = each.step_s(0) - each.optimizer_s(0)
        assert buffers_s == pytest.approx(params * 4 * passes / 1e9)
    # Rank 0 keeps 30 rows of 128 bytes, which are read and written; the rest is the links' time.
    flow = flow_of_owners(np.array([[30, 10], [20, 20]]), np.array([0, 1]))
    two = make_job(2, num_experts=2, expert_model_parallel_size=2)
    kept_s = [Costs(two, each).tokens_s(flow) for each in (cluster, make_cluster())]
    assert kept_s[0] - kept_s[1] == pytest.approx(30 * 128 * 2 / 1e9)


def test_cores_copy_what_travels() -> None:
    """Of 6 bytes a weight 2 are bf16 and 4 its gradient; four ranks copy 40 GB/s together."""
    both = Traits(fetch="attention", returns="attention")
    costs = Costs(make_job(), make_cluster(cores_copy=True))
    assert costs.copying_s(12 * 10**9, both) == pytest.approx((0.1, 0.2))
    assert costs.copying_s(12 * 10**9, Traits(returns="open")) == pytest.approx((0.0, 0.3))
    assert costs.copying_s(0, Traits()) == (0.0, 0.0)
    assert Costs(make_job(), make_cluster()).copying_s(12 * 10**9, both) == (0.0, 0.0)
    # FSSDP pays for what it hides, EP for nothing.
    trace, slow = ZipfTrace(1.2, 8, 2, 4, 8, tokens=512), ComputeRate(flops_per_s=1e10)
    free, paid = (
        [
            system.mean_s
            for system in simulate(
                make_job(), make_cluster(4, rate=slow, cores_copy=copies), trace, ("ep", "fssdp")
            ).systems
        ]
        for copies in (False, True)
    )
    assert free[0] == paid[0]
    assert free[1] < paid[1] < 1.1 * free[1]


def test_dense_products_have_the_rate_of_as_many_rows() -> None:
    """Not the best that was measured: among noisy measurements that is the luckiest."""
    job, tokens = make_job(), 256
    rate = ComputeRate(flops_per_s=9e12, rate_by_rows=((tokens, 1e12), (2 * tokens, 9e12)))
    measured, plain = Costs(job, make_cluster(rate=rate)), Costs(job, make_cluster())
    assert measured.dense_s(1) == pytest.approx(plain.dense_s(1))
    assert measured.head_s() == pytest.approx(plain.head_s())


@pytest.mark.parametrize("name", SYSTEMS)
def test_parts_add_up_and_nothing_is_faster_than_its_work(name) -> None:
    job = make_job(8, pipeline_model_parallel_size=2, global_batch_size=32)
    result = simulate(job, make_cluster(), zipf(), ("ep", name), num_iterations=4)
    system = result.system(name)
    assert set(system.parts_s) == set(PARTS)
    np.testing.assert_allclose(sum(system.parts_s.values()), system.iteration_s)
    assert all((part >= -1e-12).all() for part in system.parts_s.values())
    ep = result.system("ep")
    # The same products are computed, whoever computes them.
    np.testing.assert_allclose(system.parts_s["experts"], ep.parts_s["experts"], rtol=1e-6)
    np.testing.assert_allclose(system.loads_LR.sum(axis=1), ep.loads_LR.sum(axis=1))
    ideal = system.parts_s["attention"] + system.parts_s["experts"]
    assert (system.iteration_s >= ideal).all()
    assert (system.straggler_IL >= 1 - 1e-9).all()
    assert system.peak_bytes
    assert all(len(part) == 8 for part in system.memory_bytes.values())


COSTLY = {"laer", "hecate", "hecate-rm", "eplb"}


@pytest.mark.parametrize("name", sorted(set(SYSTEMS) - COSTLY))
def test_balanced_loads_cost_nobody_anything(name) -> None:
    """Where loads are level all systems take EP's time (LAER restores, Hecate and EPLB copy)."""
    options = Options(planning_s=0.0, rival_planning_s=0.0)
    result = simulate(make_job(), make_cluster(), BALANCED, ("ep", name), options=options)
    assert result.speed_up(name) == pytest.approx(1.0, rel=1e-9)


# Hecate copies more over faster links (its overlap degree), which may take longer.
@pytest.mark.parametrize("name", sorted(set(SYSTEMS) - {"hecate", "hecate-rm"}))
def test_faster_links_never_hurt(name) -> None:
    slow = make_cluster()
    times = [
        simulate(make_job(), slow.with_links(factor), zipf(0.5), (name,), num_iterations=3)
        .system(name)
        .mean_s
        for factor in (1.0, 2.0, 8.0)
    ]
    assert times[0] >= times[1] >= times[2]


def test_fssdp_beats_ep_on_skewed_loads_and_its_straggler_is_near_one() -> None:
    job = make_job(moe_ffn_hidden_size=512, global_batch_size=128)
    names, options = ("ep", "fssdp", "fssdp-rm"), Options(planning_s=FUSED_S)
    result = simulate(job, make_cluster(), zipf(), names, options=options, num_iterations=4)
    assert result.owner_straggler_IL.mean() > 1.4
    assert result.system("fssdp").straggler_IL.mean() < 1.05
    assert result.speed_up("fssdp") > 1.2
    rm, kept = result.system("fssdp-rm").peak_parts, result.system("fssdp").peak_parts
    assert 0 < rm["replicas"] < kept["replicas"]


def test_spares_are_made_where_they_pay() -> None:
    """Mixtral's filled all slots: re-materialized, copies took longer than balance saved."""
    job = read_job("mixtral_8x7b", 8, {"--num-layers": 2, "--global-batch-size": 64})
    cluster = load_cluster(find_file("clusters", "h200_dgx"))
    trace = ZipfTrace(0.2, 8, 2, 8, 8, tokens=2 * 4096)

    def run(rematerializes: bool, spare_tokens: int | None) -> SystemResult:
        settings = PlanSettings(spare_tokens=spare_tokens)
        options = Options(settings=settings, rematerializes=rematerializes, planning_s=0.0)
        return simulate(job, cluster, trace, ["fssdp"], options=options).systems[0]

    # Kept for 8 micro-batches, both slots of 8 ranks in 2 layers pay; for 24 fetches one does.
    assert run(False, 1).replicas_I.mean() == 32
    again = run(True, 1)
    assert again.replicas_I.max() <= 16
    assert again.mean_s < 1.02 * run(True, None).mean_s


def test_moves_take_their_time_once() -> None:
    options = Options(rearrange_interval=100)
    once = partial(simulate, make_job(), make_cluster(), zipf(), ("smartmoe",), options=options)
    # The cold start is over before the first iteration that counts; here it counts.
    assert not once().system("smartmoe").moved_I.any()
    system = once(warm_up=2).system("smartmoe")
    moved = system.moved_I > 0
    assert moved.sum() == 1
    assert (system.parts_s["moves"] > 0).tolist() == moved.tolist()


@pytest.mark.parametrize("name", ["fssdp", "hecate"])
def test_owners_change_within_their_stage_and_only_where_that_pays(name) -> None:
    job = make_job(8, num_layers=4, pipeline_model_parallel_size=2, global_batch_size=8)
    assert job.layout.num_microbatches == 1
    trace = ZipfTrace(1.0, 8, 4, 4, 12, tokens=512, seed=3)
    moved = {}
    # A move's bytes are those of tokens that many iterations save: not those of one.
    for interval in (1, 6):
        options = Options(num_replica_slots=0, reshard_interval=interval)
        result = simulate(job, make_cluster(), trace, (name,), options=options)
        moved[interval] = np.flatnonzero(result.system(name).moved_I).tolist()
    # 5 iterations of warm-up: the run's iteration 6 is the second that counts.
    assert moved[6] == [1]
    # Hecate moves whenever algorithm 2 answers otherwise.
    assert len(moved[1]) == 0 if name == "fssdp" else len(moved[1]) > 3


def test_groups_may_have_loads_of_their_own() -> None:
    job = make_job(8)
    own = simulate(job, make_cluster(), zipf(num_ranks=8), ("ep",), num_iterations=2)
    alike = simulate(job, make_cluster(), zipf(num_ranks=4), ("ep",), num_iterations=2)
    assert not any("same loads" in note for note in own.notes)
    assert any("same loads" in note for note in alike.notes)


def test_traces_are_spread_over_other_ranks() -> None:
    assert scale_rows(np.array([[3, 1], [0, 0]]), 6).tolist() == [[5, 1], [3, 3]]
    job = make_job(num_experts=8)
    counts = np.zeros((1, 8, 8), dtype=np.int64)
    counts[0, np.arange(8), np.arange(8)] = 5
    spread = Spread(Repeated(counts), job).counts(0)
    # 8 sources on 4 ranks: two each; 2 layers from 1; 256 tokens, top-2.
    assert spread.shape == (1, 2, 4, 8)
    assert spread[0, 1, 1].tolist() == [0, 0, 256, 256, 0, 0, 0, 0]
    few = Spread(Repeated(counts[:, :2]), job).counts(0)
    assert few[0, 0].argmax(axis=1).tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="the trace has 8 experts, the model 16"):
        Spread(Repeated(counts), make_job(num_experts=16))


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown systems"):
        simulate(make_job(), make_cluster(), BALANCED, ("nonsense",))
    with pytest.raises(ValueError, match="the trace has 8"):
        simulate(make_job(), make_cluster(), BALANCED, ("ep",), num_iterations=9)
    with pytest.raises(ValueError, match="those that count are 105 to 107"):
        simulate(make_job(), make_cluster(), BALANCED, ("ep",), timelines=(5,))


def test_a_traces_numbers_and_notes_are_kept() -> None:
    result = simulate(make_job(), make_cluster(), BALANCED, ("ep",), timelines=(106,))
    assert result.iterations.tolist() == [105, 106, 107]
    assert "a note of the trace" in result.notes
    assert list(result.system("ep").timelines) == [106]


def test_adapters_are_shared() -> None:
    """4 ranks on 2 nodes; ranks 0 and 1 each send 1 GB to the other node.

    With an adapter each that takes 1 s at 1 GB/s; sharing one of 2 GB/s as well. If only rank 0
    sends, its own adapter takes 1 s, the shared one half of it.
    """
    own, shared = make_cluster(), make_cluster(adapters_per_node=1)
    both = np.zeros((4, 4))
    both[0, 2] = both[1, 3] = 1e9
    one = np.zeros((4, 4))
    one[0, 2] = 1e9
    for cluster, seconds in ((own, (1.0, 1.0)), (shared, (1.0, 0.5))):
        network = cluster.network(range(4))
        assert (network.exchange_s(both), network.exchange_s(one)) == seconds
    # A ring of 4 ranks over 2 nodes uses both adapters of a node: 3 / 4 of 4 GB at 2 GB/s.
    assert own.network(range(4)).ring_s(4e9, np.arange(4)) == 1.5


def test_timeline_of_an_iteration_is_whole() -> None:
    job = make_job(
        8, pipeline_model_parallel_size=2, global_batch_size=32, overlap_grad_reduce=True
    )
    result = simulate(
        job, make_cluster(), zipf(), ("ep", "fssdp"), num_iterations=2, timelines=(6,)
    )
    for system in result.systems:
        events = system.timelines[6]
        assert {event.rank for event in events} == set(range(8))
        compute: dict[int, list] = {}
        for event in events:
            if event.stream == "compute":
                compute.setdefault(event.rank, []).append(event)
        for mine in compute.values():
            mine.sort(key=lambda event: event.start_s)
            # A rank computes one thing at a time.
            for before, after in pairwise(mine):
                assert before.start_s + before.duration_s <= after.start_s + 1e-12
            # 4 micro-batches of 1 layer, forward and backward.
            assert sum(event.name == "experts" for event in mine) == 8
        end = max(event.start_s + event.duration_s for event in events)
        assert end <= system.iteration_s[1] + 1e-12
    names = {event.name for event in result.system("fssdp").timelines[6]}
    assert {"attention", "gate", "spAG", "dispatch", "experts", "combine", "spRS"} <= names


def test_timeline_of_many_ranks_and_micro_batches_is_short() -> None:
    job = make_job(32, global_batch_size=32 * 2 * 50, expert_model_parallel_size=8)
    result = simulate(
        job, make_cluster(), zipf(num_ranks=8), ("ep",), num_iterations=1, timelines=(5,)
    )
    events = result.system("ep").timelines[5]
    assert {event.micro_batch for event in events} == {0, 1, 2, 3, 46, 47, 48, 49, None}
    experts = [event for event in events if event.name == "experts" and event.micro_batch == 0]
    # The fullest and the emptiest of the first group's 8 ranks.
    assert len({event.rank for event in experts}) == 2
    ends = [event.start_s + event.duration_s for event in events]
    assert max(ends) == pytest.approx(result.system("ep").iteration_s[0], rel=0.05)


def test_chrome_trace_has_the_format_that_perfetto_reads() -> None:
    result = simulate(
        make_job(), make_cluster(), zipf(), ("fssdp",), num_iterations=1, timelines=(5,)
    )
    values = json.loads(chrome_trace(result))
    complete = [event for event in values["traceEvents"] if event["ph"] == "X"]
    metadata = [event for event in values["traceEvents"] if event["ph"] == "M"]
    assert len(complete) + len(metadata) == len(values["traceEvents"])
    assert len(complete) == len(result.system("fssdp").timelines[5])
    for event in complete:
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} == set(event)
        assert event["ts"] >= 0
        assert event["dur"] > 0
    named = {(e["pid"], e["tid"]) for e in metadata if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete} <= named
    processes = [e["args"]["name"] for e in metadata if e["name"] == "process_name"]
    assert processes == [f"fssdp, iteration 5, rank {rank}" for rank in range(4)]


def test_link_latency_counts_once_an_exchange() -> None:
    cluster = make_cluster(4)
    late = replace(cluster, intra_node=LinkClass(bytes_per_s=1e10, latency_s=1.0))
    job = make_job(use_distributed_optimizer=False, global_batch_size=8)
    first, second = (
        simulate(job, each, BALANCED, ("ep",), num_iterations=1).system("ep").mean_s
        for each in (cluster, late)
    )
    # 2 layers x 4 exchanges; dense gradients of 2 layers and the outer part: 2 passes of 2 steps.
    assert second - first == pytest.approx(2 * 4 + 3 * 2 * 2)


@pytest.mark.parametrize("given", ["moe", "core_attn moe", ["core_attn", "moe"]])
def test_recompute_modules_of_a_file_and_of_words(given: object) -> None:
    job = make_job(recompute_granularity="selective", recompute_modules=given)
    assert job.recompute == "moe"
    other = make_job(recompute_granularity="selective", recompute_modules=["moe_act"])
    assert other.recompute == "none"

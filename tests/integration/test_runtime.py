"""The runtime: all ranks agree on nodes and plans."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fssdp.config import FSSDPConfig
from tests.integration.tiny import Job, TinyRun, run
from tests.ranks import run_ranks


def _nodes(per_node: int | None) -> tuple[int, ...]:
    from megatron_fssdp.integration.runtime import FSSDPRuntime

    runtime = FSSDPRuntime(FSSDPConfig(fssdp_ranks_per_node=per_node))
    runtime.add_layer(8, dist.group.WORLD, dist.group.WORLD, None)
    return runtime._layers[0].shared.topology.node_of_rank


def test_all_ranks_agree_on_nodes() -> None:
    """By host name, or by the flag; never by a variable that may differ between nodes."""
    assert run_ranks(4, _nodes, None) == [(0, 0, 0, 0)] * 4
    assert run_ranks(4, _nodes, 2) == [(0, 0, 1, 1)] * 4
    assert run_ranks(4, _nodes, 3) == [(0, 0, 0, 1)] * 4


def _other_plans_on_rank_2(job: Job) -> None:
    """Train, while one rank sees other loads than the rest, as a fault in memory would make it."""
    import numpy as np

    from megatron_fssdp.integration import owners as module

    plan_each = module.plan_each

    def wrong(load_LE: Any, *rest: Any) -> Any:
        return plan_each(np.roll(load_LE, 1, axis=1), *rest)

    if dist.get_rank() == 2:
        module.plan_each = wrong
    TinyRun(job).train()


def test_check_plans_stops_all_ranks_with_the_first_difference() -> None:
    """Without the check these ranks would wait for each other's messages forever."""
    job = Job(ep=4, steps=3).as_fssdp(fssdp_check_plans=True)
    errors = run_ranks(4, _other_plans_on_rank_2, job, check=False)
    found = [str(error).strip().splitlines()[-1] for error in errors]
    for error in found:
        assert re.search(
            r"--fssdp-check-plans: rank 2 of the expert-parallel group made another plan for "
            r"MoE layer 1 than rank 0: rank \d, slot \d is -?\d, not -?\d",
            error,
        ), error
    assert len(set(found)) == 1
    # Equal plans pass.
    run_ranks(4, run, job)


def _read_cluster(path: str) -> Any:
    from megatron_fssdp.integration.runtime import FSSDPRuntime

    runtime = FSSDPRuntime(FSSDPConfig(fssdp_cluster=path.format(rank=dist.get_rank())))
    runtime.add_layer(8, dist.group.WORLD, dist.group.WORLD, None)
    shared = runtime._layers[0].shared
    links = shared.topology.intra_node, shared.topology.inter_node
    return *(link.bytes_per_s for link in links), shared.rate.flops_per_s


def test_cluster_file_is_read_and_must_be_the_same_everywhere(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.yaml").write_text(
            "topology:\n  ranks_per_node: 8\n  intra_node: {bytes_per_s: 5e9, latency_s: 1e-6}\n"
            f"  inter_node: {{bytes_per_s: {rank + 1}e9, latency_s: 1e-6}}\n"
            "compute: {flops_per_s: 7e12}\n"
        )
    assert run_ranks(2, _read_cluster, str(tmp_path / "1.yaml")) == [(5e9, 2e9, 7e12)] * 2
    for path, sentence in (
        ("{rank}.yaml", "differs between the ranks"),
        ("none.yaml", "cannot be read on rank 0"),
    ):
        for error in run_ranks(2, _read_cluster, str(tmp_path / path), check=False):
            assert sentence in error


def test_what_a_cluster_file_leaves_open_is_as_without_one(tmp_path: Path) -> None:
    """A file with one link gave ranks on CPUs an H100's network."""
    for line, read in (
        ("  intra_node: {bytes_per_s: 5e9, latency_s: 1e-6}\n", (5e9, 1e8, 1e10)),
        ("", (1e9, 1e8, 1e10)),
    ):
        path = tmp_path / "cluster.yaml"
        path.write_text(f"topology:\n  ranks_per_node: 8\n{line}")
        assert run_ranks(2, _read_cluster, str(path)) == [read] * 2


def _plan_digests(job: Job) -> list[str]:
    run = TinyRun(job)
    digests: list[str] = []

    def note(record: Any) -> None:
        plans = b"".join(plan.slot_expert_RS.tobytes() for plan in record.plans)
        digests.append(hashlib.sha256(plans).hexdigest())

    run.runtime.listeners.append(note)
    run.train()
    return digests


def test_all_ranks_make_the_same_plans() -> None:
    first, *others = run_ranks(4, _plan_digests, Job(ep=4, steps=6).as_fssdp())
    assert len(set(first)) > 1, "plans never changed"
    assert others == [first] * 3

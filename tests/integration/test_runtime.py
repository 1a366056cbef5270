"""The runtime: all ranks agree on nodes and plans."""

from __future__ import annotations

import hashlib
from typing import Any

import torch.distributed as dist

from megatron_fssdp.config import FSSDPConfig
from tests.integration.tiny import Job, TinyRun
from tests.ranks import run_ranks


def _nodes(per_node: int | None) -> tuple[int, ...]:
    from megatron_fssdp.integration.runtime import FSSDPRuntime

    runtime = FSSDPRuntime(FSSDPConfig(fssdp_ranks_per_node=per_node))
    runtime.add_layer(8, dist.group.WORLD, 0)
    return runtime._layers[0].topology.node_of_rank


def test_all_ranks_agree_on_nodes() -> None:
    """By host name, or by the flag; never by a variable that may differ between nodes."""
    assert run_ranks(4, _nodes, None) == [(0, 0, 0, 0)] * 4
    assert run_ranks(4, _nodes, 2) == [(0, 0, 1, 1)] * 4
    assert run_ranks(4, _nodes, 3) == [(0, 0, 0, 1)] * 4


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

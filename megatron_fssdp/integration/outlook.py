# SPDX-License-Identifier: Apache-2.0

"""What a run prints at its start: what replicas will take, and what may go slowly."""

from __future__ import annotations

import os

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.integration.runtime import FSSDPRuntime

ONE_CONNECTION = (
    "CUDA_DEVICE_MAX_CONNECTIONS is 1: kernels start in the order of their launch on all streams, "
    "so the attention may wait for copies that were launched before it. Unset it where Megatron "
    "does not ask for it, or compare with --fssdp-overlap off"
)


def may_not_overlap(config: FSSDPConfig) -> bool:
    """Whether the environment makes copies wait for computation, or the reverse."""
    one = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return one and config.fssdp_overlap == "on"


def describe(runtime: FSSDPRuntime) -> str:
    """Say what replicas take if they are kept, and if they are re-materialized.

    Memory is that of full slots; a rank that owns hot experts holds what lands for them besides.
    Seconds are those of full slots over the slowest link class.
    """
    slots, shapes, link = runtime.outlook()
    num_micro = runtime.microbatches()
    weights = [slots * shape.expert_bytes for shape in shapes]
    grads = [slots * shape.num_params * shape.grad_bytes for shape in shapes]
    both = [shape.expert_bytes + shape.num_params * shape.grad_bytes for shape in shapes]
    # Kept, each layer adds its gradients up over the micro-batches; else layers take turns.
    kept = sum(weights) + (sum(grads) if num_micro > 1 else max(grads, default=0))
    turns = slots * max(both, default=0)
    # An owner packs what it sends and receives its experts' gradients, a layer at a time.
    landing = _most_replicated(runtime) * max(both, default=0)
    once_s = link.time_s(sum(weights)) + link.time_s(sum(grads))
    often_s = num_micro * (2 * link.time_s(sum(weights)) + link.time_s(sum(grads)))
    this, change, other = "kept", "give", "re-materialized"
    if runtime.config.fssdp_rematerialize:
        this, change, other = other, "drop", this
    return (
        f" fssdp: replicas of {len(shapes)} MoE layers, {slots} slots a rank: kept "
        f"{kept / 1e6:.0f} MB a rank, copies at most {1e3 * once_s:.1f} ms an iteration; "
        f"re-materialized {turns / 1e6:.0f} MB, {1e3 * often_s:.1f} ms; owners of hot experts up "
        f"to {landing / 1e6:.0f} MB more. This run: {this} ({change} --fssdp-rematerialize for "
        f"{other})"
    )


def _most_replicated(runtime: FSSDPRuntime) -> int:
    """Return how many of its experts of a layer a rank may have to send, at most."""
    slots = runtime.config.fssdp_num_replica_slots
    sizes = [(layer.num_experts, layer.group.size()) for layer in runtime.layers]
    return max((min(experts // ranks, (ranks - 1) * slots) for experts, ranks in sizes), default=0)

# SPDX-License-Identifier: Apache-2.0

"""Small jobs and clusters for the simulator's tests."""

from typing import Any

from megatron_fssdp.planning.cost import ComputeRate
from megatron_fssdp.planning.topology import LinkClass
from megatron_fssdp.simulation.cluster import Cluster
from megatron_fssdp.simulation.model import Job, job_from_flags

FLAGS = {
    "--num-layers": 2,
    "--hidden-size": 64,
    "--ffn-hidden-size": 128,
    "--num-attention-heads": 4,
    "--seq-length": 128,
    "--max-position-embeddings": 128,
    "--num-experts": 8,
    "--moe-router-topk": 2,
    "--padded-vocab-size": 64,
    "--micro-batch-size": 2,
    "--global-batch-size": 16,
    "--expert-model-parallel-size": 4,
    "--bf16": True,
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--use-distributed-optimizer": True,
}


def make_job(num_ranks: int = 4, **flags: Any) -> Job:
    """Return a job of 2 MoE layers; flags by name, with underscores."""
    given = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    return job_from_flags({**FLAGS, **given}, "tiny", num_ranks)


def make_cluster(ranks_per_node: int = 2, **settings: Any) -> Cluster:
    """Return a cluster of round numbers: 1 Tflop/s, 10 GB/s near and 1 GB/s far, no latency."""
    values: dict[str, Any] = {
        "intra_node": LinkClass(bytes_per_s=1e10, latency_s=0.0),
        "inter_node": LinkClass(bytes_per_s=1e9, latency_s=0.0),
        "rate": ComputeRate(flops_per_s=1e12),
        **settings,
    }
    return Cluster(name="round", ranks_per_node=ranks_per_node, **values)

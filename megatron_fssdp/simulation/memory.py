# SPDX-License-Identifier: Apache-2.0

"""Peak memory of every rank, by parts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_fssdp.presets.layout import kept_of_row
from megatron_fssdp.simulation.costs import GRAD_BYTES, OPTIMIZER_BYTES, Costs
from megatron_fssdp.simulation.systems.common import System

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


def memory(costs: Costs, system: System, peak_LR: Float64Array) -> dict[str, Int64Array]:
    """Return the bytes of each part on each rank of the world, at the peak.

    Args:
        costs: of the job.
        system: what replicas it holds.
        peak_LR: (L, R) the most tokens that each rank computes of a micro-batch in each MoE layer.

    Returns:
        (W,) int64 by part: see `result.MEMORY_PARTS`. Tokens that a rank computes decide its
        activations, so a straggler is also the first to run out of memory.
    """
    job, layout = costs.job, costs.job.layout
    shards = {"dense": layout.dp * layout.cp, "expert": layout.edp}
    parts: dict[str, list[Int64Array]] = {}
    first_layer = 0
    for stage in range(layout.pp):
        moe_layers = costs.moe_layers_of(stage)
        last_layer = first_layer + len(moe_layers)
        values: dict[str, float | Float64Array] = {}
        for kind, params in (
            ("dense", costs.dense_params(stage)),
            ("expert", costs.expert_params(stage)),
        ):
            cut = shards[kind] if job.has_distributed_optimizer else 1
            values[f"{kind} parameters"] = params * job.param_bytes
            values[f"{kind} gradients"] = params * GRAD_BYTES
            # In fp32 the parameter itself is the optimizer's copy.
            state = OPTIMIZER_BYTES - (4 if job.param_bytes == 4 else 0)
            values[f"{kind} optimizer"] = params * state / cut
        values["replicas"] = system.replica_bytes(len(moe_layers))
        values["activations"] = _activations(costs, stage, peak_LR[first_layer:last_layer])
        values["moves"] = system.move_bytes()
        first_layer = last_layer
        position = np.arange(layout.ranks_per_stage) // layout.etp % layout.ep
        for name, value in values.items():
            per_rank = np.broadcast_to(value, (layout.ep,))[position]
            parts.setdefault(name, []).append(per_rank.astype(np.int64))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _activations(costs: Costs, stage: int, peak_LR: Float64Array) -> Float64Array:
    """(R,) bytes of activations on each rank of an expert-parallel group."""
    job, shape, layout = costs.job, costs.job.shape, costs.job.layout
    tokens = layout.micro_batch * shape.sequence / (layout.cp * layout.tp)
    in_flight = min(layout.num_microbatches, layout.pp - stage)
    input_R = np.full(layout.ep, tokens * shape.hidden_size)
    row = kept_of_row(shape.hidden_size, shape.moe_ffn_size / layout.etp, shape.num_matrices)
    kept_R, largest_R, index = np.zeros(layout.ep), np.zeros(layout.ep), 0
    for layer in layout.layers_of(stage):
        is_moe = shape.is_moe(layer)
        dense_R = np.full(layout.ep, tokens * (shape.kept_moe if is_moe else shape.kept_dense))
        moe_R = np.zeros(layout.ep)
        if is_moe:
            moe_R = row * peak_LR[index]
            index += 1
        largest_R = np.maximum(largest_R, moe_R + (dense_R if job.recompute == "full" else 0))
        kept_R += input_R if job.recompute == "full" else dense_R
        kept_R += moe_R if job.recompute == "none" else 0
    computed_again_R = largest_R if job.recompute != "none" else 0
    total_R: Float64Array = job.param_bytes * (in_flight * kept_R + computed_again_R)
    if stage == layout.pp - 1:
        # Scores of the output layer and their gradient, in fp32.
        total_R = total_R + 2 * 4 * tokens * shape.vocab_size
    return total_R

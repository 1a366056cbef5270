# SPDX-License-Identifier: Apache-2.0

"""What a rank computes, reduces and holds: seconds and bytes that follow from the job alone.

Counts of passes over memory are those of Megatron's unfused modules, forward; the backward takes
twice as many. They matter on CPUs; on GPUs products and links do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.cost import LayerShape
from megatron_fssdp.simulation.cluster import Cluster, Network
from megatron_fssdp.simulation.flow import Flow
from megatron_fssdp.simulation.layers import Traits
from megatron_fssdp.simulation.model import Job

Float64Array = npt.NDArray[np.float64]

# Reads and writes of a token's hidden vector in a layer, outside products: two norms, two
# residual additions, the attention's transposes.
DENSE_PASSES = 12
# Of query and key together, where the rotary embedding is not fused: two products, a negation, a
# concatenation and a sum are ten reads and writes of either.
ROTARY_PASSES = 20
# Of each score of an attention that is not fused: written, scaled, masked, softmax, dropout, read.
SCORE_PASSES = 8
# Of each of a token's copies at its source: permute (read, write), unpermute (read, add).
SOURCE_PASSES = 4
# Of each row at its expert: sorted by expert and back.
ROW_PASSES = 4
# Of the inner vector of a gated expert: read gate and up, write their product; not fused, the
# activation's result is written and read besides, and halves are cut out.
INNER_PASSES, UNFUSED_INNER_PASSES = 3, 6
# Of a gradient that products do not add up themselves: it is read, added to, written.
GRAD_PASSES = 3
# Of gradient buffers in an iteration: set to zero; and where there are several data-parallel ranks,
# scaled for their mean (read, written).
ZERO_PASSES, SCALE_PASSES = 1, 2
# Of a token that its own rank computes: the exchange copies it.
OWN_PASSES = 2
# Of a message that cores copy: read and written by the sender, and by the receiver.
MESSAGE_PASSES = 4
# Bytes of a gradient: Megatron reduces in fp32; of optimizer state: fp32 copy and two moments.
GRAD_BYTES = 4
OPTIMIZER_BYTES = 12
# Reads and writes of Adam: gradient, both moments and the fp32 copy; the parameter is written.
ADAM_PASSES_BYTES = 4 + 2 * 8 + 2 * 4 + 2


@dataclass(frozen=True, eq=False)
class Costs:
    """A job on a cluster.

    Attributes:
        job: what runs.
        cluster: where.
    """

    job: Job
    cluster: Cluster

    @cached_property
    def shape(self) -> LayerShape:
        """Sizes for the planner's cost model."""
        return self.job.shape.layer_shape(GRAD_BYTES, self.job.param_bytes)

    @cached_property
    def group_ranks(self) -> list[int]:
        """World ranks of the first expert-parallel group (the first of each ETP group)."""
        layout = self.job.layout
        return [index * layout.etp for index in range(layout.ep)]

    @cached_property
    def network(self) -> Network:
        """Links of an expert-parallel group."""
        return self.cluster.network(self.group_ranks)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one expert's parameters and optimizer state, all of its shards together."""
        return self.shape.num_params * (self.job.param_bytes + OPTIMIZER_BYTES)

    def dense_s(self, layer: int) -> float:
        """Forward seconds of a layer on each rank, besides its routed experts; from 1."""
        job, shape, layout = self.job, self.job.shape, self.job.layout
        tokens = layout.micro_batch * shape.sequence / layout.cp
        fused = self.cluster.has_fused_kernels
        flops = tokens * shape.dense_flops(layer, is_causal=fused) / layout.tp
        row_bytes = shape.hidden_size * job.param_bytes
        moved = tokens / layout.tp * row_bytes * (DENSE_PASSES + SOURCE_PASSES * shape.topk)
        if not fused:
            scores = tokens * shape.num_heads * shape.sequence / layout.tp
            moved += SCORE_PASSES * scores * job.param_bytes
            moved += ROTARY_PASSES * tokens / layout.tp * row_bytes
        seconds = flops / float(self.cluster.rate.at(tokens))
        seconds += moved / self.cluster.memory_bytes_per_s
        if layout.tp > 1:
            # Sequence parallelism: an all-gather and a reduce-scatter for the attention.
            stage = self.cluster.network(range(layout.tp))
            ranks = np.arange(layout.tp)
            seconds += 2 * stage.ring_s(tokens * row_bytes, ranks)
        return seconds

    def grads_s(self, layer: int) -> float:
        """Seconds in a layer's backward of adding up its gradients, where products do not."""
        if self.cluster.has_fused_kernels:
            return 0.0
        sizes, layout = self.job.shape.sizes, self.job.layout
        params = sizes.dense_of(self.job.shape.is_moe(layer)) / layout.tp
        if self.job.shape.is_moe(layer):
            params += sizes.num_experts / layout.ep * sizes.expert / layout.etp
        return GRAD_PASSES * GRAD_BYTES * params / self.cluster.memory_bytes_per_s

    def head_s(self) -> float:
        """Forward seconds of the output layer."""
        shape, layout = self.job.shape, self.job.layout
        tokens = layout.micro_batch * shape.sequence / layout.cp
        flops = 2.0 * tokens * shape.hidden_size * shape.vocab_size / layout.tp
        return flops / float(self.cluster.rate.at(tokens))

    def experts_R(self, flow: Flow) -> Float64Array:
        """(R,) forward seconds of each rank's experts."""
        job, rate = self.job, self.cluster.rate
        rows = flow.rows_N
        params = self.shape.num_params / job.layout.etp
        seconds = np.maximum(rows * (2.0 * params) / rate.at(rows), rate.group_floor_s)
        passes = INNER_PASSES if self.cluster.has_fused_kernels else UNFUSED_INNER_PASSES
        inner = passes * job.shape.moe_ffn_size / job.layout.etp
        row_bytes = job.param_bytes * (ROW_PASSES * job.shape.hidden_size + inner)
        seconds = np.where(
            rows > 0, seconds + rows * row_bytes / self.cluster.memory_bytes_per_s, 0
        )
        return np.bincount(flow.rank_N, weights=seconds, minlength=job.layout.ep)

    def tokens_s(self, flow: Flow) -> float:
        """Seconds of one token exchange."""
        job = self.job
        seconds = self.network.exchange_s(flow.tokens_RR * self.shape.row_bytes)
        if job.layout.ep > 1:
            # Before the rest, by the same thread or kernel.
            own_bytes = OWN_PASSES * float(np.diag(flow.tokens_RR).max()) * self.shape.row_bytes
            seconds += own_bytes / self.cluster.memory_bytes_per_s
        if job.layout.etp > 1:
            # An expert-tensor-parallel group gathers its tokens, and scatters the sums.
            stage = self.cluster.network(range(job.layout.etp))
            rows = float(flow.load_R.max()) * self.shape.row_bytes
            seconds += stage.ring_s(rows, np.arange(job.layout.etp))
        return seconds

    def copying_s(self, copied_bytes: int, traits: Traits) -> tuple[float, float]:
        """Seconds of all ranks' cores that a fetch and a return take, where cores copy messages.

        The rate inside a node, at best measured with all ranks sending, tells what their cores copy
        together, for whatever link; but no faster than their memory.

        Args:
            copied_bytes: of one fetch and one return, all ranks.
            traits: what is fetched and returned at all.
        """
        if not self.cluster.cores_copy:
            return 0.0, 0.0
        memory = self.cluster.memory_bytes_per_s / MESSAGE_PASSES
        together = self.job.layout.ep * min(self.cluster.intra_node.bytes_per_s, memory)
        fetched = self.job.param_bytes if traits.fetch != "none" else 0
        returned = GRAD_BYTES if traits.returns != "none" else 0
        each_s = copied_bytes / together / max(fetched + returned, 1)
        return fetched * each_s, returned * each_s

    def send_s(self) -> float:
        """Seconds of a micro-batch's activations between two pipeline stages."""
        job, layout = self.job, self.job.layout
        if layout.pp == 1:
            return 0.0
        num_bytes = job.tokens_per_rank // layout.etp * job.shape.hidden_size * job.param_bytes
        far = layout.ranks_per_stage >= self.cluster.ranks_per_node
        link = self.cluster.inter_node if far else self.cluster.intra_node
        return link.time_s(num_bytes)

    def dense_params(self, stage: int) -> float:
        """Parameters of a rank in a stage besides routed experts."""
        shape, layout = self.job.shape, self.job.layout
        params = sum(map(shape.dense_params, layout.layers_of(stage)))
        return (params + self.outer_params(stage)) / layout.tp

    def outer_params(self, stage: int) -> int:
        """Parameters of a stage's embedding and output layer, before tensor parallelism."""
        sizes, layout = self.job.shape.sizes, self.job.layout
        params = sizes.embedding if stage == 0 else 0
        if stage == layout.pp - 1:
            params += sizes.output
            # Tied weights are there twice, where the first and the last stage differ.
            is_tied = sizes.output < self.job.shape.vocab_size * self.job.shape.hidden_size
            params += sizes.embedding if is_tied and layout.pp > 1 else 0
        return params

    def expert_params(self, stage: int) -> float:
        """Parameters of the routed experts that a rank owns in a stage."""
        sizes, layout = self.job.shape.sizes, self.job.layout
        num = len(self.moe_layers_of(stage)) * sizes.num_experts / layout.ep
        return num * sizes.expert / layout.etp

    def moe_layers_of(self, stage: int) -> list[int]:
        """Numbers of a stage's MoE layers, from 1."""
        return [x for x in self.job.layout.layers_of(stage) if self.job.shape.is_moe(x)]

    @cached_property
    def stage_network(self) -> Network:
        """Links of a pipeline stage's ranks."""
        return self.cluster.network(range(self.job.layout.ranks_per_stage))

    def reduce_s(self, params: float, is_expert: bool) -> tuple[float, float]:
        """Seconds of reducing gradients, and of gathering parameters, over data-parallel ranks.

        Args:
            params: of a rank.
            is_expert: over the expert-data-parallel group, else the dense one.
        """
        layout = self.job.layout
        step = layout.etp * layout.ep if is_expert else layout.tp
        ranks = np.arange(0, layout.ranks_per_stage, step)
        network = self.stage_network
        if not self.job.has_distributed_optimizer:
            return network.ring_s(params * GRAD_BYTES, ranks, passes=2), 0.0
        gather_s = network.ring_s(params * self.job.param_bytes, ranks)
        return network.ring_s(params * GRAD_BYTES, ranks), gather_s

    def optimizer_s(self, stage: int) -> float:
        """Seconds of an Adam step."""
        layout, params = self.job.layout, 0.0
        for mine, shards in (
            (self.dense_params(stage), layout.dp * layout.cp),
            (self.expert_params(stage), layout.edp),
        ):
            params += mine / (shards if self.job.has_distributed_optimizer else 1)
        return params * ADAM_PASSES_BYTES / self.cluster.memory_bytes_per_s

    def step_s(self, stage: int) -> float:
        """Seconds of an iteration's passes over gradient buffers, and of the Adam step."""
        layout = self.job.layout
        params = self.dense_params(stage) + self.expert_params(stage)
        passes = ZERO_PASSES + (SCALE_PASSES if layout.dp * layout.cp > 1 else 0)
        moved = passes * GRAD_BYTES * params
        return moved / self.cluster.memory_bytes_per_s + self.optimizer_s(stage)

# SPDX-License-Identifier: Apache-2.0

"""What a layer takes: seconds and bytes of one forward and backward, from whole-number plans.

The model counts what differs between plans. A step's time is set by its fullest rank, network
adapter or link; links inside and between nodes work at the same time. Public formulas and measured
rates only; `tools.calibrate` measures the rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_fssdp.planning.plan import EMPTY, Int64Array, LayerPlan
from megatron_fssdp.planning.planner import PlanSettings
from megatron_fssdp.planning.quota_tables import quota_tables
from megatron_fssdp.planning.quotas import rank_loads, split_sources
from megatron_fssdp.planning.schedule import RELAY_FANOUT, Schedule, traffic
from megatron_fssdp.planning.topology import Topology

# Token transfers of one layer: dispatch and combine, forward and backward.
TOKEN_TRIPS = 4
# Work of forward and backward against forward alone: two more products of the same size.
FORWARD_BACKWARD = 3
# Public figure of an H100 SXM; until `fssdp calibrate` has measured.
HBM_BYTES_PER_S = 3.35e12
# What a second slot of spares on each rank takes off the fullest rank, over the mean: in this
# project's own training 0.02 in the mean and 0.14 in the p95 (`make bench-planner`), so in between.
DRIFT = 0.03


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of a MoE layer.

    Attributes:
        hidden_size: width of a token.
        ffn_size: width inside an expert, of all its shards together.
        num_matrices: weight matrices of an expert: 3 with a gated activation, else 2.
        param_bytes: bytes of one parameter that is sent to a replica.
        grad_bytes: bytes of one gradient that comes back.
        activation_bytes: bytes of one number of a token.
        num_shards: ranks that share an expert (expert tensor parallelism).
    """

    hidden_size: int
    ffn_size: int
    num_matrices: int = 3
    param_bytes: int = 2
    grad_bytes: int = 2
    activation_bytes: int = 2
    num_shards: int = 1

    @property
    def num_params(self) -> int:
        """Parameters that a rank holds of one expert: its shard's."""
        return self.num_matrices * self.hidden_size * self.ffn_size // self.num_shards

    @property
    def expert_bytes(self) -> int:
        """Bytes that a rank holds of one expert's parameters."""
        return self.num_params * self.param_bytes

    @property
    def replica_bytes(self) -> int:
        """Bytes that one replica's shard sends: parameters there, gradients back."""
        return self.num_params * (self.param_bytes + self.grad_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.hidden_size * self.activation_bytes


@dataclass(frozen=True, kw_only=True)
class ComputeRate:
    """How fast a rank multiplies.

    Attributes:
        flops_per_s: rate of large products.
        group_floor_s: the least that one expert's products take, however few its rows.
        rate_by_rows: measured (rows, flop/s), ascending; between them the rate is interpolated,
            and without any it is `flops_per_s`.
        memory_bytes_per_s: what it reads and writes in its memory, together.
    """

    flops_per_s: float
    group_floor_s: float = 0.0
    rate_by_rows: tuple[tuple[int, float], ...] = ()
    memory_bytes_per_s: float = HBM_BYTES_PER_S

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ComputeRate:
        """Build from the `compute` part of a cluster file."""
        table = tuple((int(rows), float(rate)) for rows, rate in values.get("rate_by_rows", ()))
        return cls(
            flops_per_s=float(values["flops_per_s"]),
            group_floor_s=float(values.get("group_floor_s", 0.0)),
            rate_by_rows=table,
            memory_bytes_per_s=float(values.get("memory_bytes_per_s", HBM_BYTES_PER_S)),
        )

    def at(self, rows: npt.NDArray[Any] | float) -> npt.NDArray[np.float64]:
        """Flop/s of products of so many rows each."""
        if not self.rate_by_rows:
            return np.full(np.shape(rows), self.flops_per_s)
        table_rows, table_rate = zip(*self.rate_by_rows, strict=True)
        return np.asarray(np.interp(np.asarray(rows), table_rows, table_rate))

    def forward_s(self, rows_G: Int64Array, shape: LayerShape) -> float:
        """Seconds that a rank's experts take forward; (G,) tokens of each. None takes nothing."""
        rows_G = rows_G[rows_G > 0]
        seconds_G = rows_G * 2.0 * shape.num_params / self.at(rows_G)
        return float(np.maximum(seconds_G, self.group_floor_s).sum())


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Seconds and bytes of one layer, forward and backward. Costs add up with `+`.

    Attributes:
        tokens_s: dispatch and combine.
        gemm_s: expert products of the slowest rank.
        replicas_s: replicas' parameters there (spAG) and gradients back (spRS).
        hidden_s: the part of `replicas_s` that non-MoE computation hides.
        token_bytes, replica_bytes: bytes that cross between nodes.
        slot_bytes: parameters and gradients that the fullest rank holds for replicas.
    """

    tokens_s: float = 0.0
    gemm_s: float = 0.0
    replicas_s: float = 0.0
    hidden_s: float = 0.0
    token_bytes: int = 0
    replica_bytes: int = 0
    slot_bytes: int = 0

    @property
    def total_s(self) -> float:
        """Seconds on the critical path."""
        return self.tokens_s + self.gemm_s + self.replicas_s - self.hidden_s

    def __add__(self, other: LayerCost) -> LayerCost:
        names = [field.name for field in fields(self)]
        return LayerCost(**{name: getattr(self, name) + getattr(other, name) for name in names})


def layer_cost(
    counts_RE: Int64Array,
    quota_EI: Int64Array,
    plan: LayerPlan,
    topology: Topology,
    shape: LayerShape,
    rate: ComputeRate,
    non_moe_s: float = 0.0,
) -> LayerCost:
    """Estimate one layer's forward and backward.

    Args:
        counts_RE: (R, E) int64, tokens of each source rank for each expert.
        quota_EI: (E, I) int64, as `quotas.balance` returns it.
        plan: where the instances are.
        topology: the ranks, their nodes and links.
        shape: sizes of the layer.
        rate: of a rank.
        non_moe_s: forward time of what is computed before the layer and needs no network; the
            backward takes twice that (section 5.4 of the paper).

    Returns:
        The cost. Bytes are those of all ranks together.
    """
    tokens_RR = token_traffic(counts_RE, quota_EI, plan, topology.node_of_rank)
    is_far_RR = topology.node_R[:, None] != topology.node_R
    # Each shard's ranks send their own tokens, and then share what they received.
    one_way_s = _transfer_s(tokens_RR * shape.row_bytes // shape.num_shards, is_far_RR, topology)
    fullest = int(rank_loads(quota_EI, plan).max())
    one_way_s += _share_s(fullest * shape.row_bytes, shape.num_shards, topology)
    copies_RR = replica_traffic(plan, topology)
    replicas_s = _transfer_s(copies_RR * shape.replica_bytes, is_far_RR, topology)
    most_replicas = int((copies_RR.sum(axis=0)).max())
    return LayerCost(
        tokens_s=TOKEN_TRIPS * one_way_s,
        gemm_s=FORWARD_BACKWARD * _slowest_s(quota_EI, plan, shape, rate),
        replicas_s=replicas_s,
        # Parameters travel during the forward's, gradients during the backward's computation.
        hidden_s=min(replicas_s, FORWARD_BACKWARD * non_moe_s),
        token_bytes=TOKEN_TRIPS * shape.row_bytes * int(tokens_RR[is_far_RR].sum()),
        replica_bytes=shape.replica_bytes * int(copies_RR[is_far_RR].sum()),
        slot_bytes=shape.replica_bytes * most_replicas,
    )


def _slowest_s(
    quota_EI: Int64Array, plan: LayerPlan, shape: LayerShape, rate: ComputeRate
) -> float:
    is_instance = plan.instance_rank_EI != EMPTY
    rank, rows = plan.instance_rank_EI[is_instance], quota_EI[is_instance]
    return max(rate.forward_s(rows[rank == r], shape) for r in range(plan.num_ranks))


def _transfer_s(bytes_RR: Int64Array, is_far_RR: Int64Array, topology: Topology) -> float:
    """Seconds of an exchange: the fullest link of each class, both classes at once."""
    seconds = 0.0
    others_RR = np.where(np.eye(len(bytes_RR), dtype=bool), 0, bytes_RR)
    for is_here_RR, link in ((~is_far_RR, topology.intra_node), (is_far_RR, topology.inter_node)):
        here_RR = np.where(is_here_RR, others_RR, 0)
        fullest = max(int(here_RR.sum(axis=0).max()), int(here_RR.sum(axis=1).max()))
        if fullest:
            seconds = max(seconds, link.time_s(fullest))
    return seconds


def _share_s(num_bytes: int, num_shards: int, topology: Topology) -> float:
    """Seconds to gather the tokens that a rank's shards received, on their node; or to scatter."""
    if num_shards == 1:
        return 0.0
    return topology.intra_node.time_s(num_bytes * (num_shards - 1) / num_shards)


def token_traffic(
    counts_RE: Int64Array, quota_EI: Int64Array, plan: LayerPlan, node_of_rank: Sequence[int]
) -> Int64Array:
    """Return the (R, R) int64 tokens that each rank (row) sends to each (column); one trip."""
    tables = quota_tables(plan, node_of_rank)
    # By the rank that computes; sources are columns until the end.
    tokens_RR = np.zeros((plan.num_ranks, plan.num_ranks), dtype=np.int64)
    np.add.at(tokens_RR, tables.owner_E, (counts_RE * tables.single_E).T)
    split_RN = split_sources(counts_RE, quota_EI, plan, node_of_rank)
    np.add.at(tokens_RR, tables.rank_N, split_RN.T)
    return tokens_RR.T


def tokens_between_nodes(
    counts_RE: Int64Array, quota_EI: Int64Array, plan: LayerPlan, topology: Topology
) -> int:
    """Return the tokens that leave their node, one trip: `token_traffic`'s, without its work."""
    is_instance = plan.instance_rank_EI != EMPTY
    sent_ME = np.zeros((topology.num_nodes, plan.num_experts), dtype=np.int64)
    np.add.at(sent_ME, topology.node_R, counts_RE)
    room_ME = np.zeros_like(sent_ME)
    node = topology.node_R[plan.instance_rank_EI[is_instance]]
    np.add.at(room_ME, (node, np.nonzero(is_instance)[0]), quota_EI[is_instance])
    return int(np.maximum(sent_ME - room_ME, 0).sum())


def replica_traffic(plan: LayerPlan, topology: Topology) -> Int64Array:
    """Return the (R, R) int64 copies that each rank (row) sends to each (column), along trees."""
    return traffic(Schedule.tree(plan, topology.node_of_rank).copies, plan.num_ranks)


def schedule_s(schedule: Schedule, topology: Topology, expert_bytes: int) -> float:
    """Seconds of a schedule whose copies have `expert_bytes` each: its stages one by one."""
    seconds = 0.0
    for stage in schedule.stages:
        sender, receiver = np.array([(copy.sender, copy.receiver) for copy in stage]).T
        is_far = topology.node_R[sender] != topology.node_R[receiver]
        slowest = 0.0
        for here, link in ((~is_far, topology.intra_node), (is_far, topology.inter_node)):
            if here.any():
                most = max(np.bincount(end[here]).max() for end in (sender, receiver))
                slowest = max(slowest, link.time_s(int(most) * expert_bytes))
        seconds += slowest
    return seconds


def cheapest_schedule(
    plan: LayerPlan, topology: Topology, expert_bytes: int, present: LayerPlan | None = None
) -> Schedule:
    """Choose between the flat and the tree schedule by modelled time; on equal terms flat."""
    flat = Schedule.flat(plan, present)
    if topology.num_nodes == 1 and flat.max_sends <= RELAY_FANOUT:
        return flat
    tree = Schedule.tree(plan, topology.node_of_rank, present)
    return min((flat, tree), key=lambda each: schedule_s(each, topology, expert_bytes))


def overlap_degree(non_moe_s: float, topology: Topology, shape: LayerShape) -> int:
    """The paper's t: experts that a rank can receive while `non_moe_s` computes (section 4.2)."""
    link = topology.inter_node if topology.num_nodes > 1 else topology.intra_node
    return int(non_moe_s * link.bytes_per_s / shape.expert_bytes)


@dataclass(frozen=True, kw_only=True)
class Copying:
    """How often replicas travel.

    Attributes:
        num_microbatches: of an iteration.
        rematerializes: weights travel for each forward and each backward; else once an iteration.
        returns_each: gradients travel after each backward though weights stay.
    """

    num_microbatches: int = 1
    rematerializes: bool = False
    returns_each: bool = False

    @property
    def fetches(self) -> float:
        """Times that a replica's weights travel, per micro-batch."""
        return 2.0 if self.rematerializes else 1 / self.num_microbatches

    @property
    def returns(self) -> float:
        """Times that its gradients travel, per micro-batch."""
        return 1.0 if self.rematerializes or self.returns_each else 1 / self.num_microbatches

    def replica_bytes(self, shape: LayerShape) -> float:
        """Bytes of one replica's shard, there and back, per micro-batch."""
        grad_bytes = shape.num_params * shape.grad_bytes
        return self.fetches * shape.expert_bytes + self.returns * grad_bytes


def break_even_tokens(shape: LayerShape, copying: Copying | None = None) -> int:
    """Tokens that a replica must keep on its node to save as many bytes as it costs.

    Args:
        shape: sizes of the layer.
        copying: how often replicas travel; None: there and back for one micro-batch.
    """
    # All shards' bytes: a token's go to them in parts.
    copied = (copying or Copying()).replica_bytes(shape) * shape.num_shards
    return math.ceil(copied / (TOKEN_TRIPS * shape.row_bytes))


def token_s(topology: Topology, shape: LayerShape, rate: ComputeRate) -> float:
    """Seconds of one more token on the fullest rank: its trips and products."""
    link = topology.inter_node if topology.num_nodes > 1 else topology.intra_node
    shard_bytes = shape.row_bytes / shape.num_shards
    seconds = TOKEN_TRIPS * shard_bytes / link.bytes_per_s
    seconds += TOKEN_TRIPS * (shape.row_bytes - shard_bytes) / topology.intra_node.bytes_per_s
    return seconds + FORWARD_BACKWARD * 2.0 * shape.num_params / rate.flops_per_s


def mean_rows(load_E: Int64Array, num_ranks: int) -> float:
    """Return the tokens of a micro-batch that a rank computes in a layer, on average."""
    return float(load_E.sum()) / num_ranks


def with_paying_spares(
    settings: PlanSettings,
    topology: Topology,
    shape: LayerShape,
    rate: ComputeRate,
    copying: Copying,
    rows: float,
) -> PlanSettings:
    """Return a layer's settings with spare replicas where they pay.

    A spare on a node that lacks its expert crosses the network, and pays if it keeps as many bytes
    of tokens from crossing: with replicas that are kept over many micro-batches hardly any does
    not, re-materialized hardly any does. Whether copies hide does not count here: their bytes take
    the adapters from gradients and others' tokens, and the attention's time is not known.

    A spare on a node that has its expert costs time alone, and brings balance under drift. Copies
    of a layer take as long as the rank that receives most, and a layer that gets spares has a rank
    that needs a replica: one slot of each rank is filled in that time. More slots take longer, in
    the open at worst, and may take as long as drift does without them.

    Args:
        settings: what the user set.
        topology: the ranks, their nodes and links.
        shape: sizes of the layer.
        rate: of a rank.
        copying: how often replicas travel.
        rows: see `mean_rows`.
    """
    if settings.spare_tokens is None:
        return settings
    has_peers = topology.num_nodes < topology.num_ranks
    link = topology.intra_node if has_peers else topology.inter_node
    copy_s = copying.replica_bytes(shape) / link.bytes_per_s
    drift_s = DRIFT * rows * token_s(topology, shape, rate)
    slots = min(1 + int(drift_s / copy_s), settings.num_replica_slots)
    if settings.spare_slots is not None:
        slots = min(slots, settings.spare_slots)
    least = max(settings.spare_tokens, break_even_tokens(shape, copying))
    return replace(settings, spare_tokens=least, spare_slots=slots)


def saved_s(
    old_EI: Int64Array,
    old: LayerPlan,
    new_EI: Int64Array,
    new: LayerPlan,
    topology: Topology,
    shape: LayerShape,
    rate: ComputeRate,
) -> float:
    """Seconds by which a plan shortens the fullest rank's tokens and products."""
    fewer = int(rank_loads(old_EI, old).max()) - int(rank_loads(new_EI, new).max())
    return fewer * token_s(topology, shape, rate)

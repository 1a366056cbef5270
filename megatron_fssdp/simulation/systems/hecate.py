# SPDX-License-Identifier: Apache-2.0

"""Hecate as published (arXiv 2502.02581): algorithms 1 and 2, and its dispatch rule."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from megatron_fssdp.planning.cost import overlap_degree
from megatron_fssdp.planning.moves import moves_s, plan_moves
from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.planner import PlanSettings
from megatron_fssdp.planning.predict import SlidingMean
from megatron_fssdp.planning.sharding import shard_by_load
from megatron_fssdp.simulation.copies import broadcast_s, replicated
from megatron_fssdp.simulation.flow import flow_by_locality
from megatron_fssdp.simulation.layers import Traits
from megatron_fssdp.simulation.systems.common import Placed
from megatron_fssdp.simulation.systems.planned import Planned


class Hecate(Planned):
    """Sliding mean of 5, algorithm 1 with the overlap degree, algorithm 2, tokens by locality."""

    name: ClassVar[str] = "hecate"
    title: ClassVar[str] = "Hecate (as published)"
    notes: ClassVar[tuple[str, ...]] = (
        "spAG and spRS are one group call of broadcasts and reduces; the overlap degree t comes "
        "from the modelled attention time; where the paper is silent, the readings in "
        "planning.materialize and planning.sharding hold; it plans on the host, once an iteration, "
        "hidden: no micro-batch waits for plans",
    )

    def set_up(self) -> None:
        """Work out t: experts that can be sent within a layer's non-MoE time (section 4.2)."""
        super().set_up()
        self.predictors = [SlidingMean(5) for _ in range(self.num_groups)]
        first = self.costs.job.shape.moe_layers[0]
        # A broadcast enters a node once, so all adapters that a node's ranks share serve it.
        sharing = np.bincount(self.topology.node_R).min()
        far = self.topology.inter_node
        together = replace(far, bytes_per_s=far.bytes_per_s * float(sharing))
        topology = replace(self.topology, inter_node=together)
        self.degree = overlap_degree(self.costs.dense_s(first), topology, self.shape)
        self.settings = PlanSettings(
            num_replica_slots=self.num_slots, overlap_degree=self.degree, algorithm="load"
        )

    @property
    def traits(self) -> Traits:
        """Fetched under the attention, returned under its backward."""
        return Traits(fetch="attention", returns="attention")

    def _look(self, index: int, load_LE: Int64Array) -> tuple[int, float]:
        """Run algorithm 2; experts move whenever its answer differs."""
        owner_LE = self.homes[index].owner_LE
        new_LE = shard_by_load(load_LE, owner_LE, self.topology, self.degree)
        self.homes[index], rounds = plan_moves(self.homes[index], new_LE)
        return sum(map(len, rounds)), moves_s(rounds, self.topology, self.costs.state_bytes)

    def replica_bytes(self, num_layers: int) -> int:
        """Slots of all layers."""
        return self.kept_bytes(num_layers, min(self.num_slots, self.degree))

    def _place(self, counts_RE: Int64Array, plan: LayerPlan) -> Placed:
        """A token stays where its expert is."""
        flow = flow_by_locality(counts_RE, plan, self.topology.node_of_rank)
        members, network, shape = replicated(plan), self.costs.network, self.shape
        gradient_bytes = shape.num_params * shape.grad_bytes
        num = sum(len(ranks) - 1 for _, ranks in members)
        crossed = sum(len(set(network.node_R[ranks].tolist())) - 1 for _, ranks in members)
        return Placed(
            flow=flow,
            fetch_R=broadcast_s(members, network, shape.expert_bytes),
            return_R=broadcast_s(members, network, gradient_bytes),
            num_replicas=plan.num_replicas,
            copied_bytes=num * shape.replica_bytes,
            far_bytes=crossed * shape.replica_bytes,
        )


class HecateRM(Hecate):
    """Hecate-RM (sections 3.2 and 5.4)."""

    name: ClassVar[str] = "hecate-rm"
    title: ClassVar[str] = "Hecate-RM (as published)"

    @property
    def traits(self) -> Traits:
        """Fetched for each forward and each backward."""
        return replace(super().traits, fetches_each=True, fetches_again=True, returns_each=True)

    def replica_bytes(self, num_layers: int) -> int:
        """Slots of one layer."""
        return min(self.num_slots, self.degree) * self.slot_bytes() if num_layers else 0

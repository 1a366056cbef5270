# SPDX-License-Identifier: Apache-2.0

"""LAER-MoE (arXiv 2602.11686): experts sharded over all ranks, restored in any layout (FSEP)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.predict import LastIteration
from megatron_fssdp.simulation.baselines import laer
from megatron_fssdp.simulation.baselines.common import with_replicas
from megatron_fssdp.simulation.copies import far_bytes, shard_traffic
from megatron_fssdp.simulation.flow import flow_by_locality
from megatron_fssdp.simulation.layers import Traits
from megatron_fssdp.simulation.systems.common import Placed
from megatron_fssdp.simulation.systems.planned import Predicting


class Laer(Predicting):
    """A new layout every iteration from the last one's loads, restored in every micro-batch."""

    name: ClassVar[str] = "laer"
    title: ClassVar[str] = "LAER-MoE (FSEP)"
    notes: ClassVar[tuple[str, ...]] = (
        "every micro-batch restores each rank's E / R + slots experts from all ranks' shards, "
        "forward and backward, one layer ahead, and sends their gradients back under the "
        "attention's backward; tokens go evenly to their node's instances, else to all",
    )

    def set_up(self) -> None:
        """Start with even owners."""
        self.predictors = [LastIteration() for _ in range(self.num_groups)]

    @property
    def traits(self) -> Traits:
        """Restored one layer ahead, forward and backward."""
        return Traits(
            fetch="ahead",
            fetches_each=True,
            fetches_again=True,
            returns="attention",
            returns_each=True,
        )

    def place(self, group: int, counts_LRE: Int64Array) -> list[Placed]:
        """Lay out from the last iteration's loads."""
        load_LE = self.predictors[group].predict()
        plans = []
        for layer, owner_E in enumerate(self.owner_LE):
            if load_LE is None:
                plan = with_replicas(owner_E, [], self.num_ranks, self.num_slots)
            else:
                plan = laer.plan(load_LE[layer], owner_E, self.topology, self.num_slots)
            plans.append(plan)
        return [self._place(counts, plan) for counts, plan in zip(counts_LRE, plans, strict=True)]

    def _place(self, counts_RE: Int64Array, plan: LayerPlan) -> Placed:
        flow = flow_by_locality(counts_RE, plan, self.topology.node_of_rank, ("node",))
        network, shape = self.costs.network, self.shape
        fetch_RR = shard_traffic(plan, shape.expert_bytes)
        return_RR = shard_traffic(plan, shape.num_params * shape.grad_bytes)
        ones_R = np.ones(self.num_ranks)
        return Placed(
            flow=flow,
            fetch_R=network.exchange_s(fetch_RR) * ones_R,
            return_R=network.exchange_s(return_RR) * ones_R,
            num_replicas=plan.num_replicas,
            copied_bytes=int(fetch_RR.sum()) + int(return_RR.sum()),
            far_bytes=far_bytes(fetch_RR + return_RR, network),
        )

    def replica_bytes(self, num_layers: int) -> int:
        """Two layers' restored experts: the one that computes and the next."""
        capacity = self.costs.job.shape.num_experts // self.num_ranks + self.num_slots
        return min(num_layers, 2) * capacity * self.slot_bytes()

# SPDX-License-Identifier: Apache-2.0

"""Systems that rearrange experts now and then, with their state: SmartMoE, FlexMoE, EPLB.

Their planners know no shared adapters, so a layer keeps its placement where the model says that a
new one would be slower.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from megatron_fssdp.planning.cost import FORWARD_BACKWARD, TOKEN_TRIPS
from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.predict import SlidingMean
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.simulation.baselines import eplb, flexmoe, smartmoe
from megatron_fssdp.simulation.baselines.common import Baseline, with_replicas
from megatron_fssdp.simulation.copies import broadcast_s, replicated
from megatron_fssdp.simulation.flow import flow_by_locality
from megatron_fssdp.simulation.layers import Traits
from megatron_fssdp.simulation.systems.common import Placed, System


def across_nodes(plan: Baseline) -> Baseline:
    """Let a planner that knows no nodes meet ranks node by node in turn.

    It takes equally loaded ranks in their order, and would put all hot experts on the first node.
    """

    def planned(
        load_E: Int64Array, owner_E: Int64Array, topology: Topology, num_slots: int
    ) -> LayerPlan:
        node_R = topology.node_R
        # The how-manieth rank of its node each is; then by node.
        place_R = np.array([(node_R[:rank] == node).sum() for rank, node in enumerate(node_R)])
        order_R = np.lexsort((node_R, place_R))
        new_of_R = np.argsort(order_R)
        found = plan(load_E, new_of_R[owner_E], topology, num_slots)
        return LayerPlan(order_R[found.owner_E], found.slot_expert_RS[new_of_R])

    return planned


class _Rearranged(System):
    """A placement that stays until the next rearrangement."""

    baseline: ClassVar[Baseline]

    def set_up(self) -> None:
        """Start with even owners and no replicas."""
        self.predictor = SlidingMean(5)
        self.plans: list[LayerPlan] = [
            with_replicas(owner_E, [], self.num_ranks, self.num_slots) for owner_E in self.owner_LE
        ]

    @property
    def traits(self) -> Traits:
        """Replicas live on; their gradients are summed like data-parallel ones."""
        return Traits(returns="attention")

    def before_iteration(self) -> tuple[int, float]:
        """Rearrange: once when loads are known, then every so many iterations.

        The first time is within `simulate.WARM_UP`: what a job pays once is nobody's iteration.
        """
        interval = self.options.rearrange_interval
        load_LE = self.predictor.predict()
        if load_LE is None or not interval or self.iteration % interval != min(4, interval - 1):
            return 0, 0.0
        new = [
            self._rearrange(load_E, plan) for load_E, plan in zip(load_LE, self.plans, strict=True)
        ]
        moved, move_s = self.state_moves_s(self.plans, new)
        self.plans = new
        return moved, move_s

    def _rearrange(self, load_E: Int64Array, plan: LayerPlan) -> LayerPlan:
        """Return the baseline's placement, if the layer is modelled to be faster with it."""
        new = type(self).baseline(load_E, plan.owner_E, self.topology, self.num_slots)
        counts_RE = np.tile(load_E // self.num_ranks, (self.num_ranks, 1))
        seconds = []
        for each in (plan, new):
            flow = flow_by_locality(counts_RE, each, self.topology.node_of_rank, ())
            tokens_s, experts_s = self.costs.tokens_s(flow), self.costs.experts_R(flow).max()
            seconds.append(TOKEN_TRIPS * tokens_s + FORWARD_BACKWARD * experts_s)
        return new if seconds[1] < seconds[0] else plan

    def place(self, group: int, counts_LRE: Int64Array) -> list[Placed]:
        """Spread an expert's tokens over its instances evenly."""
        return [
            self._place(counts_RE, plan)
            for counts_RE, plan in zip(counts_LRE, self.plans, strict=True)
        ]

    def observe(self, counts_GLRE: Int64Array) -> None:
        """Remember the loads, all groups together: they share the placement."""
        self.predictor.update(counts_GLRE.sum(axis=(0, 2)) // self.num_groups)
        self.iteration += 1

    def _place(self, counts_RE: Int64Array, plan: LayerPlan) -> Placed:
        flow = flow_by_locality(counts_RE, plan, self.topology.node_of_rank, ())
        members, network, shape = replicated(plan), self.costs.network, self.shape
        # An all-reduce: there and back.
        gradient_bytes = 2 * shape.num_params * shape.grad_bytes
        crossed = sum(len(set(network.node_R[ranks].tolist())) - 1 for _, ranks in members)
        return Placed(
            flow=flow,
            fetch_R=np.zeros(self.num_ranks),
            return_R=broadcast_s(members, network, gradient_bytes),
            num_replicas=plan.num_replicas,
            copied_bytes=plan.num_replicas * gradient_bytes,
            far_bytes=crossed * gradient_bytes,
        )

    def replica_bytes(self, num_layers: int) -> int:
        """Slots of all layers, with optimizer state: each replica is trained.

        The state is cut over the expert-data-parallel ranks as that of owned experts.
        """
        return num_layers * self.num_slots * self.slot_bytes(has_optimizer=True)

    def move_bytes(self) -> int:
        """Two experts' state, if experts move."""
        return self.two_states() if self.options.rearrange_interval else 0


class SmartMoE(_Rearranged):
    """Experts change places, nobody is copied (ATC 2023)."""

    name: ClassVar[str] = "smartmoe"
    title: ClassVar[str] = "SmartMoE"
    notes: ClassVar[tuple[str, ...]] = (
        "experts are assigned anew, as many to each rank, every 25 iterations; parameters and "
        "optimizer state move on the critical path; its offline choice of parallelism is left out",
    )
    baseline: ClassVar[Baseline] = staticmethod(across_nodes(smartmoe.plan))

    @property
    def num_slots(self) -> int:
        """None."""
        return 0


class FlexMoE(_Rearranged):
    """Experts expand, shrink and migrate (SIGMOD 2023)."""

    name: ClassVar[str] = "flexmoe"
    title: ClassVar[str] = "FlexMoE"
    notes: ClassVar[tuple[str, ...]] = (
        "placed every 25 iterations until the fullest rank has 1.2 times the mean; a new vExpert "
        "brings parameters and optimizer state on the critical path and keeps them; tokens are "
        "split evenly; gradients are all-reduced under the attention's backward",
    )
    baseline: ClassVar[Baseline] = staticmethod(across_nodes(flexmoe.plan))


class Eplb(_Rearranged):
    """DeepSeek's EPLB, hierarchical, brought to training."""

    name: ClassVar[str] = "eplb"
    title: ClassVar[str] = "EPLB"
    notes: ClassVar[tuple[str, ...]] = (
        "EPLB is made for inference: here its hierarchical policy places experts every 25 "
        "iterations, replicas are trained like data-parallel copies, and state moves on the "
        "critical path",
    )
    baseline: ClassVar[Baseline] = staticmethod(eplb.plan_hierarchical)

# SPDX-License-Identifier: Apache-2.0

"""Systems that plan after the gate, from the true counts: FasterMoE and MoonEP."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.quotas import balance
from megatron_fssdp.planning.schedule import Schedule, traffic
from megatron_fssdp.simulation.baselines import fastermoe, moonep
from megatron_fssdp.simulation.copies import broadcast_s, far_bytes, replicated, scheduled_s
from megatron_fssdp.simulation.flow import flow_by_locality, flow_of_quotas
from megatron_fssdp.simulation.layers import Traits
from megatron_fssdp.simulation.systems.common import Placed, System


class FasterMoE(System):
    """Hot experts to every rank of the group, in every micro-batch (PPoPP 2022)."""

    name: ClassVar[str] = "fastermoe"
    title: ClassVar[str] = "FasterMoE"
    notes: ClassVar[tuple[str, ...]] = (
        "shadows as many experts as a rank has slots (the original: no limit), if the modelled "
        "layer gets faster with the broadcast counted; the broadcast shares the links with the "
        "dispatch, the gradients' reduce is waited for; its chunked exchange is not modelled; it "
        "is charged the time of a fused planner, 110 us a layer and micro-batch",
    )

    @property
    def traits(self) -> Traits:
        """Broadcast when the gate has decided; gradients in the open."""
        return Traits(
            fetch="gate",
            fetches_each=True,
            returns="open",
            returns_each=True,
            planning_s=self.options.rival_planning_s,
        )

    def place(self, group: int, counts_LRE: Int64Array) -> list[Placed]:
        """Shadow while the layer gets faster."""
        return [
            self._place(counts, owner_E)
            for counts, owner_E in zip(counts_LRE, self.owner_LE, strict=True)
        ]

    def _place(self, counts_RE: Int64Array, owner_E: Int64Array) -> Placed:
        load_E = counts_RE.sum(axis=0)
        best, best_s = None, np.inf
        for slots in range(self.num_slots + 1):
            plan = fastermoe.plan(load_E, owner_E, self.topology, slots)
            flow = flow_by_locality(counts_RE, plan, self.topology.node_of_rank, ("rank",))
            members, network = replicated(plan), self.costs.network
            fetch_R = broadcast_s(members, network, self.shape.expert_bytes)
            gradient_bytes = self.shape.num_params * self.shape.grad_bytes
            return_R = broadcast_s(members, network, gradient_bytes)
            seconds = 3 * self.costs.experts_R(flow).max() + 4 * self.costs.tokens_s(flow)
            seconds += fetch_R.max() + return_R.max()
            if seconds >= best_s:
                break
            copied = plan.num_replicas * self.shape.replica_bytes
            best_s = seconds
            best = Placed(
                flow=flow,
                fetch_R=fetch_R,
                return_R=return_R,
                num_replicas=plan.num_replicas,
                copied_bytes=copied,
                far_bytes=len(members) * (self.topology.num_nodes - 1) * self.shape.replica_bytes,
            )
        assert best is not None
        return best

    def replica_bytes(self, num_layers: int) -> int:
        """Shadows live from a layer's forward to its backward, which reduces gradients at once."""
        weights = num_layers * self.num_slots * self.slot_bytes(has_grads=False)
        gradients = self.slot_bytes() - self.slot_bytes(has_grads=False)
        return weights + (self.num_slots * gradients if num_layers else 0)


class MoonEP(System):
    """Exact balance from the true counts, weights pushed after the gate (MoonshotAI)."""

    name: ClassVar[str] = "moonep"
    title: ClassVar[str] = "MoonEP-style"
    notes: ClassVar[tuple[str, ...]] = (
        "E / R spare slots, shared by all layers; weights are pushed after the gate, share the "
        "links with the dispatch, and are pushed again for the backward, one layer ahead, as the "
        "plan is known; gradients return under the attention's backward. The original runs inside "
        "one NVLink domain; here its pushes may cross nodes; counts, plan and routes take what "
        "fused planners publish, 110 us a layer and micro-batch",
    )

    @property
    def traits(self) -> Traits:
        """Pushed when the gate has decided, and again in the backward."""
        return Traits(
            fetch="gate",
            fetches_each=True,
            fetches_again=True,
            returns="attention",
            returns_each=True,
            planning_s=self.options.rival_planning_s,
        )

    @property
    def num_slots(self) -> int:
        """E / R."""
        return self.costs.job.shape.num_experts // self.num_ranks

    def place(self, group: int, counts_LRE: Int64Array) -> list[Placed]:
        """Pair ranks, then split exactly."""
        return [
            self._place(counts, owner_E)
            for counts, owner_E in zip(counts_LRE, self.owner_LE, strict=True)
        ]

    def _place(self, counts_RE: Int64Array, owner_E: Int64Array) -> Placed:
        nodes, shape, network = self.topology.node_of_rank, self.shape, self.costs.network
        plan = moonep.plan(counts_RE.sum(axis=0), owner_E, self.topology, self.num_slots)
        flow = flow_of_quotas(counts_RE, balance(counts_RE, plan, nodes), plan, nodes)
        if not plan.num_replicas:
            return self.placed(flow)
        schedule = Schedule.flat(plan)
        copies_RR = traffic(schedule.copies, self.num_ranks) * shape.replica_bytes
        return Placed(
            flow=flow,
            fetch_R=scheduled_s(schedule, network, shape.expert_bytes),
            return_R=scheduled_s(schedule, network, shape.num_params * shape.grad_bytes),
            num_replicas=plan.num_replicas,
            copied_bytes=int(copies_RR.sum()),
            far_bytes=far_bytes(copies_RR, network),
        )

    def replica_bytes(self, num_layers: int) -> int:
        """One arena for all layers."""
        return self.num_slots * self.slot_bytes() if num_layers else 0

# SPDX-License-Identifier: Apache-2.0

"""Plain EP, and this project with the planner that trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from megatron_fssdp.planning.cost import Copying, mean_rows, with_paying_spares
from megatron_fssdp.planning.moves import moves_s, plan_moves
from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.planner import plan_each
from megatron_fssdp.planning.predict import make_predictor
from megatron_fssdp.planning.quotas import balance
from megatron_fssdp.planning.schedule import traffic
from megatron_fssdp.planning.sharding import shard_for_replicas
from megatron_fssdp.planning.worth import saved_by_owners
from megatron_fssdp.simulation.copies import cheapest_scheduled_s, far_bytes
from megatron_fssdp.simulation.flow import flow_of_quotas
from megatron_fssdp.simulation.layers import Traits
from megatron_fssdp.simulation.systems.common import Placed, System
from megatron_fssdp.simulation.systems.planned import Planned
from megatron_fssdp.simulation.systems.planning import fssdp_note, fssdp_planning


class PlainEp(System):
    """Megatron's expert parallelism."""

    title: ClassVar[str] = "EP (Megatron)"


class Fssdp(Planned):
    """This project: predicted loads, `planner.plan_layers`, quotas of the true counts."""

    name: ClassVar[str] = "fssdp"
    title: ClassVar[str] = "FSSDP (this project)"
    notes: ClassVar[tuple[str, ...]] = (
        "plans, quotas and schedules come from the code that trains; replicas that are kept "
        "are fetched once an iteration under the attention, and their gradients return with the "
        "last micro-batch",
    )

    def set_up(self) -> None:
        """Start with even owners and no loads seen."""
        super().set_up()
        self.settings = replace(
            self.options.settings, num_replica_slots=self.options.num_replica_slots
        )
        kind, window = self.options.predictor, self.options.prediction_window
        self.predictors = [make_predictor(kind, window) for _ in range(self.num_groups)]

    @property
    def traits(self) -> Traits:
        """Fetched before the attention, returned under its backward."""
        again = self.rematerializes
        return Traits(
            fetch="attention",
            fetches_each=again,
            fetches_again=again,
            returns="attention",
            returns_each=again,
            planning_s=self.planning[0],
        )

    @property
    def planning(self) -> tuple[float, str]:
        """Seconds of quotas in a layer and micro-batch, and where they are from."""
        return fssdp_planning(self.costs.cluster, self.options.planning_s, self.num_ranks)

    @property
    def rematerializes(self) -> bool:
        """Whether replicas are fetched for each forward and each backward."""
        return self.options.rematerializes

    @property
    def copying(self) -> Copying:
        """How often replicas travel."""
        micro = self.costs.job.layout.num_microbatches
        return Copying(num_microbatches=micro, rematerializes=self.rematerializes)

    def _plan(self, predicted_LE: Int64Array | None) -> Sequence[LayerPlan]:
        """Spares where they pay, as `integration.owners` has it."""
        if predicted_LE is None:
            return super()._plan(None)
        args = self.settings, self.topology, self.shape, self.rate, self.copying
        settings = [
            with_paying_spares(*args, mean_rows(load_E, self.num_ranks)) for load_E in predicted_LE
        ]
        return plan_each(predicted_LE, self.owner_LE, self.topology, settings)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What quotas take."""
        return (fssdp_note(*self.planning),)

    def _look(self, index: int, load_LE: Int64Array) -> tuple[int, float]:
        """Swap owners where the cost model says that it pays, as `integration.resharding` does."""
        load_LE, owner_LE = load_LE // self.num_groups, self.homes[index].owner_LE
        new_LE = shard_for_replicas(load_LE, owner_LE, self.num_ranks)
        homes, rounds = plan_moves(self.homes[index], new_LE)
        if not rounds:
            return 0, 0.0
        saved_s = saved_by_owners(
            load_LE,
            owner_LE,
            new_LE,
            self.topology,
            self.settings,
            self.shape,
            self.rate,
            self.copying,
        )
        move_s = moves_s(rounds, self.topology, self.costs.state_bytes)
        if saved_s * self.options.reshard_interval <= move_s:
            return 0, 0.0
        self.homes[index] = homes
        return sum(map(len, rounds)), move_s

    def replica_bytes(self, num_layers: int) -> int:
        """Slots of all layers; re-materialized, of one."""
        if self.rematerializes:
            return self.num_slots * self.slot_bytes() if num_layers else 0
        return self.kept_bytes(num_layers, self.num_slots)

    def _place(self, counts_RE: Int64Array, plan: LayerPlan) -> Placed:
        nodes = self.topology.node_of_rank
        quota_EI = balance(counts_RE, plan, nodes, self.settings.balance_tolerance)
        flow = flow_of_quotas(counts_RE, quota_EI, plan, nodes)
        if not plan.num_replicas:
            return self.placed(flow)
        shape, network = self.shape, self.costs.network
        gradient_bytes = shape.num_params * shape.grad_bytes
        fetch_R, return_R, schedule = cheapest_scheduled_s(
            plan, network, shape.expert_bytes, gradient_bytes
        )
        copies_RR = traffic(schedule.copies, self.num_ranks) * shape.replica_bytes
        return Placed(
            flow=flow,
            fetch_R=fetch_R,
            return_R=return_R,
            num_replicas=plan.num_replicas,
            copied_bytes=int(copies_RR.sum()),
            far_bytes=far_bytes(copies_RR, network),
        )


class FssdpRematerialized(Fssdp):
    """The same with --fssdp-rematerialize."""

    name: ClassVar[str] = "fssdp-rm"
    title: ClassVar[str] = "FSSDP, re-materialized"
    notes: ClassVar[tuple[str, ...]] = (
        "replicas are dropped after each forward and fetched again for the backward, in every "
        "micro-batch; one layer's slots serve all layers",
    )

    @property
    def rematerializes(self) -> bool:
        """Whatever the options say."""
        return True

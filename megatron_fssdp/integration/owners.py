# SPDX-License-Identifier: Apache-2.0

"""Who owns which expert, for all MoE layers of the process, and when that changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.integration import agreement
from megatron_fssdp.integration.mover import Mover
from megatron_fssdp.integration.ownership import LayerHomes, Ownership
from megatron_fssdp.integration.resharding import Reshard, Resharder
from megatron_fssdp.integration.state import LayerState
from megatron_fssdp.planning.cost import Copying, mean_rows, with_paying_spares
from megatron_fssdp.planning.moves import Homes, plan_moves
from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.planner import PlanSettings, plan_each, plan_layers
from megatron_fssdp.planning.sharding import shard_evenly


class Owners:
    """The owners of the layers' experts.

    Attributes:
        resharders: by the ownership that each decides for.
        listeners: called with the iteration and the outcome of each look at the owners.
    """

    def __init__(
        self, config: FSSDPConfig, layers: list[LayerState], num_microbatches: Callable[[], int]
    ) -> None:
        """Keep the owners of `layers`, a list that grows; an iteration has so many micro-batches.

        How many is asked for anew with each look at the owners.
        """
        self._config, self._layers, self._num_microbatches = config, layers, num_microbatches
        self._iteration = 0
        self.resharders: dict[Ownership, Resharder] = {}
        self.listeners: list[Callable[[int, Reshard], None]] = []

    def own(self, index: int, homes: LayerHomes, resize: Callable[[int], None]) -> None:
        """Tell where a layer's experts live: in its own module, evenly.

        Args:
            index: of the layer.
            homes: the parameters.
            resize: called with the layer's new number of slots when its owners change.
        """
        layer = self._layers[index]
        layer.resize = resize
        even = Homes.even(1, layer.num_experts, layer.group.size())
        layer.ownership = Ownership(even, layer.group.rank(), [homes])

    def share_homes(self, indices: Sequence[int]) -> Ownership:
        """Let the experts of several layers, of equal shapes, live in each other's homes."""
        layers = [self._layers[index] for index in indices]
        first = layers[0]
        homes = [each for layer in layers if layer.ownership for each in layer.ownership.layers]
        even = Homes.even(len(layers), first.num_experts, first.group.size())
        shared = Ownership(even, first.group.rank(), homes)
        for position, layer in enumerate(layers):
            layer.ownership, layer.position = shared, position
        return shared

    def home(self, index: int) -> tuple[Ownership, int]:
        """Return where a layer's experts live, and which of those layers it is."""
        layer = self._layers[index]
        assert layer.ownership is not None, "a layer that is only watched owns nothing"
        return layer.ownership, layer.position

    def num_slots(self, index: int) -> int:
        """Return S of a layer: the most experts that a rank owns and its replica slots."""
        layer = self._layers[index]
        most_owned = layer.num_experts // layer.group.size()
        if layer.ownership is not None:
            most_owned = layer.ownership.most_owned(layer.position)
        return most_owned + self._config.fssdp_num_replica_slots

    def of_layer(self, index: int) -> Int64Array:
        """Return the (1, E) int64 owners of a layer's experts."""
        layer = self._layers[index]
        if layer.ownership is None:
            return shard_evenly(1, layer.num_experts, layer.group.size())
        return layer.ownership.owner_LE[layer.position : layer.position + 1]

    def plan_alike(
        self, load_LE: Int64Array | None, indices: Sequence[int], num_microbatches: int
    ) -> Sequence[LayerPlan]:
        """Plan layers of equal shape for (L, E) loads, each as if alone; None: not known."""
        layer, config = self._layers[indices[0]], self._config
        owner_LE = np.concatenate([self.of_layer(index) for index in indices])
        topology = layer.shared.topology
        if load_LE is None:
            return plan_layers(None, owner_LE, topology, plan_settings(config)).layers
        settings = [settings_for(load_E, layer, config, num_microbatches) for load_E in load_LE]
        return plan_each(load_LE, owner_LE, topology, settings)

    def enable_moves(
        self,
        optimizer: Any,
        replica_group: dist.ProcessGroup,
        sync_parameters: Callable[[], None] | None,
    ) -> None:
        """Let experts change owners as `--fssdp-reshard-interval` says. Collective over the world.

        Args:
            optimizer: Megatron's.
            replica_group: the expert-data-parallel group.
            sync_parameters: completes a gather of parameters that is under way; None: none is.
        """
        rows, everyone = [], []
        if self._layers:
            layer = self._layers[0]
            blocks = agreement.peers_of(layer.tp_ep_group, replica_group)
            # All shards of an expert move together, each among the ranks that hold its like.
            everyone = sorted(rank for block in blocks for rank in block)
            shard = layer.tp_ep_group.rank() % layer.num_shards
            rows = [block[shard :: layer.num_shards] for block in blocks]
        made = agreement.make_groups([everyone] if everyone else [], "FSSDP_MOVES")
        for layer in self._layers:
            ownership = layer.ownership
            if ownership is None or layer.shape is None or ownership in self.resharders:
                continue
            group = made[tuple(everyone)]
            self.resharders[ownership] = Resharder(
                Mover(ownership, optimizer, group, rows, replica_group.rank()),
                plan_settings(self._config),
                layer.shared.topology,
                layer.shape,
                layer.shared.rate,
                self._config.fssdp_sharding,
                self._config.reshard_interval,
                sync_parameters,
                lambda: copying_of(self._config, self._num_microbatches()),
            )
        if self._config.fssdp_owners is not None:
            self._start_from(self._config.fssdp_owners)

    def _start_from(self, path: str) -> None:
        """Let the first forward begin with the owners of a file."""
        wanted = agreement.read_owners(path)
        for ownership in self._ownerships():
            start_LE = ownership.owner_LE.copy()
            for layer in self._sharing(ownership):
                owners = wanted.get(layer.number)
                if owners is None:
                    continue
                if len(owners) != layer.num_experts:
                    raise ValueError(
                        f"--fssdp-owners {path} has {len(owners)} owners for {layer.name}, which "
                        f"has {layer.num_experts} experts; name the owner of each."
                    )
                start_LE[layer.position] = owners
            try:
                plan_moves(ownership.homes, start_LE)
            except ValueError as error:
                raise ValueError(f"--fssdp-owners {path}: {error}") from error
            ownership.start_LE, ownership.is_due = start_LE, True

    def state_dict(self) -> list[dict[str, Any]]:
        """Return who lives where, for each set of layers that share homes."""
        return [
            {
                "num_ranks": ownership.homes.num_ranks,
                "owner": torch.tensor(ownership.homes.owner_LE),
                "home": torch.tensor(ownership.homes.home_LE),
            }
            for ownership in self._ownerships()
        ]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> str:
        """Let experts live where a state says, before parameters are loaded.

        Returns:
            Half a sentence on what was taken; all or nothing.
        """
        ownerships = self._ownerships()
        saved = [(int(each["num_ranks"]), tuple(each["owner"].shape)) for each in state]
        ours = [(each.homes.num_ranks, each.owner_LE.shape) for each in ownerships]
        if saved != ours:
            return "experts start even: the checkpoint's owners are of another layout"
        for ownership, each in zip(ownerships, state, strict=True):
            ownership.homes = Homes(each["owner"].numpy(), each["home"].numpy())
            ownership.start_LE = None
            self._resize(ownership)
        return "experts are where they were"

    def _ownerships(self) -> list[Ownership]:
        """Each once, in the order of its first layer."""
        found = [layer.ownership for layer in self._layers if layer.ownership is not None]
        return list(dict.fromkeys(found))

    def _sharing(self, ownership: Ownership) -> list[LayerState]:
        """The layers whose experts it holds, in their order there."""
        return [layer for layer in self._layers if layer.ownership is ownership]

    def _resize(self, ownership: Ownership) -> None:
        """Fit layers to new owners; their plans are old.

        The next forward makes a plan for the loads that are predicted.
        """
        for index, layer in enumerate(self._layers):
            if layer.ownership is not ownership:
                continue
            layer.step = None
            if layer.materializer is not None:
                layer.materializer.pool.forget()
            if layer.resize is not None:
                layer.resize(self.num_slots(index))

    def end_iteration(self, iteration: int) -> None:
        """Let the next forward look at the owners, if it is time."""
        self._iteration = iteration
        interval = self._config.reshard_interval
        if interval and iteration % interval == 0:
            for ownership in self.resharders:
                ownership.is_due = True

    def before_forward(self, index: int) -> None:
        """Re-shard if it is time, before the first forward of an iteration touches an expert."""
        ownership = self._layers[index].ownership
        if ownership is None or not ownership.is_due or is_in_backward():
            return
        ownership.is_due = False
        if ownership.start_LE is not None:
            start_LE, ownership.start_LE = ownership.start_LE, None
            self.after_reshard(ownership, self.resharders[ownership].move(start_LE))
            return
        loads = [layer.predicted_E for layer in self._sharing(ownership)]
        resharder = self.resharders.get(ownership)
        if resharder is None or any(load is None for load in loads):
            return
        result = resharder.look(np.stack([load for load in loads if load is not None]))
        self.after_reshard(ownership, result)

    def after_reshard(self, ownership: Ownership, result: Reshard) -> None:
        """Take note of a look at the owners."""
        for tell in self.listeners:
            tell(self._iteration, result)
        if result.is_done:
            self._resize(ownership)


def plan_settings(config: FSSDPConfig) -> PlanSettings:
    """Return the planner's settings that the flags ask for."""
    return PlanSettings(
        num_replica_slots=config.fssdp_num_replica_slots,
        overlap_degree=config.overlap_degree,
        algorithm=config.fssdp_planner,
        balance_tolerance=config.fssdp_balance_tolerance,
    )


def copying_of(config: FSSDPConfig, num_microbatches: int) -> Copying:
    """Return how often replicas travel in an iteration."""
    return Copying(
        num_microbatches=num_microbatches,
        rematerializes=config.fssdp_rematerialize,
        returns_each=config.fssdp_calibration,
    )


def settings_for(
    load_E: Int64Array, layer: LayerState, config: FSSDPConfig, num_microbatches: int
) -> PlanSettings:
    """Return the settings to plan a layer's predicted loads with: spares where they pay.

    All ranks of the group get the same: they have the same loads, sizes, links and rates.

    Args:
        load_E: (E,) int64.
        layer: its sizes and its group's links.
        config: the `--fssdp-*` settings.
        num_microbatches: how many an iteration has.
    """
    settings = plan_settings(config)
    if layer.shape is None:
        return settings
    return with_paying_spares(
        settings,
        layer.shared.topology,
        layer.shape,
        layer.shared.rate,
        copying_of(config, num_microbatches),
        mean_rows(load_E, layer.group.size()),
    )


def is_in_backward() -> bool:
    """Whether this is a replay of activation recompute."""
    return torch._C._current_graph_task_id() != -1

# SPDX-License-Identifier: Apache-2.0

"""Live re-sharding: when experts change owners, and whether it pays (section 4.3 of the paper)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_fssdp.integration.agreement import all_agree
from megatron_fssdp.integration.mover import HomeLayout, Mover, find_problem
from megatron_fssdp.planning.cost import ComputeRate, Copying, LayerShape
from megatron_fssdp.planning.moves import moved_bytes, moves_s, plan_moves
from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.planner import PlanSettings
from megatron_fssdp.planning.sharding import shard_by_load, shard_for_replicas
from megatron_fssdp.planning.topology import Topology
from megatron_fssdp.planning.worth import saved_by_owners


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """One look at who owns which expert.

    Attributes:
        num_moves: experts that the better owners would move.
        num_bytes: of their parameters and optimizer state.
        saved_s: modelled seconds that an iteration gets shorter.
        move_s: modelled seconds of the move.
        is_done: whether they moved.
        problem: why they could not.
        took_s: seconds that the move took.
    """

    num_moves: int
    num_bytes: int
    saved_s: float
    move_s: float
    is_done: bool = False
    problem: str | None = None
    took_s: float = 0.0

    def describe(self, iteration: int, interval: int) -> str:
        """One line for the log."""
        what = f" fssdp re-sharding before iteration {iteration}: {self.num_moves} experts, "
        what += (
            f"{self.num_bytes / 1e6:.1f} MB; saves {1e3 * self.saved_s * interval:.1f} ms until "
        )
        what += f"the next look, moving takes {1e3 * self.move_s:.1f} ms: "
        if self.problem is not None:
            return what + f"cannot move: {self.problem}; owners stay"
        return what + (f"moved in {1e3 * self.took_s:.1f} ms" if self.is_done else "not worth it")


@dataclass(eq=False)
class Resharder:
    """Decides for one ownership, and moves its experts.

    Attributes:
        mover: moves them.
        settings: of the planner.
        topology, shape, rate: what the cost model needs.
        sharding: "swaps" or "load", see `--fssdp-sharding`.
        interval: iterations that a decision counts for.
        sync_parameters: completes a parameter gather that is under way, before parameters move.
        copying: how often replicas travel in an iteration, now.
    """

    mover: Mover
    settings: PlanSettings
    topology: Topology
    shape: LayerShape
    rate: ComputeRate
    sharding: str
    interval: int
    sync_parameters: Callable[[], None] | None = None
    copying: Callable[[], Copying] = Copying

    def look(self, load_LE: Int64Array) -> Reshard:
        """Move experts if better owners pay. Collective over all ranks that share the ownership.

        Args:
            load_LE: (L, E) int64, recent tokens of each expert in a micro-batch of this rank's
                expert-parallel group and its expert-tensor-parallel peers; of the groups, which
                compute side by side, the mean counts.
        """
        device = self.mover.ownership.weights(0)[0].device
        loads = torch.from_numpy(np.ascontiguousarray(load_LE)).to(device)
        dist.all_reduce(loads, group=self.mover.group)
        mean_LE = loads.cpu().numpy() // self.mover.group.size()
        owner_LE = self.mover.ownership.owner_LE
        new_LE = self._agree(self._choose(mean_LE, owner_LE), device)
        saved_s = saved_by_owners(
            mean_LE,
            owner_LE,
            new_LE,
            self.topology,
            self.settings,
            self.shape,
            self.rate,
            self.copying(),
        )
        return self.move(new_LE, saved_s)

    def move(self, new_owner_LE: Int64Array, saved_s: float = float("inf")) -> Reshard:
        """Give experts other owners, if `saved_s` an iteration pays for it. Collective."""
        ownership = self.mover.ownership
        homes, rounds = plan_moves(ownership.homes, new_owner_LE)
        layouts = self.mover.layouts()
        bytes_of_rows = _expert_bytes(self.mover, layouts)
        result: dict[str, Any] = {
            "num_moves": sum(map(len, rounds)),
            "num_bytes": moved_bytes(rounds, sum(bytes_of_rows)),
            "saved_s": saved_s,
            # Replicas send side by side, each over links of its own.
            "move_s": moves_s(rounds, self.topology, max(bytes_of_rows)),
        }
        problem = find_problem(layouts)
        if problem is not None or not rounds:
            return Reshard(**result, problem=problem)
        if not all_agree(saved_s * self.interval > result["move_s"], self.mover.group):
            return Reshard(**result)
        begin = time.perf_counter()
        if self.sync_parameters is not None:
            self.sync_parameters()
        self.mover.move(rounds, layouts)
        ownership.homes = homes
        return Reshard(**result, is_done=True, took_s=time.perf_counter() - begin)

    def _choose(self, load_LE: Int64Array, owner_LE: Int64Array) -> Int64Array:
        num_ranks = self.topology.num_ranks
        if self.sharding == "swaps":
            return shard_for_replicas(load_LE, owner_LE, num_ranks)
        hot = self.settings.overlap_degree
        slots = self.settings.num_replica_slots
        return shard_by_load(load_LE, owner_LE, self.topology, slots if hot is None else hot)

    def _agree(self, new_owner_LE: Int64Array, device: torch.device) -> Int64Array:
        """Take the first rank's choice: groups may lie on nodes in other ways."""
        choice = torch.from_numpy(np.ascontiguousarray(new_owner_LE)).to(device)
        dist.broadcast(choice, dist.get_process_group_ranks(self.mover.group)[0], self.mover.group)
        agreed: Int64Array = choice.cpu().numpy()
        return agreed


def _expert_bytes(mover: Mover, layouts: dict[int, list[HomeLayout]]) -> list[int]:
    """Bytes of one expert on each replica: parameters, and its part of the fp32 optimizer state."""
    weight_bytes = sum(weight.nbytes for weight in mover.ownership.weights(0))
    homes = [layouts[row[0]][0] for row in mover.rank_at]
    return [
        weight_bytes
        + sum(
            4 * len(names) * (stop - start)
            for (start, stop), names in zip(home.spans, home.names, strict=True)
        )
        for home in homes
    ]

# SPDX-License-Identifier: Apache-2.0

"""Our materialization: replicas where they save most, for all layers of a model.

Ways are tried for each layer, those that send least first, until one balances it. Node by node
(`by_node`): replicas keep tokens on their node or cost no network. Then replicas that level all
ranks, each where it keeps most tokens (`NodeSlots.fill`), or the fewest that do (`gain`); spares
(`spares`) fill the slots that are left, as far as they pay. A layer that owners alone balance gets
none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from megatron_fssdp.planning.arrays import sum_by_owner
from megatron_fssdp.planning.by_node import fill_by_node, place_by_node
from megatron_fssdp.planning.estimate import estimate
from megatron_fssdp.planning.gain import place_codes
from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.spares import place_spares
from megatron_fssdp.planning.topology import Topology

# With spares, replicas first aim at this tolerance if the wanted one is looser: slots are filled
# anyway, and ranks that end nearer the mean stand more drift.
SPARE_TOLERANCE = 0.003
# A later way sends more: it must leave the fullest rank emptier by one part in this many.
LESS_TRAFFIC_WORTH = 100
# With several slots a rank, a layer is far from balanced if its fullest rank is too full by more
# than one part in this many. For others spares make the fewest replicas good enough, which cost
# least time where few layers need them.
FAR = 16
# On more nodes than this a node has few tokens for any expert, and the ways in between take one
# step or more for each node.
MANY_NODES = 16
# Targets tried when the wanted one cannot be met.
TARGET_TRIES = 6
# Steps of spreading with which plans are judged, and how near to the target they must be for it.
ROUNDS = ((8, 1e9), (16, 1.06))


def materialize_by_gain(
    load_LE: Int64Array,
    owner_LE: Int64Array,
    topology: Topology,
    num_replica_slots: int,
    tolerance: float = 0.01,
    spare_tokens: int | None = None,
    spare_slots: int | None = None,
) -> Int64Array:
    """Add the fewest replicas that balance each layer; then, if asked, spares against drift.

    Args:
        load_LE: (L, E) int64, the predicted tokens of each expert.
        owner_LE: (L, E) int64.
        topology: the ranks and their nodes.
        num_replica_slots: replicas that fit on a rank, per layer.
        tolerance: a layer is balanced when its fullest rank has at most (1 + tolerance) times the
            mean tokens; a balanced layer gets no replica at all.
        spare_tokens: slots that are left get experts with at least this many tokens per instance;
            None: no spares.
        spare_slots: slots of a rank that may be filled with spares; None: all.

    Returns:
        (N, 3) int64: layer, expert and rank of each replica; of each rank, those that balance the
        predicted loads first.
    """
    num_ranks = topology.num_ranks
    load_LR = sum_by_owner(load_LE, owner_LE, num_ranks)
    balanced_L = _targets(load_LR, tolerance)
    open_L = np.flatnonzero(load_LR.max(axis=1) > balanced_L)
    if not len(open_L) or not num_replica_slots:
        return np.zeros((0, 3), dtype=np.int64)
    job = _Job(
        load_LE[open_L],
        owner_LE[open_L],
        topology,
        num_replica_slots,
        balanced_L[open_L],
        num_replica_slots if spare_slots is None else min(spare_slots, num_replica_slots),
    )
    if spare_tokens is None or not job.spare_slots:
        replicas_N3 = _fewest(job, job.balanced_L)[0]
    else:
        wanted_L = _targets(load_LR, min(tolerance, SPARE_TOLERANCE))[open_L]
        replicas_N3 = _by_traffic(job, wanted_L, spare_tokens)
    replicas_N3[:, 0] = open_L[replicas_N3[:, 0]]
    return replicas_N3


@dataclass(frozen=True)
class _Job:
    """Layers that need replicas, and what they may get.

    Attributes:
        load_LE, owner_LE: (L, E) int64.
        topology: the ranks and their nodes.
        num_slots: replicas that fit on a rank.
        balanced_L: (L,) int64, tokens of the fullest rank that are good enough.
        spare_slots: slots of a rank that may be filled, whether a layer needs it or not.
    """

    load_LE: Int64Array
    owner_LE: Int64Array
    topology: Topology
    num_slots: int
    balanced_L: Int64Array
    spare_slots: int

    def part(self, layers: Int64Array) -> _Job:
        """Some of the layers."""
        return replace(
            self,
            load_LE=self.load_LE[layers],
            owner_LE=self.owner_LE[layers],
            balanced_L=self.balanced_L[layers],
        )


def _targets(load_LR: Int64Array, tolerance: float) -> Int64Array:
    """(L,) tokens that a rank may have: the tolerance above the mean, at least whole tokens."""
    total_L, num_ranks = load_LR.sum(axis=1), load_LR.shape[1]
    allowed_L = (total_L / num_ranks * (1 + tolerance)).astype(np.int64)
    target_L: Int64Array = np.maximum(allowed_L, -(-total_L // num_ranks))
    return target_L


def _fewest(job: _Job, wanted_L: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Place the fewest replicas. Returns (N, 3) replicas and (L, R) tokens of each rank."""
    num_ranks = job.topology.num_ranks
    load_LR = sum_by_owner(job.load_LE, job.owner_LE, num_ranks)
    placed_LR = load_LR.copy()
    owned_LR = _owned_lists(job.owner_LE, num_ranks)
    codes: list[int] = []
    count_L: list[int] = []
    for layer, (load_E, load_R, wanted) in enumerate(
        zip(job.load_LE.tolist(), load_LR.tolist(), wanted_L.tolist(), strict=True)
    ):
        free_R = [job.num_slots] * num_ranks
        placed, placed_R = _materialize_layer(load_E, owned_LR[layer], load_R, free_R, wanted)
        codes += placed
        count_L.append(len(placed))
        placed_LR[layer] = placed_R
    layer_N = np.repeat(np.arange(len(count_L)), count_L)
    expert_N, rank_N = np.divmod(np.array(codes, dtype=np.int64), num_ranks)
    return np.stack([layer_N, expert_N, rank_N], axis=1), placed_LR


def _with_spares(
    job: _Job, replicas_N3: Int64Array, placed_LR: Int64Array, spare_tokens: int
) -> Int64Array:
    """Fill the slots that are left with spares."""
    num_layers, num_ranks = placed_LR.shape
    load_LR = sum_by_owner(job.load_LE, job.owner_LE, num_ranks)
    used = np.bincount(
        replicas_N3[:, 0] * num_ranks + replicas_N3[:, 2], minlength=num_layers * num_ranks
    )
    free_LR = np.maximum(job.spare_slots - used.reshape(num_layers, num_ranks), 0)
    import_LR = np.maximum(placed_LR - load_LR, 0)
    spares_N3 = place_spares(
        job.load_LE,
        job.owner_LE,
        replicas_N3,
        free_LR,
        import_LR,
        job.topology.node_R,
        spare_tokens,
    )
    return np.concatenate([replicas_N3, spares_N3])


def _judge(job: _Job, replicas_N3: Int64Array, reached_L: Int64Array) -> Int64Array:
    """(L,) tokens of the fullest rank: what is reached, or what quotas could."""
    reached_L = reached_L.copy()
    for rounds, reach in ROUNDS:
        layers = np.flatnonzero((reached_L > job.balanced_L) & (reached_L < job.balanced_L * reach))
        if not len(layers):
            return reached_L
        part = job.part(layers)
        fullest_L = estimate(
            part.load_LE,
            part.owner_LE,
            _only(replicas_N3, layers, len(reached_L)),
            job.topology.num_ranks,
            rounds,
        )
        reached_L[layers] = np.minimum(reached_L[layers], fullest_L)
    return reached_L


def _only(replicas_N3: Int64Array, layers: Int64Array, num_layers: int) -> Int64Array:
    """The replicas of some layers, which are numbered anew."""
    number_L = np.full(num_layers, -1)
    number_L[layers] = np.arange(len(layers))
    rows_N3 = replicas_N3[number_L[replicas_N3[:, 0]] >= 0]
    rows_N3[:, 0] = number_L[rows_N3[:, 0]]
    return rows_N3


def _by_traffic(job: _Job, wanted_L: Int64Array, spare_tokens: int) -> Int64Array:
    """Try the `WAYS`, one after the other, until a layer is balanced. Returns (N, 3) replicas."""
    num_layers, is_one_node = len(wanted_L), job.topology.num_nodes == 1
    # Ways that fill slots fill those that spares may; the last has all for what a layer needs.
    narrow = replace(job, num_slots=job.spare_slots)
    is_narrow = job.spare_slots < job.num_slots
    enough_L = wanted_L if is_one_node and not is_narrow else job.balanced_L
    reached_L = np.full(num_layers, 1 << 62)
    found_N3 = np.zeros((0, 3), dtype=np.int64)
    for way, is_for_far in WAYS:
        layers = np.flatnonzero(reached_L > enough_L)
        if is_for_far and job.topology.num_nodes > MANY_NODES:
            continue
        if is_for_far and narrow.num_slots > 1:
            layers = np.flatnonzero(reached_L > enough_L + enough_L // FAR)
        if not len(layers):
            continue
        part = (job if way is _fewest_and_spares else narrow).part(layers)
        rows_N3, fullest_L = way(part, wanted_L[layers], spare_tokens)
        before_L = reached_L[layers]
        least_L = np.where(is_one_node, 1, before_L // LESS_TRAFFIC_WORTH)
        is_better_L = np.zeros(num_layers, dtype=bool)
        is_better_L[layers] = fullest_L <= before_L - least_L
        reached_L[is_better_L] = fullest_L[is_better_L[layers]]
        rows_N3[:, 0] = layers[rows_N3[:, 0]]
        found_N3 = np.concatenate(
            [found_N3[~is_better_L[found_N3[:, 0]]], rows_N3[is_better_L[rows_N3[:, 0]]]]
        )
    return found_N3


def _keep_near(
    job: _Job, wanted_L: Int64Array, spare_tokens: int, levels_last: bool = False
) -> tuple[Int64Array, Int64Array]:
    """Node by node: first what keeps most tokens near."""
    args = job.load_LE, job.owner_LE, job.topology, job.num_slots, spare_tokens, wanted_L
    slots = place_by_node(*args, levels_last)
    replicas_N3 = slots.replicas()
    reached_L = slots.load_by_rank(job.topology.num_ranks).max(axis=1)
    return replicas_N3, _judge(job, replicas_N3, reached_L)


def _level_too(job: _Job, wanted_L: Int64Array, spare_tokens: int) -> tuple[Int64Array, Int64Array]:
    """Node by node, with half of the slots for levelling."""
    return _keep_near(job, wanted_L, spare_tokens, levels_last=True)


def _fill(job: _Job, wanted_L: Int64Array, spare_tokens: int) -> tuple[Int64Array, Int64Array]:
    """Level all ranks, each replica where it keeps most tokens near; then spares."""
    args = job.load_LE, job.owner_LE, job.topology, job.num_slots, spare_tokens, wanted_L
    slots = fill_by_node(*args)
    placed_LR = slots.load_by_rank(job.topology.num_ranks)
    fullest_L = _judge(job, slots.replicas(), placed_LR.max(axis=1))
    return _with_spares(job, slots.replicas(), placed_LR, spare_tokens), fullest_L


def _fewest_and_spares(
    job: _Job, wanted_L: Int64Array, spare_tokens: int
) -> tuple[Int64Array, Int64Array]:
    """The fewest replicas that balance; then spares."""
    replicas_N3, placed_LR = _fewest(job, wanted_L)
    return _with_spares(job, replicas_N3, placed_LR, spare_tokens), placed_LR.max(axis=1)


# Each takes layers, the tokens of the fullest rank that are wanted, and those that a replica must
# keep on a node that lacked the expert; and returns (N, 3) replicas and the (L,) tokens reached.
Way = Callable[[_Job, Int64Array, int], tuple[Int64Array, Int64Array]]
# The ways in their order, and whether they are only for layers that are far from balanced.
WAYS: tuple[tuple[Way, bool], ...] = (
    (_keep_near, False),
    (_level_too, True),
    (_fill, True),
    (_fewest_and_spares, False),
)


def _owned_lists(owner_LE: Int64Array, num_ranks: int) -> list[list[list[int]]]:
    """List each rank's experts, layer by layer; most layers share one sharding and one list."""
    made: dict[bytes, list[list[int]]] = {}
    result = []
    for owner_E in owner_LE:
        key = owner_E.tobytes()
        if key not in made:
            owned_R: list[list[int]] = [[] for _ in range(num_ranks)]
            for expert, rank in enumerate(owner_E.tolist()):
                owned_R[rank].append(expert)
            made[key] = owned_R
        result.append(made[key])
    return result


def _materialize_layer(
    load_E: list[int],
    owned_R: list[list[int]],
    load_R: list[int],
    free_R: list[int],
    wanted: int,
) -> tuple[list[int], list[int]]:
    """Place one layer's replicas; relax the target as far as slots demand.

    Returns:
        The replicas as `gain.place_codes` has them, and the tokens of each rank with them.
    """
    fullest = max(load_R)
    low, high, target = wanted, fullest, wanted
    best: tuple[int, list[int], list[int]] = (fullest, [], load_R)
    for _ in range(TARGET_TRIES):
        placed_R = load_R.copy()
        placed = place_codes(load_E.copy(), owned_R, placed_R, target, free_R.copy())
        reached = max(placed_R)
        is_met = reached <= target
        if reached < best[0]:
            best = (reached, placed, placed_R)
        if is_met:
            high = target
        else:
            low = target
        if (is_met and target == wanted) or high - low <= 1:
            break
        target = (low + high) // 2
    return best[1], best[2]

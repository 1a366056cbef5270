# SPDX-License-Identifier: Apache-2.0

"""Quotas on the device: `planning.quotas` in torch operations, equal to the token.

Static shapes and no host synchronisation: nothing here asks the device for a number. Whole-number
sums only, so the order in which a device adds does not matter, and every rank gets the same.

Torch operations of one call (tests count them): about 1,250 for a plan with spares, which has
two forests, and 600 for one whose replicas form a single forest; up to 1,700 with many replica
slots a rank, 8 where nothing is replicated. All are small; a CUDA graph, or
`planning.quotas` on the host where its synchronisation does not matter, may take less time.

Shape letters as in `planning.quota_tables`: R ranks, M nodes, E experts, I instances of an expert,
X replicated experts, N their instances in one list, V ranks and replicated experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_fssdp.planning.equalize import NEAR_SPREADS, PASSES, SPREADS
from megatron_fssdp.planning.plan import LayerPlan
from megatron_fssdp.planning.quota_tables import Forest, QuotaTables, quota_tables
from megatron_fssdp.planning.quotas import good_enough_shift

# Turns of every forest: this equals `balance(..., turns=DEVICE_TURNS)`.
DEVICE_TURNS = 2

_floor_divide = partial(torch.div, rounding_mode="floor")


@dataclass(frozen=True, eq=False)
class DeviceForest:
    """A `quota_tables.Forest` on the device."""

    preorder_R: Tensor
    from_N: Tensor
    to_N: Tensor
    sign_N: Tensor
    parent_V: Tensor
    parent_edge_V: Tensor
    doublings: int


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """A layer's plan as device tables; build one per plan and layer.

    Those attributes that `QuotaTables` has too are the same, on the device. All int64.

    Attributes:
        num_experts: E.
        num_instances: I.
        host: the tables on the host.
        flat_N: (N,) index of each instance in a flattened (E, I) tensor.
        place_N: (N,) where each instance is in `by_node_N`.
        number_N, number_R, number_V: 0, 1, 2, ...
    """

    num_experts: int
    num_instances: int
    host: QuotaTables
    expert_X: Tensor
    single_E: Tensor
    owner_E: Tensor
    rank_N: Tensor
    expert_N: Tensor
    column_N: Tensor
    first_X: Tensor
    count_X: Tensor
    busy_N: Tensor
    by_node_R: Tensor
    node_R: Tensor
    node_N: Tensor
    peers_N: Tensor
    by_node_N: Tensor
    group_start_N: Tensor
    near_N: Tensor
    near_group_K: Tensor
    near_first_G: Tensor
    near_busy_K: Tensor
    flat_N: Tensor
    place_N: Tensor
    number_N: Tensor
    number_R: Tensor
    number_V: Tensor
    forests: tuple[DeviceForest, ...]

    @classmethod
    def build(
        cls, plan: LayerPlan, node_of_rank: Sequence[int], device: torch.device | str
    ) -> DeviceTables:
        """Copy a plan's tables to the device, without waiting for the copies."""
        host = quota_tables(plan, node_of_rank)
        send = partial(send_array, device=torch.device(device))
        num_slots, width = len(host.rank_N), plan.instance_rank_EI.shape[1]
        place_N = np.empty(num_slots, dtype=np.int64)
        place_N[host.by_node_N] = np.arange(num_slots)
        derived = {
            "flat_N": host.expert_X[host.expert_N] * width + host.column_N,
            "place_N": place_N,
            "number_N": np.arange(num_slots),
            "number_R": np.arange(plan.num_ranks),
            "number_V": np.arange(plan.num_ranks + len(host.expert_X)),
        }
        return cls(
            num_experts=plan.num_experts,
            num_instances=width,
            host=host,
            forests=tuple(
                DeviceForest(**_send_arrays(f, DeviceForest, send)) for f in host.forests
            ),
            **_send_arrays(host, cls, send),
            **{name: send(array) for name, array in derived.items()},
        )


def split_tokens(
    counts_RE: Tensor, tables: DeviceTables, source: int, tolerance: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Split one rank's tokens over the instances so that the fullest rank has the fewest.

    Args:
        counts_RE: (R, E) int64 on the device, tokens of each source rank for each expert.
        tables: of the layer's plan.
        source: the rank whose tokens to split.
        tolerance: as in `planning.quotas.balance`.

    Returns:
        (E, I) int64, how many of `source`'s tokens go to each instance, as
        `planning.quotas.split_source` says; and (R,) int64, the tokens that each rank computes.
    """
    load_E = counts_RE.sum(dim=0)
    base_R = _sum_at(load_E * tables.single_E, tables.owner_E, tables.host.num_ranks)
    split_EI = counts_RE.new_zeros(tables.num_experts, tables.num_instances)
    split_EI[:, 0] = counts_RE[source]
    if not tables.forests:
        return split_EI, base_R
    counts_RX = counts_RE[:, tables.expert_X]
    quota_N = _balance(counts_RX, load_E, base_R, tables, tolerance)
    split_N = _split(counts_RX, quota_N, tables, source)
    split_EI = split_EI.reshape(-1).scatter(0, tables.flat_N, split_N)
    return split_EI.reshape(-1, tables.num_instances), _loads(quota_N, base_R, tables)


def _balance(
    counts_RX: Tensor, load_E: Tensor, base_R: Tensor, tables: DeviceTables, tolerance: float
) -> Tensor:
    """(N,) quotas; `planning.quotas.balance` without the padding."""
    num_ranks, load_X = tables.host.num_ranks, load_E[tables.expert_X]
    total = load_E.sum()
    mean = _floor_divide(total + num_ranks - 1, num_ranks)
    allowed = (tolerance * total.double() / num_ranks).long()
    num_replicas = len(tables.number_N) - len(tables.first_X)
    good_enough = (mean >> good_enough_shift(num_ranks)).clamp(max=num_replicas)
    goal = mean + torch.maximum(good_enough, allowed)
    # Shares of the own node's tokens, the rest evenly.
    counts_MX = _sum_rows(counts_RX, tables)
    share_N = _floor_divide(counts_MX[tables.node_N, tables.expert_N], tables.peers_N)
    rest_X = load_X - _by_expert(share_N, tables)
    mean_X = _floor_divide(rest_X, tables.count_X)
    left_X = rest_X - mean_X * tables.count_X
    is_extra_N = tables.column_N < left_X[tables.expert_N]
    quota_N = share_N + mean_X[tables.expert_N] + is_extra_N

    if len(tables.forests) > 1:
        quota_N = _spread_near(quota_N, base_R, tables)
        quota_N = _spread(quota_N, base_R, tables)
    load_R = _loads(quota_N, base_R, tables)
    for _ in range(DEVICE_TURNS):
        for forest in tables.forests:
            is_done = (load_R.amax() <= goal) | _is_settled(quota_N, load_R, tables)
            levelled_N = _level_forest(quota_N, base_R, load_R, tables, forest)
            quota_N = torch.where(is_done, quota_N, levelled_N)
            load_R = _loads(quota_N, base_R, tables)

    quota_N = _localize(quota_N, share_N, load_R, tables, goal)
    load_R = _loads(quota_N, base_R, tables)
    owners_load_R = _sum_at(load_E, tables.owner_E, num_ranks)
    owners_N = torch.where(tables.column_N == 0, load_X[tables.expert_N], 0)
    return torch.where(load_R.amax() <= owners_load_R.amax(), quota_N, owners_N)


def _spread_near(quota_N: Tensor, base_R: Tensor, tables: DeviceTables) -> Tensor:
    """`planning.equalize.spread_near`."""
    near_N, group_K, first_G = tables.near_N, tables.near_group_K, tables.near_first_G
    if not len(near_N):
        return quota_N
    rank_K, busy_K = tables.rank_N[near_N], tables.near_busy_K * 2
    near_K, num_groups = quota_N[near_N], len(first_G)
    rest_R = _loads(quota_N, base_R, tables).index_add(0, rank_K, near_K, alpha=-1)
    total_G = _sum_at(near_K, group_K, num_groups)
    count_G = tables.peers_N[near_N][first_G]
    for _ in range(NEAR_SPREADS):
        load_K = rest_R.index_add(0, rank_K, near_K)[rank_K]
        mean_G = _floor_divide(_sum_at(load_K, group_K, num_groups), count_G)
        step_K = _floor_divide((mean_G[group_K] - load_K) * 3, busy_K)
        moved_K = (near_K + step_K).clamp(min=0).index_fill(0, first_G, 0)
        head_G = total_G - _sum_at(moved_K, group_K, num_groups)
        moved_K = moved_K.index_copy(0, first_G, head_G)
        near_K = torch.where((head_G >= 0)[group_K], moved_K, near_K)
    return quota_N.index_copy(0, near_N, near_K)


def _spread(quota_N: Tensor, base_R: Tensor, tables: DeviceTables) -> Tensor:
    """`planning.equalize.spread`."""
    is_owner_N = tables.column_N == 0
    total_X = _by_expert(quota_N, tables)
    for _ in range(SPREADS):
        load_N = _loads(quota_N, base_R, tables)[tables.rank_N]
        mean_X = _floor_divide(_by_expert(load_N, tables), tables.count_X)
        step_N = _floor_divide((mean_X[tables.expert_N] - load_N) * 3, tables.busy_N * 2)
        moved_N = torch.where(is_owner_N, 0, (quota_N + step_N).clamp(min=0))
        owner_N = (total_X - _by_expert(moved_N, tables))[tables.expert_N]
        moved_N = torch.where(is_owner_N, owner_N, moved_N)
        quota_N = torch.where(owner_N >= 0, moved_N, quota_N)
    return quota_N


def _is_settled(quota_N: Tensor, load_R: Tensor, tables: DeviceTables) -> Tensor:
    load_N = load_R[tables.rank_N]
    low_X = _extreme(load_N, tables, "amin")
    return ~((quota_N > 0) & (load_N > low_X[tables.expert_N] + 1)).any()


def _level_forest(
    quota_N: Tensor, base_R: Tensor, load_R: Tensor, tables: DeviceTables, forest: DeviceForest
) -> Tensor:
    """`planning.equalize.level_forest`; passes after the last needed one change nothing."""
    load_N = load_R[tables.rank_N]
    top_X = _extreme(torch.where(quota_N > 0, load_N, -1), tables, "amax")
    cut_N = (quota_N == 0) & (load_N >= top_X[tables.expert_N])
    is_level = torch.zeros((), dtype=torch.bool, device=quota_N.device)
    result_N = quota_N
    for number in range(PASSES):
        if number:
            quota_N = _give_up_cut(quota_N, cut_N, tables)
            load_R = _loads(quota_N, base_R, tables)
        root_V = _roots(cut_N, tables, forest)
        need_R = _needs(root_V[forest.preorder_R], load_R[forest.preorder_R], tables)
        below = torch.nn.functional.pad(need_R.cumsum(0), (1, 0))
        moved_N = forest.sign_N * (below[forest.to_N] - below[forest.from_N])
        short_N = quota_N + moved_N < 0
        root_N = root_V[tables.rank_N]
        short_V = _sum_at(short_N.long(), root_N, len(tables.number_V)) > 0
        candidate_N = torch.where(short_V[root_N], quota_N, quota_N + moved_N)
        result_N = torch.where(is_level, result_N, candidate_N)
        is_level = is_level | ~short_N.any()
        cut_N = cut_N | short_N
    return result_N


def _roots(cut_N: Tensor, tables: DeviceTables, forest: DeviceForest) -> Tensor:
    is_cut_V = torch.nn.functional.pad(cut_N, (0, 1), value=True)[forest.parent_edge_V]
    root_V = torch.where(is_cut_V, tables.number_V, forest.parent_V)
    for _ in range(forest.doublings):
        root_V = root_V[root_V]
    return root_V


def _needs(tree_R: Tensor, load_R: Tensor, tables: DeviceTables) -> Tensor:
    num_trees = len(tables.number_V)
    tree, by_tree = torch.sort(tree_R, stable=True)
    size_T = _sum_at(torch.ones_like(tree_R), tree_R, num_trees)
    total_T = _sum_at(load_R, tree_R, num_trees)
    position = tables.number_R - (size_T.cumsum(0) - size_T)[tree]
    mean = _floor_divide(total_T[tree], size_T[tree])
    rest = total_T[tree] - mean * size_T[tree]
    return torch.empty_like(load_R).scatter(0, by_tree, mean + (position < rest)) - load_R


def _give_up_cut(quota_N: Tensor, cut_N: Tensor, tables: DeviceTables) -> Tensor:
    number_N = torch.where(cut_N, len(tables.number_N) - 1, tables.number_N)
    heir_X = _extreme(number_N, tables, "amin")
    given_X = _by_expert(torch.where(cut_N, quota_N, 0), tables)
    return torch.where(cut_N, 0, quota_N).index_add(0, heir_X, given_X)


def _localize(
    quota_N: Tensor, share_N: Tensor, load_R: Tensor, tables: DeviceTables, goal: Tensor
) -> Tensor:
    """`planning.localize.localize`."""
    room_R = torch.maximum(goal, load_R.amax()) - load_R
    lack_N = (share_N - quota_N).clamp(min=0)
    takers_R = _sum_at((lack_N > 0).long(), tables.rank_N, tables.host.num_ranks)
    part_R = _floor_divide(room_R, takers_R.clamp(min=1))
    take_N = torch.minimum(lack_N, part_R[tables.rank_N])
    give_N = (quota_N - share_N).clamp(min=0)
    moved_X = torch.minimum(_by_expert(take_N, tables), _by_expert(give_N, tables))
    return quota_N + _first(take_N, moved_X, tables) - _first(give_N, moved_X, tables)


def _first(amount_N: Tensor, total_X: Tensor, tables: DeviceTables) -> Tensor:
    run_N = amount_N.cumsum(0) - amount_N
    before_N = run_N - run_N[tables.first_X][tables.expert_N]
    return torch.minimum((total_X[tables.expert_N] - before_N).clamp(min=0), amount_N)


def _split(counts_RX: Tensor, quota_N: Tensor, tables: DeviceTables, source: int) -> Tensor:
    """(N,) tokens of `source`; `planning.quotas.split_source` without the padding."""
    host = tables.host
    rank_N, expert_N, node_N = tables.rank_N, tables.expert_N, tables.node_N
    node = int(host.node_R[source])
    at = int(np.flatnonzero(host.by_node_R == source)[0])

    local_N = torch.minimum(counts_RX[rank_N, expert_N], quota_N)
    counts_RX = counts_RX.index_put((rank_N, expert_N), -local_N, accumulate=True)
    room_N = quota_N - local_N
    split_N = torch.where(rank_N == source, local_N, 0)

    sent_MX = _sum_rows(counts_RX, tables)
    before = tables.by_node_R[int(host.node_start[node]) : at]
    before_X, mine_X = counts_RX[before].sum(dim=0), counts_RX[source]
    run_N = torch.nn.functional.pad(room_N[tables.by_node_N].cumsum(0), (1, 0))
    offset_N = run_N[tables.place_N] - run_N[tables.group_start_N]
    room_MX = torch.zeros_like(sent_MX).index_put((node_N, expert_N), room_N, accumulate=True)
    near_N = _overlap(before_X[expert_N], mine_X[expert_N], offset_N, room_N)
    split_N = split_N + torch.where(node_N == node, near_N, 0)
    room_N = room_N - _overlap(0, sent_MX[node_N, expert_N], offset_N, room_N)

    far_MX = (sent_MX - room_MX).clamp(min=0)
    before_far_X = far_MX[:node].sum(dim=0) + (before_X - room_MX[node]).clamp(min=0)
    far_X = mine_X - _overlap(before_X, mine_X, 0, room_MX[node])
    run_N = room_N.cumsum(0) - room_N
    offset_N = run_N - run_N[tables.first_X][expert_N]
    return split_N + _overlap(before_far_X[expert_N], far_X[expert_N], offset_N, room_N)


def _overlap(
    start_a: Tensor | int, length_a: Tensor, start_b: Tensor | int, length_b: Tensor
) -> Tensor:
    end = torch.minimum(start_a + length_a, start_b + length_b)
    start = start_a - start_b
    # max(start_a, start_b), where either may be the number 0.
    later = torch.as_tensor(start).clamp(min=0) + start_b
    return (end - later).clamp(min=0)


def _loads(quota_N: Tensor, base_R: Tensor, tables: DeviceTables) -> Tensor:
    return base_R.index_add(0, tables.rank_N, quota_N)


def _by_expert(value_N: Tensor, tables: DeviceTables) -> Tensor:
    return _sum_at(value_N, tables.expert_N, len(tables.first_X))


def _sum_rows(counts_RX: Tensor, tables: DeviceTables) -> Tensor:
    num_nodes = len(tables.host.node_start)
    counts_MX = counts_RX.new_zeros(num_nodes, counts_RX.shape[1])
    return counts_MX.index_add(0, tables.node_R, counts_RX)


def _sum_at(value: Tensor, index: Tensor, size: int) -> Tensor:
    return value.new_zeros(size).index_add(0, index, value)


def _extreme(value_N: Tensor, tables: DeviceTables, reduce: str) -> Tensor:
    start_X = value_N.new_zeros(len(tables.first_X))
    return start_X.scatter_reduce(0, tables.expert_N, value_N, reduce, include_self=False)


def send_array(array: Any, device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for it."""
    # A copy: tables are read-only, and a pinned one is what makes the transfer asynchronous.
    host = torch.tensor(array)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def _send_arrays(
    host: Forest | QuotaTables, target: type, send: Callable[[Any], Tensor]
) -> dict[str, Any]:
    """Fields that both dataclasses have: arrays are sent, numbers are kept."""
    shared = {field.name for field in fields(host)} & {field.name for field in fields(target)}
    values = {name: getattr(host, name) for name in shared - {"forests"}}
    return {
        name: send(value) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }

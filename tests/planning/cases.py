"""Random placements and loads that the planning tests share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from megatron_fssdp.planning.plan import Int64Array, LayerPlan, build_slots


def make_plan(
    owner_E: list[int], replicas: list[tuple[int, int]], num_ranks: int, num_slots: int
) -> LayerPlan:
    """Build one layer's plan from owners and (expert, rank) replicas."""
    rows = np.array([(0, expert, rank) for expert, rank in replicas], dtype=np.int64)
    owner_LE = np.array([owner_E], dtype=np.int64)
    slots_LRS = build_slots(owner_LE, rows.reshape(-1, 3), num_ranks, num_slots)
    return LayerPlan(owner_LE[0], slots_LRS[0])


def random_plan(
    rng: np.random.Generator, num_experts: int, num_ranks: int, num_slots: int
) -> LayerPlan:
    """Random owners (any number a rank) and random replicas in up to `num_slots` slots."""
    owner_E = rng.integers(0, num_ranks, num_experts).tolist()
    replicas = []
    for rank in range(num_ranks):
        others = [e for e in range(num_experts) if owner_E[e] != rank]
        rng.shuffle(others)
        replicas += [(e, rank) for e in others[: rng.integers(0, num_slots + 1)]]
    return make_plan(owner_E, replicas, num_ranks, num_slots)


def random_counts(rng: np.random.Generator, num_ranks: int, num_experts: int) -> Int64Array:
    """(R, E) int64: skewed, with zeros, sometimes few tokens, sometimes 2^31 on one expert."""
    share_E = rng.dirichlet(np.full(num_experts, rng.choice([0.1, 0.5, 5.0])))
    tokens = int(rng.choice([0, 3, 50, 5000, 65536]))
    counts_RE = rng.multinomial(tokens, share_E, size=num_ranks).astype(np.int64)
    counts_RE[rng.random(num_ranks) < 0.2] = 0
    if rng.random() < 0.1:
        counts_RE[0, rng.integers(num_experts)] = 2**31
    return counts_RE


seeds = st.integers(0, 2**32 - 1)

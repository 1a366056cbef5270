"""Made-up results for tests of what shows them."""

from __future__ import annotations

import numpy as np

from megatron_fssdp.simulation.result import Result, SystemResult, TimelineEvent

NUM_ITERATIONS, NUM_LAYERS, NUM_RANKS = 12, 4, 8


def make_events(num_ranks: int = 3, num_layers: int = NUM_LAYERS) -> tuple[TimelineEvent, ...]:
    """Layers in a row on each rank, rank 1 the slowest; copies under the attention."""
    events = []
    for rank in range(num_ranks):
        at = 0.0
        for layer in range(num_layers):
            experts = 0.03 if rank == 1 else 0.01
            for name, stream, start, took in (
                ("attention", "compute", 0.0, 0.01),
                ("spAG", "copies", 0.0, 0.008),
                ("dispatch", "tokens", 0.01, 0.002),
                ("experts", "compute", 0.012, experts),
                ("wait", "compute", 0.012 + experts, 0.03 - experts),
                ("combine", "tokens", 0.042, 0.002),
            ):
                events.append(
                    TimelineEvent(
                        name=name, rank=rank, stream=stream, start_s=at + start, duration_s=took,
                        layer=layer, micro_batch=0,
                    )
                )  # fmt: skip
            at += 0.044
    return tuple(events)


def make_system(name: str, title: str, straggling_s: float, factor: float) -> SystemResult:
    """A system whose every iteration takes 1 s and the straggling."""
    whole_I = np.ones(NUM_ITERATIONS)
    loads_LR = np.full((NUM_LAYERS, NUM_RANKS), 100.0)
    loads_LR[:, 1] = 100 * factor
    return SystemResult(
        name=name,
        title=title,
        iteration_s=whole_I * (1 + straggling_s),
        straggler_IL=np.full((NUM_ITERATIONS, NUM_LAYERS), factor),
        loads_LR=loads_LR,
        exposed_s=whole_I * 0.1,
        parts_s={
            "attention": whole_I * 0.4, "experts": whole_I * 0.5, "tokens": whole_I * 0.1,
            "straggling": whole_I * straggling_s,
        },
        replicas_I=np.full(NUM_ITERATIONS, 6),
        copied_bytes_I=np.full(NUM_ITERATIONS, 250_000_000),
        moved_I=np.zeros(NUM_ITERATIONS, dtype=np.int64),
        memory_bytes={
            "expert parameters": np.array([20_000_000_000]),
            "activations": (1e9 * np.linspace(5, 5 * factor, NUM_RANKS)).astype(np.int64),
        },
        timelines={3: make_events()} if name in ("ep", "fssdp") else {},
        notes=(f"{title} is <made up> & simple",),
    )  # fmt: skip


def make_result() -> Result:
    """EP at 1.8 s, another system at 1.3 s, FSSDP at 1.02 s an iteration."""
    systems = (
        make_system("ep", "Plain EP", 0.8, 2.5),
        make_system("laer", "LAER-MoE", 0.3, 1.4),
        make_system("fssdp", "FSSDP (this project)", 0.02, 1.01),
    )
    return Result(
        source="simulated",
        model="a <model> & more",
        cluster="h100_dgx",
        trace="runs/ep",
        num_ranks=64,
        num_nodes=8,
        iterations=np.arange(NUM_ITERATIONS),
        layers=np.arange(2, 2 + NUM_LAYERS),
        owner_straggler_IL=systems[0].straggler_IL,
        owner_loads_LR=systems[0].loads_LR,
        systems=systems,
        layout={"pp": 8, "ep": 8},
        notes=("loads were spread",),
    )

# SPDX-License-Identifier: Apache-2.0

"""Re-sharding: what new owners bring (simulated, figure 15 of the paper), what a move costs.

    python benchmarks/resharding.py [--iterations 200] [--part simulated|measured] [--json FILE]

Simulated: this project's planner and cost model, no GPU. GPT-MoE-S of the paper (12 layers, E 64,
top-2, d_model 768, FFN 1536, not gated) on its clusters, 4 nodes x 8 ranks, drifting Zipf loads;
and the loads recorded from our own training (4 layers, E 16, 4 ranks, here as 2 nodes x 2, 90
iterations over and over, tokens x 4). The paper says neither batch nor loads. So it is assumed:

- a rank has 8,192 tokens (4 sequences) in an iteration, one micro-batch;
- what is not MoE is attention: its products at the cluster file's rate. No embedding, output
  layer, optimizer or dense gradients: they would draw all speed-ups nearer to 1;
- replicas: 2 slots a rank, planned from the mean of 5 iterations, and no limit t: the paper's t is
  0 here (a copy between nodes takes longer than attention's forward). What attention's time does
  not hide is paid. Algorithm 2 leaves as many hot experts to replicas as a rank has slots, as our
  `Resharder` does: 0 without replicas;
- a move is paid in full: 18 bytes a parameter, the rounds of `plan_moves` one by one. (We move
  14: gradients stay. See below.) The first look is at the first iteration that counts;
- experts move if the model says that this pays until the next look, as in our `Resharder`. The
  paper moves whenever the plan changed: "both, always moved".

Nothing is tuned per row. Every 17th iteration is priced (17 shares no factor with an interval, so
owners of all ages count), every look and move is. Published: speed-ups over EP by interval, and
both phases against each alone. These do not fit together in any model where experts stay if moving
does not pay: 3.32 times as fast as sharding alone and 1.42 times as fast as EP would make sharding
alone 2.3 times slower than EP.

Measured: k experts of each of 4 gloo ranks move on to the next rank (a ring: every rank sends one
and receives one in a round), in two network namespaces over an unlimited cable, by the real
`Resharder` from a Megatron model with bf16 parameters and fp32 Adam state: 14 bytes a parameter.
Beside it: the plan's bytes, what the kernel counted on the cable, and bare gloo messages of the
same sizes, always from the same two buffers; the two take turns. Extra memory is that of all
tensors made in the move and alive at once, on the worst rank, without what gloo itself may hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from two_nodes import link_bytes, run_two_nodes, why_not

from megatron_fssdp.planning.cost import (
    FORWARD_BACKWARD,
    ComputeRate,
    LayerShape,
    break_even_tokens,
    layer_cost,
    saved_s,
    schedule_s,
)
from megatron_fssdp.planning.moves import Homes, moves_s, plan_moves
from megatron_fssdp.planning.plan import Int64Array
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.predict import SlidingMean
from megatron_fssdp.planning.quotas import balance, rank_loads
from megatron_fssdp.planning.schedule import Schedule
from megatron_fssdp.planning.sharding import shard_by_load, shard_for_replicas
from megatron_fssdp.planning.topology import Topology, read_cluster
from megatron_fssdp.simulation.loads import training_series, zipf_series

ROOT = Path(__file__).parent.parent
CLUSTERS = ("v100_32g", "a100_hgx")
LAYERS, EXPERTS, RANKS, TOPK, TOKENS, SEQUENCE = 12, 64, 32, 2, 8192, 2048
SHAPE = LayerShape(hidden_size=768, ffn_size=1536, num_matrices=2)
STATE_BYTES = 18  # bf16 parameter, fp32 gradient, fp32 main parameter, two fp32 Adam moments
WARM_UP = 5  # the predictor's window
INTERVALS = (10, 25, 50, 100)
PRICED_EVERY = 17
PUBLISHED = {10: 1.36, 25: 1.41, 50: 1.34, 100: 1.42}
PUBLISHED_BOTH = {"sharding only": 3.32, "materialization only": 1.27}
Row = dict[str, Any]


@dataclass(frozen=True)
class System:
    """Who owns experts, and how many replicas a rank can hold.

    Attributes:
        name: for the table.
        sharding: "even" for ever, "load" (the paper's algorithm 2) or "swaps" (ours).
        num_slots: replica slots of a rank and layer.
        always: experts move whether or not that pays.
    """

    name: str
    sharding: str
    num_slots: int
    always: bool = False


SYSTEMS = (
    System("neither (EP)", "even", 0),
    System("sharding only", "load", 0),
    System("materialization only", "even", 2),
    System("both", "load", 2),
    System("both, always moved", "load", 2, always=True),
    System("both, our swaps", "swaps", 2),
)


@dataclass(frozen=True, eq=False)
class Case:
    """Loads on a cluster.

    Attributes:
        load: their name.
        cluster: its name.
        counts_TLRE: (T, L, R, E) int64 tokens.
        topology: the ranks, their nodes and links.
        rate: of a rank.
        shape: sizes of a layer.
        non_moe_s: forward time of what is not MoE, of a layer.
    """

    load: str
    cluster: str
    counts_TLRE: Int64Array
    topology: Topology
    rate: ComputeRate
    shape: LayerShape = SHAPE
    non_moe_s: float = 0.0

    def predictions(self) -> list[Int64Array]:
        """Return what a sliding mean expects of each iteration from `WARM_UP` on: (L, E) each."""
        predictor, found = SlidingMean(WARM_UP), []
        for counts_LRE in self.counts_TLRE:
            expected = predictor.predict()
            if expected is not None:
                found.append(expected)
            predictor.update(counts_LRE.sum(axis=1))
        return found[WARM_UP - 1 :]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Means over the iterations of a system.

    Attributes:
        iteration_s: modelled seconds of an iteration, moves included.
        moving_s: the part of it that moves take.
        balance: tokens of a layer's fullest rank over the mean.
        num_looks: how often owners were planned; `num_done` times experts moved.
        num_moves: experts that moved, in all.
    """

    iteration_s: float
    moving_s: float
    balance: float
    num_looks: int
    num_done: int
    num_moves: int


def attention_s(tokens: int, sequence: int, shape: LayerShape, rate: ComputeRate) -> float:
    """Forward seconds of attention: four products with weights, two of the sequence with itself."""
    flops = tokens * (8.0 * shape.hidden_size**2 + 4.0 * sequence * shape.hidden_size)
    return flops / rate.flops_per_s


def cases(num_iterations: int) -> list[Case]:
    """Return all cases."""
    length = WARM_UP + num_iterations
    loads: dict[str, Int64Array] = {}
    for exponent in (0.5, 1.0):
        layers = [
            zipf_series(EXPERTS, RANKS, exponent, length, seed=layer, topk=TOPK, tokens=TOKENS)
            for layer in range(LAYERS)
        ]
        loads[f"zipf {exponent}"] = np.stack(layers, axis=1)
    recorded = training_series(ROOT / "benchmarks" / "data" / "training_loads.npz")
    if recorded is not None:
        scale = TOKENS * TOPK // int(recorded[0, 0, 0].sum())
        loads["recorded"] = np.resize(recorded, (length, *recorded.shape[1:])) * scale
    found = []
    for load, counts_TLRE in loads.items():
        for cluster in CLUSTERS:
            values = read_cluster(ROOT / "configs" / "clusters" / f"{cluster}.yaml")
            num_ranks = counts_TLRE.shape[2]
            topology = Topology.from_mapping(values["topology"], num_ranks)
            if topology.num_nodes == 1:
                topology = replace(
                    topology, node_of_rank=Topology.uniform(num_ranks, 2).node_of_rank
                )
            rate = ComputeRate.from_mapping(values["compute"])
            non_moe_s = attention_s(TOKENS, SEQUENCE, SHAPE, rate)
            found.append(
                Case(load, cluster, counts_TLRE, topology, rate, non_moe_s=non_moe_s),
            )
    return found


def simulate(case: Case, system: System, interval: int) -> Outcome:
    """Price a system on a case; owners are looked at every `interval` iterations."""
    _, num_layers, num_ranks, num_experts = case.counts_TLRE.shape
    settings = PlanSettings(
        num_replica_slots=system.num_slots, spare_tokens=break_even_tokens(case.shape)
    )
    homes = Homes.even(num_layers, num_experts, num_ranks)
    priced, balances = [], []
    moving_s, num_looks, num_done, num_moves = 0.0, 0, 0, 0
    predictions = case.predictions()
    for iteration, load_LE in enumerate(predictions):
        if system.sharding != "even" and iteration % interval == 0:
            num_looks += 1
            new_homes, took_s, moved = _look(case, system, settings, load_LE, homes, interval)
            homes, moving_s, num_moves = new_homes, moving_s + took_s, num_moves + moved
            num_done += moved > 0
        if iteration % PRICED_EVERY == 0:
            counts_LRE = case.counts_TLRE[WARM_UP + iteration]
            seconds, fullest = _price(case, settings, load_LE, counts_LRE, homes.owner_LE)
            priced.append(seconds)
            balances.append(fullest)
    per_iteration_s = moving_s / len(predictions)
    return Outcome(
        iteration_s=statistics.mean(priced) + per_iteration_s,
        moving_s=per_iteration_s,
        balance=statistics.mean(balances),
        num_looks=num_looks,
        num_done=num_done,
        num_moves=num_moves,
    )


def _look(
    case: Case,
    system: System,
    settings: PlanSettings,
    load_LE: Int64Array,
    homes: Homes,
    interval: int,
) -> tuple[Homes, float, int]:
    """Return where experts live next, the seconds of the move, and how many moved."""
    if system.sharding == "swaps":
        owner_LE = shard_for_replicas(load_LE, homes.owner_LE, case.topology.num_ranks)
    else:
        owner_LE = shard_by_load(load_LE, homes.owner_LE, case.topology, system.num_slots)
    new_homes, rounds = plan_moves(homes, owner_LE)
    move_s = moves_s(rounds, case.topology, STATE_BYTES * case.shape.num_params)
    if not system.always:
        gain_s = _gain_s(case, settings, load_LE, homes.owner_LE, owner_LE)
        if gain_s * interval <= move_s:
            return homes, 0.0, 0
    return new_homes, move_s, sum(map(len, rounds))


def _gain_s(
    case: Case, settings: PlanSettings, load_LE: Int64Array, old_LE: Int64Array, new_LE: Int64Array
) -> float:
    """Seconds by which new owners shorten an iteration, as `Resharder` reckons before it moves.

    It counts the fullest rank and the copies, not how many tokens leave their node; `_price` does.
    So "both" can move and be slower for it.
    """
    topology, nodes = case.topology, case.topology.node_of_rank
    old, new = (plan_layers(load_LE, owner, topology, settings) for owner in (old_LE, new_LE))
    seconds = 0.0
    for load_E, before, after in zip(load_LE, old.layers, new.layers, strict=True):
        counts_RE = np.tile(load_E // topology.num_ranks, (topology.num_ranks, 1))
        quotas = [balance(counts_RE, plan, nodes) for plan in (before, after)]
        seconds += saved_s(quotas[0], before, quotas[1], after, topology, case.shape, case.rate)
        for plan, sign in ((before, 1), (after, -1)):
            copies = Schedule.tree(plan, nodes)
            seconds += sign * schedule_s(copies, topology, case.shape.replica_bytes)
    return seconds


def _price(
    case: Case,
    settings: PlanSettings,
    load_LE: Int64Array,
    counts_LRE: Int64Array,
    owner_LE: Int64Array,
) -> tuple[float, float]:
    """Return an iteration's seconds, and the fullest rank's tokens over the mean, of its layers."""
    plan = plan_layers(load_LE, owner_LE, case.topology, settings)
    seconds, fullest = 0.0, []
    for counts_RE, layer in zip(counts_LRE, plan.layers, strict=True):
        quota_EI = balance(counts_RE, layer, case.topology.node_of_rank)
        cost = layer_cost(
            counts_RE, quota_EI, layer, case.topology, case.shape, case.rate, case.non_moe_s
        )
        seconds += cost.total_s + FORWARD_BACKWARD * case.non_moe_s
        load_R = rank_loads(quota_EI, layer)
        fullest.append(float(load_R.max() / load_R.mean()))
    return seconds, statistics.mean(fullest)


def simulated_rows(
    case: Case, intervals: tuple[int, ...] = INTERVALS, systems: tuple[System, ...] = SYSTEMS
) -> list[Row]:
    """Compare the systems on a case. Times, balance and moves are those of the last interval."""
    level = simulate(_levelled(case), SYSTEMS[0], 1)
    outcomes = {"EP, were loads level": dict.fromkeys(intervals, level)}
    for system in systems:
        if system.sharding == "even":  # no interval: the same for all
            outcomes[system.name] = dict.fromkeys(intervals, simulate(case, system, 1))
        else:
            outcomes[system.name] = {each: simulate(case, system, each) for each in intervals}
    last = intervals[-1]
    ep, both = outcomes["neither (EP)"], outcomes["both"]
    rows = []
    for name, by_interval in outcomes.items():
        outcome = by_interval[last]
        row: Row = {
            "load": case.load,
            "cluster": case.cluster,
            "system": name,
            "ms": 1e3 * outcome.iteration_s,
            "moving ms": 1e3 * outcome.moving_s,
            "fullest / mean": outcome.balance,
            "moved / looks": " ".join(
                f"{each.num_done}/{each.num_looks}" if each.num_looks else "-"
                for each in by_interval.values()
            ),
            "num_moves": {each: by_interval[each].num_moves for each in intervals},
        }
        for each in intervals:
            row[f"x EP @{each}"] = ep[each].iteration_s / by_interval[each].iteration_s
        row["both x"] = outcome.iteration_s / both[last].iteration_s
        row["paper"] = PUBLISHED_BOTH.get(name, "-")
        rows.append(row)
    return rows


def _levelled(case: Case) -> Case:
    """Return one iteration of the case in which every expert gets the same."""
    counts_TLRE = case.counts_TLRE[: WARM_UP + 1]
    mean = counts_TLRE.sum(axis=-1, keepdims=True) // counts_TLRE.shape[-1]
    return replace(case, counts_TLRE=np.broadcast_to(mean, counts_TLRE.shape))


def published_row() -> Row:
    """Return the paper's figures in the form of a row."""
    row: Row = {"load": "published", "cluster": "-", "system": "both"}
    row |= dict.fromkeys(("ms", "moving ms", "fullest / mean", "moved / looks"), "-")
    row |= {f"x EP @{each}": PUBLISHED[each] for each in INTERVALS}
    return row | {"both x": 1.0, "paper": "-"}


HIDDEN, FFN, MODEL_LAYERS, MODEL_EXPERTS, NUM_RANKS = 256, 1024, 4, 16, 4
MOVED = (1, 4, 16)
REPEATS = 5


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside and still alive; views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note what it made."""
        result = func(*args, **(kwargs or {}))
        known = {_storage(each).data_ptr() for each in _tensors((args, kwargs))}
        made = {_storage(each).data_ptr(): _storage(each) for each in _tensors(result)}
        for pointer, storage in made.items():
            if pointer not in known:
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def moving_model() -> tuple[Any, Any]:
    """Train a GPT-MoE for a step, so that it has optimizer state; return resharder and runtime."""
    from megatron_fssdp.integration import cpu_platform

    cpu_platform.enable()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    from megatron_fssdp.config import FSSDPConfig
    from megatron_fssdp.integration import spec

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=NUM_RANKS, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    runtime = spec.register(FSSDPConfig(moe_parallel="fssdp"))
    config = _config()
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    gpt = GPTModel(config, block, 64, max_sequence_length=16, position_embedding_type="rope")
    spec.prepare([gpt], runtime)
    spec.unregister()
    ddp_config = DistributedDataParallelConfig()
    model = DistributedDataParallel(config, ddp_config, Float16Module(config, gpt))
    settings = OptimizerConfig(lr=1e-3, bf16=True, params_dtype=torch.bfloat16)
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    runtime.owners.enable_moves(optimizer, parallel_state.get_expert_data_parallel_group(), None)
    tokens = torch.arange(16).unsqueeze(0)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    model.zero_grad_buffer()
    model(tokens, tokens, mask, labels=tokens).float().mean().backward()
    model.finish_grad_sync()
    optimizer.step()
    (resharder,) = runtime.owners.resharders.values()
    return resharder, runtime


def _config() -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=MODEL_LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=FFN,
        moe_ffn_hidden_size=FFN,
        num_moe_experts=MODEL_EXPERTS,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_grouped_gemm=True,
        expert_model_parallel_size=NUM_RANKS,
        bf16=True,
        params_dtype=torch.bfloat16,
        add_bias_linear=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def ring_on(homes: Homes, num_moved: int) -> Int64Array:
    """Let the experts in every rank's first homes move on to the next rank."""
    owner_LE = homes.owner_LE.copy()
    for rank in range(homes.num_ranks):
        layer, expert = homes.expert_of(rank)[:num_moved].T
        owner_LE[layer, expert] = (rank + 1) % homes.num_ranks
    return owner_LE


def run_moves(moved: tuple[int, ...]) -> list[dict[str, float]]:
    """Move `moved` experts of each rank. Runs on every rank."""
    torch.set_num_threads(1)
    resharder, runtime = moving_model()
    sent: list[int] = []
    stock: Callable[..., int] = resharder.mover.move
    resharder.mover.move = lambda *args: sent.append(stock(*args))
    results = []
    for number in moved:

        def move(number: int = number) -> Any:
            ownership = resharder.mover.ownership
            result = resharder.move(ring_on(ownership.homes, number))
            runtime.owners.after_reshard(ownership, result)
            assert result.is_done, result
            return result

        move()
        with LiveBytes() as live:
            move()
        seconds, bare, counted = [], [], 0
        for _ in range(REPEATS):
            dist.barrier()
            before = sum(link_bytes())
            result = move()
            dist.barrier()
            counted += sum(link_bytes()) - before
            seconds.append(result.took_s)
            expert_bytes = result.num_bytes // result.num_moves
            bare.append(bare_ring_s(expert_bytes, number))
        slowest = torch.tensor([seconds, bare], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        results.append(
            {
                "experts": result.num_moves,
                "sent": sent[-1],
                "planned": result.num_bytes,
                "expert_bytes": expert_bytes,
                "counted": counted / REPEATS,
                "s": slowest[0].median().item(),
                "bare_s": slowest[1].median().item(),
                "peak": live.peak,
            }
        )
    runtime.close()
    return results


def bare_ring_s(num_bytes: int, num_rounds: int) -> float:
    """Seconds in which ranks send one message each to the next, so many times."""
    rank, size = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(num_rounds):
        ops = [dist.P2POp(dist.irecv, incoming, (rank - 1) % size)]
        ops.append(dist.P2POp(dist.isend, outgoing, (rank + 1) % size))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return time.perf_counter() - begin


def measured_rows(moved: tuple[int, ...] = MOVED) -> list[Row]:
    """Move experts between real ranks."""
    by_rank = run_two_nodes(run_moves, moved, ranks_per_node=2, bytes_per_s=None, timeout_s=300)
    rows = []
    for number, results in zip(moved, zip(*by_rank, strict=True), strict=True):
        first = results[0]
        sent, peak = sum(each["sent"] for each in results), max(each["peak"] for each in results)
        rows.append(
            {
                "k": number,
                "experts": first["experts"],
                "MB": sent / 1e6,
                "sent / plan": sent / first["planned"],
                # Two of the ring's four messages cross the cable.
                "cable / plan": first["counted"] / (first["planned"] / 2),
                "ideal": 1.0,
                "ms": 1e3 * first["s"],
                "bare gloo ms": 1e3 * first["bare_s"],
                "MB/s a rank": sent / NUM_RANKS / first["s"] / 1e6,
                "peak MB": peak / 1e6,
                "2 experts MB": 2 * first["expert_bytes"] / 1e6,
                "holds": sent == first["planned"] and peak <= 2.02 * first["expert_bytes"],
            }
        )
    return rows


def show(console: Console, title: str, rows: list[Row]) -> None:
    """Print a table; what is not one value is for the JSON file."""
    table = Table(title=title, pad_edge=False)
    names = [name for name, value in rows[0].items() if not isinstance(value, dict)]
    for name in names:
        is_text = isinstance(rows[-1][name], str)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    group = None
    for row in rows:
        this = (row.get("load"), row.get("cluster"))
        if this != group and group is not None:
            table.add_section()
        group = this
        table.add_row(*(_text(row[name]) for name in names))
    console.print(table)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> int:
    """Simulate, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200, help="simulated, that count")
    parser.add_argument("--part", choices=("simulated", "measured"), help="do only this")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 170)
    tables: dict[str, list[Row]] = {}
    if args.part != "measured":
        rows = [published_row()]
        for case in cases(args.iterations):
            rows += simulated_rows(case)
        title = "SIMULATED, our planner and cost model: re-sharding and replicas, modelled time"
        tables[f"{title} (figure 15 of the paper)"] = rows
    reason = None if args.part == "simulated" else why_not()
    if reason:
        console.print(f"measured part skipped: {reason}")
    elif args.part != "simulated":
        title = f"MEASURED, {NUM_RANKS} gloo ranks: k experts of each rank move to the next"
        tables[title] = measured_rows()
    for title, rows in tables.items():
        show(console, title, rows)
    if args.json:
        args.json.write_text(json.dumps(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0

"""What `fidelity.py` times on every rank: a small GPT-MoE with forced routing, and the machine."""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from moe_config import moe_config

HIDDEN, FFN, EXPERTS, TOPK, HEADS, LAYERS = 512, 512, 8, 2, 8, 2
SEQUENCE, BATCH, VOCAB, SLOTS = 256, 4, 256, 2
TOKENS = SEQUENCE * BATCH
LARGE_BYTES = 1 << 22  # about what a rank sends in an exchange
ROWS = (1, 64, 256, 512, 1024, 2048)
WARM_UPS = 2

FLAGS: dict[str, Any] = {
    "--num-layers": LAYERS,
    "--hidden-size": HIDDEN,
    "--ffn-hidden-size": FFN,
    "--num-attention-heads": HEADS,
    "--num-experts": EXPERTS,
    "--moe-router-topk": TOPK,
    "--seq-length": SEQUENCE,
    "--max-position-embeddings": SEQUENCE,
    "--position-embedding-type": "rope",
    "--padded-vocab-size": VOCAB,
    "--untie-embeddings-and-output-weights": True,
    "--disable-bias-linear": True,
    "--swiglu": True,
    "--micro-batch-size": BATCH,
}


def shares() -> dict[str, np.ndarray]:
    """Return the load shapes: each expert's share of a rank's tokens. None exceeds 1 / top-k."""
    hot_rank = np.full(EXPERTS, 1.0)
    hot_rank[: EXPERTS // 4] = 9.0  # the first rank's of 4, half of the first's of 2
    hot_expert = np.full(EXPERTS, 1.0)
    hot_expert[0] = 5.0
    places = np.array([3, 1, 6, 2, 8, 5, 7, 4])
    shapes = {
        "balanced": np.ones(EXPERTS),
        "spread": np.linspace(1.5, 0.5, EXPERTS),
        "zipf 1.0": 1.0 / places,
        "hot expert": hot_expert,
        "hot rank": hot_rank,
    }
    return {name: share / share.sum() for name, share in shapes.items()}


def counts_of(name: str) -> np.ndarray:
    """Return the (E,) tokens of a rank's experts, whole, TOKENS * TOPK together."""
    exact = shares()[name] * TOKENS * TOPK
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: TOKENS * TOPK - counts.sum()]] += 1
    return counts


class Case:
    """A model under one system, with a routing that can be changed, and its seconds.

    Args:
        system: ep or fssdp.
        cluster: the cluster file with which FSSDP plans: the first calibration's, where the
            prediction has the mean of all.
    """

    def __init__(self, system: str, cluster: str) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        from megatron_fssdp.config import FSSDPConfig
        from megatron_fssdp.integration import spec

        self.runtime: Any = None
        if system == "fssdp":
            config = FSSDPConfig(
                moe_parallel="fssdp",
                fssdp_num_replica_slots=SLOTS,
                fssdp_predictor="last",
                fssdp_reshard_interval=0,
                fssdp_cluster=cluster,
            )
            self.runtime = spec.register(config)
        config = moe_config(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            ffn_hidden_size=FFN,
            num_moe_experts=EXPERTS,
            moe_router_topk=TOPK,
            expert_model_parallel_size=dist.get_world_size(),
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
        )
        torch.manual_seed(7)
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False),
            vocab_size=VOCAB,
            max_sequence_length=SEQUENCE,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        if self.runtime is not None:
            spec.prepare([model], self.runtime)
            self.runtime.num_microbatches = lambda: 1
        spec.unregister()
        for layer in model.decoder.layers:
            layer.mlp.router.forward = self._route
        settings = DistributedDataParallelConfig(use_distributed_optimizer=False)
        self.model = DistributedDataParallel(config, settings, model)
        # A step ends the iteration; this one changes nothing, so that all compute the same.
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.tokens = torch.arange(TOKENS).remainder(VOCAB).view(BATCH, SEQUENCE)
        self.positions = torch.arange(SEQUENCE).expand(BATCH, -1)
        self.mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        self.routing: tuple[torch.Tensor, torch.Tensor]

    def force(self, name: str) -> None:
        """Route as a load shape says.

        Of the list of experts, each as often as it has tokens, token t takes entries t and t + T.
        """
        entries = torch.from_numpy(np.repeat(np.arange(EXPERTS), counts_of(name)))
        chosen = entries.view(TOPK, TOKENS).t()
        routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)
        assert (routing_map.sum(0) == torch.from_numpy(counts_of(name))).all()
        # Tokens of an expert lie apart, as they do in training.
        order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(dist.get_rank()))
        routing_map = routing_map[order]
        probs = torch.where(routing_map, 1.0 / TOPK, 0.0).requires_grad_()
        self.routing = (probs, routing_map)

    def _route(self, *unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.routing

    def run(self) -> float:
        """Run an iteration and return its seconds on the slowest rank."""
        dist.barrier()
        begin = time.perf_counter()
        self.model.zero_grad_buffer()
        loss = self.model(self.tokens, self.positions, self.mask, labels=self.tokens).mean()
        loss.backward()
        self.model.finish_grad_sync()
        seconds = torch.tensor([time.perf_counter() - begin])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.optimizer.step()
        return seconds.item()


def measure(num_rounds: int, limit: float | None = None) -> dict[str, Any]:
    """Time all cases in turns, and calibrate before and after each round. Runs on every rank.

    A round runs each shape's systems once to see its loads, and then EP, FSSDP, FSSDP, EP: what
    else the machine does in the meantime, and what one run leaves to the next, meets all alike.

    Args:
        num_rounds: each case is timed twice in each.
        limit: bytes per second of the cable between two nodes; None: there is one node.

    Returns:
        `calibrated`: cluster files' mappings and the seconds of planning, one more than rounds;
        `seconds`: by (shape, system) the timed iterations, of which those at the same place are
        neighbours. Rank 0's count.
    """
    torch.set_num_threads(1)
    from megatron_fssdp.integration import cpu_platform

    cpu_platform.enable()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    calibrated = [_calibrate()]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(calibrated[0], file)
        file.flush()
        cases = {system: Case(system, file.name) for system in ("ep", "fssdp")}
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(WARM_UPS):  # buffers, the allocator's memory
        for name in ("balanced", "hot rank"):
            for case in cases.values():
                case.force(name)
                case.run()
    for _ in range(num_rounds):
        for name in shares():
            for case in cases.values():
                case.force(name)
                case.run()
            for system in ("ep", "fssdp", "fssdp", "ep"):
                seconds.setdefault((name, system), []).append(cases[system].run())
        calibrated.append(_calibrate())
    if cases["fssdp"].runtime is not None:
        cases["fssdp"].runtime.close()
    return {"calibrated": calibrated, "seconds": seconds}


def _calibrate() -> dict[str, Any]:
    from megatron_fssdp.tools.calibrate import calibrate

    values = calibrate(
        hidden_size=HIDDEN, ffn_size=FFN, rows=ROWS, large_bytes=LARGE_BYTES, name="here"
    )
    return values | {"planning_s": _planning_s()}


def _planning_s() -> float:
    """Seconds of one layer's quotas and this rank's messages; EP gathers the counts as well."""
    from megatron_fssdp.planning.planner import PlanSettings, plan_layers
    from megatron_fssdp.planning.quotas import balance, messages_of
    from megatron_fssdp.planning.sharding import shard_evenly
    from megatron_fssdp.planning.topology import Topology

    size = dist.get_world_size()
    counts_RE = np.tile(counts_of("hot rank"), (size, 1))
    topology = Topology.uniform(size)
    owner_LE = shard_evenly(1, EXPERTS, size)
    plan = plan_layers(counts_RE.sum(0)[None], owner_LE, topology, PlanSettings()).layer(0)
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        quota_EI = balance(counts_RE, plan, topology.node_of_rank)
        messages = messages_of(counts_RE, quota_EI, plan, topology.node_of_rank, dist.get_rank())
        assert messages.sent_R.sum() == messages.split_EI.sum()
        assert len(messages.received_RS) == size
        times.append(time.perf_counter() - begin)
    return statistics.median(times)

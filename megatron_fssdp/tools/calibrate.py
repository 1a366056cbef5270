# SPDX-License-Identifier: Apache-2.0

"""Measure the machine for the cost model: how fast it multiplies, and what its links carry.

    fssdp calibrate cluster.yaml                            one process: products, a local link
    torchrun ... --no-python fssdp calibrate cluster.yaml   all ranks: links in and between nodes

All ranks measure at once, so that what they share (cores, adapters, memory) is shared as in
training. The result is a cluster file as in `configs/clusters`, read by
`planning.topology.read_cluster` and, for the simulator, by `simulation.cluster`.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

from megatron_fssdp.planning.topology import NETWORK, NVLINK, LinkClass
from megatron_fssdp.simulation.apart import num_cores

ROWS = (1, 16, 64, 256, 1024, 4096, 16384)
# A message that is all latency, and one that is all bandwidth.
SMALL_BYTES, LARGE_BYTES = 8, 1 << 26
WARM_UPS, REPEATS = 3, 7
# Stretches of work between two meetings of all ranks: as long as a small model's layer takes on
# CPUs, where the wait for the slowest rank is longest.
WINDOWS, WINDOW_S = 10, 0.03
# Activations that are kept at a time while memory is measured.
KEPT = 16


def calibrate(
    output: str | Path | None = None,
    *,
    hidden_size: int = 2048,
    ffn_size: int = 2048,
    rows: Sequence[int] = ROWS,
    large_bytes: int = LARGE_BYTES,
    name: str | None = None,
) -> dict[str, Any]:
    """Measure products and links, and write a cluster file.

    Collective under torchrun: every rank must call it; it starts the process group if there is
    none yet. Without a launcher, the link inside the node is measured between two processes of
    this machine (two GPUs, or two CPU ranks), where there are two devices.

    Args:
        output: file to write, by the first rank; None: only return.
        hidden_size: width of the products' input, the model's at best.
        ffn_size: width of the products' output, that of the model's experts at best.
        rows: tokens per expert to measure at.
        large_bytes: size of the message that measures bandwidth.
        name: of the cluster; the host's name by default.

    Returns:
        The cluster file's mapping. Links that could not be measured have their defaults, and
        `measured` says which were.
    """
    has_launcher = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if has_launcher and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    compute = measure_products(hidden_size, ffn_size, rows)
    hosts, adapters = [socket.gethostname()], None
    links: dict[str, LinkClass] = {}
    if dist.is_initialized():
        hosts, links, adapters = measure_links(large_bytes)
    elif not torch.cuda.is_available() or torch.cuda.device_count() > 1:
        links = {"intra_node": _measure_local_link(large_bytes)}
    cores = num_cores()
    sizes = [hosts.count(host) for host in dict.fromkeys(hosts)]
    if not torch.cuda.is_available():
        if len(sizes) == 1 and len(hosts) > cores:
            compute["shared_cores"] = cores
        # Where no core is idle those that compute must copy messages.
        compute["cores_copy"] = max(sizes) * torch.get_num_threads() >= cores
    values = {
        "name": name or hosts[0],
        "source": f"fssdp calibrate, {time.strftime('%Y-%m-%d')}, {_device_name()}",
        "measured": sorted(["compute", *links]),
        "topology": {
            "ranks_per_node": sizes[0] if len(set(sizes)) == 1 else sizes,
            **({} if adapters is None else {"adapters_per_node": adapters}),
            **{
                key: _as_mapping(links.get(key, default))
                for key, default in (("intra_node", NVLINK), ("inter_node", NETWORK))
            },
        },
        "compute": compute,
    }
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if output is not None and is_first:
        Path(output).write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return values


def measure_products(hidden_size: int, ffn_size: int, rows: Sequence[int]) -> dict[str, Any]:
    """Measure one expert's product, forward and backward, at several numbers of rows.

    Returns:
        The `compute` part of a cluster file: the best rate, the least time of one expert (its
        three products forward), the rate at each number of rows, and what else
        `simulation.cluster` reads.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # CPUs multiply bf16 far slower than fp32, and nobody trains on them in bf16.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = torch.randn(hidden_size, ffn_size, device=device, dtype=dtype)
    rates, seconds = [], []
    for count in rows:
        tokens = torch.randn(count, hidden_size, device=device, dtype=dtype)
        grads = torch.randn(count, ffn_size, device=device, dtype=dtype)

        def products(tokens: torch.Tensor = tokens, grads: torch.Tensor = grads) -> None:
            _ = (tokens @ weight, grads @ weight.t(), tokens.t() @ grads)

        taken_s = _shared_s(products)
        seconds.append(taken_s)
        rates.append([int(count), 6.0 * count * hidden_size * ffn_size / taken_s])
    found: dict[str, Any] = {
        "flops_per_s": max(rate for _, rate in rates),
        "group_floor_s": min(seconds),
        "rate_by_rows": rates,
        "memory_bytes_per_s": measure_memory(max(rows) * hidden_size, dtype, device),
    }
    if device.type == "cpu":
        found["has_fused_kernels"] = False
    return found


def measure_memory(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Measure bytes that elementwise operations read and write in a second.

    As in training: inputs lie in no cache, outputs are made anew and kept for the backward.

    Args:
        size: numbers of its input, as many as activations have.
        dtype: of them.
        device: where.

    Returns:
        Bytes per second.
    """
    inputs = torch.ones(KEPT, size, dtype=dtype, device=device)
    return 2.0 * inputs.nbytes / _shared_s(lambda: [each * 2.0 for each in inputs])


def measure_links(large_bytes: int) -> tuple[list[str], dict[str, LinkClass], int | None]:
    """Measure what a rank gets of the links inside its node, and between nodes.

    Bandwidth with all ranks sending at once: to all ranks of the own node; to the rank at the same
    place in the next node. Latency between two ranks, which alone between nodes get more where
    ranks share a network adapter: that tells how many adapters a node has.

    Collective: every rank of the default group must call it.

    Returns:
        The host of each rank, the links that there are, and the adapters of a node (None: there
        is one node).
    """
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    peers = {
        "intra_node": next((r for r, h in enumerate(hosts) if r and h == hosts[0]), None),
        "inter_node": next((r for r, h in enumerate(hosts) if h != hosts[0]), None),
    }
    links, adapters = {}, None
    for key, peer in peers.items():
        if peer is not None:
            one_way = _measure_pair(0, peer, large_bytes)
            latency_s = one_way.latency_s
            together = _exchange_rate(_targets(hosts, key), large_bytes, latency_s)
            links[key] = LinkClass(bytes_per_s=together, latency_s=latency_s)
            if key == "inter_node":
                pair = [[peer] if r == 0 else [0] if r == peer else [] for r in range(len(hosts))]
                # The most that a rank gets: one connection may fill no adapter in both directions.
                both_ways = _exchange_rate(pair, large_bytes, latency_s)
                alone = max(one_way.bytes_per_s, both_ways)
                adapters = count_adapters(hosts.count(hosts[0]), alone, together)
    return hosts, links, adapters


def count_adapters(num_ranks: int, alone: float, together: float) -> int:
    """Return how many network adapters serve a node.

    Args:
        num_ranks: of the node; a divisor of it is returned.
        alone: bytes per second of one rank while no other sends.
        together: of each rank while all send.
    """
    divisors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
    return min(divisors, key=lambda number: (abs(num_ranks * together / alone - number), number))


def _targets(hosts: Sequence[str], key: str) -> list[list[int]]:
    """Return, for each rank, to whom it sends: its node's others, or its like in the next node."""
    nodes = {host: [r for r, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)}
    if key == "intra_node":
        return [[r for r in nodes[host] if r != rank] for rank, host in enumerate(hosts)]
    members = list(nodes.values())
    targets: list[list[int]] = [[] for _ in hosts]
    for node, ranks in enumerate(members):
        following = members[(node + 1) % len(members)]
        for place, rank in enumerate(ranks[: len(following)]):
            targets[rank] = [following[place]]
    return targets


def _exchange_rate(targets: list[list[int]], large_bytes: int, latency_s: float) -> float:
    """Measure the bytes per second of an all-to-all on its slowest rank.

    Each rank sends `large_bytes` in all to its targets.
    """
    rank, size = dist.get_rank(), len(targets)
    device = _link_device()
    share = [large_bytes // max(len(to), 1) for to in targets]
    sends = [share[rank] if peer in targets[rank] else 0 for peer in range(size)]
    receives = [share[peer] if rank in targets[peer] else 0 for peer in range(size)]
    message = torch.zeros(sum(sends), dtype=torch.uint8, device=device)

    def exchange() -> None:
        # What arrives has a new tensor each time, as tokens have.
        received = torch.empty(sum(receives), dtype=torch.uint8, device=device)
        dist.all_to_all_single(received, message, receives, sends)

    return large_bytes / max(_slowest_s(_median_s(exchange)) - latency_s, 1e-9)


def _measure_pair(first: int, second: int, large_bytes: int) -> LinkClass:
    """Send to and fro between two ranks; the others wait. All ranks get the result."""
    rank = dist.get_rank()
    device = _link_device()
    seconds = []
    for num_bytes in (SMALL_BYTES, large_bytes):
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

        def bounce(message: torch.Tensor = message) -> None:
            if rank == first:
                dist.send(message, second)
                dist.recv(message, second)
            elif rank == second:
                dist.recv(message, first)
                dist.send(message, first)

        # There and back: half of it is one way.
        seconds.append(_median_s(bounce) / 2)
        dist.barrier()
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.broadcast(found, first)
    small_s, large_s = found.tolist()
    bandwidth = (large_bytes - SMALL_BYTES) / max(large_s - small_s, 1e-9)
    return LinkClass(bytes_per_s=bandwidth, latency_s=small_s)


def _measure_local_link(large_bytes: int) -> LinkClass:
    """Measure between two processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_local_rank, args=(folder, large_bytes), nprocs=2)
        values = yaml.safe_load((Path(folder) / "link.yaml").read_text())
    return LinkClass(**values)


def _local_rank(rank: int, folder: str, large_bytes: int) -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    link = _measure_pair(0, 1, large_bytes)
    if rank == 0:
        (Path(folder) / "link.yaml").write_text(yaml.safe_dump(_as_mapping(link)))
    dist.destroy_process_group()


def _median_s(function: Callable[[], object]) -> float:
    """Median time of one call, with the device waited for."""
    times = []
    for number in range(WARM_UPS + REPEATS):
        seconds = _time_s(function)
        if number >= WARM_UPS:
            times.append(seconds)
    return statistics.median(times)


def _shared_s(function: Callable[[], object]) -> float:
    """Time of one call while all ranks of the group make such calls. Collective.

    Ranks meet after windows of as many calls each, and the slowest one counts, as in training.
    Calls are not timed one by one: where ranks share cores a short one has a core for itself while
    it runs, and waits between calls.
    """
    warm_s = [_time_s(function) for _ in range(WARM_UPS)]
    calls = max(1, round(WINDOW_S / _slowest_s(min(warm_s))))

    def window() -> None:
        for _ in range(calls):
            function()

    windows = []
    for _ in range(WINDOWS):
        if dist.is_initialized():
            dist.barrier()
        windows.append(_slowest_s(_time_s(window)) / calls)
    return statistics.mean(windows)


def _slowest_s(seconds: float) -> float:
    """Return the most that any rank has."""
    if not dist.is_initialized():
        return seconds
    device = _link_device()
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def _time_s(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _link_device() -> torch.device:
    """Where the process group's messages lie."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _as_mapping(link: LinkClass) -> dict[str, float]:
    return {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}

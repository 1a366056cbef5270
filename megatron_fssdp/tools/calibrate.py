# SPDX-License-Identifier: Apache-2.0

"""Measure the machine for the cost model: how fast it multiplies, and what its links carry.

    fssdp calibrate cluster.yaml                            one process: products, a local link
    torchrun ... --no-python fssdp calibrate cluster.yaml   all ranks: links in and between nodes

The result is a cluster file as in `configs/clusters`, read by `planning.topology.read_cluster`.
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

ROWS = (1, 16, 64, 256, 1024, 4096, 16384)
# A message that is all latency, and one that is all bandwidth.
SMALL_BYTES, LARGE_BYTES = 8, 1 << 26
WARM_UPS, REPEATS = 3, 7


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
    compute["memory_bytes_per_s"] = measure_memory(4 * large_bytes)
    hosts = [socket.gethostname()]
    links: dict[str, LinkClass] = {}
    if dist.is_initialized():
        hosts, links = measure_links(large_bytes)
    elif not torch.cuda.is_available() or torch.cuda.device_count() > 1:
        links = {"intra_node": _measure_local_link(large_bytes)}
    sizes = [hosts.count(host) for host in dict.fromkeys(hosts)]
    values = {
        "name": name or hosts[0],
        "source": f"fssdp calibrate, {time.strftime('%Y-%m-%d')}, {_device_name()}",
        "measured": sorted(["compute", *links]),
        "topology": {
            "ranks_per_node": sizes[0] if len(set(sizes)) == 1 else sizes,
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
    """Measure one expert's product at several numbers of rows.

    Returns:
        The `compute` part of a cluster file: the best rate, the least time of one expert (three
        products), and the rate at each number of rows.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # CPUs multiply bf16 far slower than fp32, and nobody trains on them in bf16.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = torch.randn(hidden_size, ffn_size, device=device, dtype=dtype)
    rates, seconds = [], []
    for count in rows:
        tokens = torch.randn(count, hidden_size, device=device, dtype=dtype)
        taken_s = _median_s(lambda tokens=tokens: tokens @ weight)  # type: ignore[misc]
        seconds.append(taken_s)
        rates.append([int(count), 2.0 * count * hidden_size * ffn_size / taken_s])
    return {
        "flops_per_s": max(rate for _, rate in rates),
        "group_floor_s": 3 * min(seconds),
        "rate_by_rows": rates,
    }


def measure_memory(num_bytes: int) -> float:
    """Measure the bytes a second that a copy of `num_bytes` reads and writes, together."""
    source = torch.zeros(
        num_bytes, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu"
    )
    target = torch.empty_like(source)
    return 2 * num_bytes / _median_s(lambda: target.copy_(source))


def measure_links(large_bytes: int) -> tuple[list[str], dict[str, LinkClass]]:
    """Measure the links from rank 0 to a rank of its node, and to one of another node.

    Collective: every rank of the default group must call it.

    Returns:
        The host of each rank, and the links that there are.
    """
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    peers = {
        "intra_node": next((r for r, h in enumerate(hosts) if r and h == hosts[0]), None),
        "inter_node": next((r for r, h in enumerate(hosts) if h != hosts[0]), None),
    }
    links = {}
    for key, peer in peers.items():
        if peer is not None:
            links[key] = _measure_pair(0, peer, large_bytes)
    return hosts, links


def _measure_pair(first: int, second: int, large_bytes: int) -> LinkClass:
    """Send to and fro between two ranks; the others wait. All ranks get the result."""
    rank = dist.get_rank()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
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
        start = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if number >= WARM_UPS:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _as_mapping(link: LinkClass) -> dict[str, float]:
    return {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}

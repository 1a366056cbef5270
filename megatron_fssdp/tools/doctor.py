# SPDX-License-Identifier: Apache-2.0

"""`fssdp doctor`: what is installed and set here, and what of it will slow or break a run.

`look` gathers facts; each check is a function from facts to a finding or None.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

LEAST_TORCH = (2, 10)
LEAST_SHM_BYTES = 1 << 30
LEAST_FILES = 4096


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found; None: not there.

    Attributes:
        python, torch, cuda, nccl, megatron_core, transformer_engine, apex: versions; `cuda` only
            where a device is there.
        is_core_supported: whether this plugin was written for that megatron-core.
        supported_cores: which it was written for.
        has_other_apex: a package named apex that is not NVIDIA's.
        deep_ep: whether DeepEP is installed.
        gpus: their names.
        capability: (major, minor) of the first GPU.
        lacks_peers: some GPUs cannot reach each other's memory.
        has_driver: NVIDIA's kernel driver is loaded.
        has_infiniband: the machine has such a device.
        host: the host's name.
        shm_bytes: size of /dev/shm.
        open_files: how many a process may have open.
        locked_bytes: memory that a process may lock; -1: any.
        report_needs: packages that the HTML report lacks.
        environment: the environment's variables.
    """

    python: str = "3.12"
    torch: str = "2.10.0"
    cuda: str | None = None
    nccl: str | None = None
    megatron_core: str | None = None
    is_core_supported: bool = False
    supported_cores: str = ""
    transformer_engine: str | None = None
    apex: str | None = None
    has_other_apex: bool = False
    deep_ep: bool = False
    gpus: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    lacks_peers: bool = False
    has_driver: bool = False
    has_infiniband: bool = False
    host: str = ""
    shm_bytes: int | None = None
    open_files: int | None = None
    locked_bytes: int | None = None
    report_needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """Nodes of the job, where its launcher tells."""
        get = self.environment.get
        told = get("SLURM_JOB_NUM_NODES") or get("SLURM_NNODES") or get("GROUP_WORLD_SIZE") or "1"
        return int(told) if told.isdecimal() else 1


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        effect: what it does to a run.
        what: it, in a sentence.
        fix: what to do.
    """

    effect: Literal["breaks", "slows"]
    what: str
    fix: str


Check = Callable[[Facts], Finding | None]


def look(versions: Mapping[str, str | None], is_supported: bool, supported: str) -> Facts:
    """Gather facts about this machine and environment.

    Args:
        versions: `torch`, `cuda`, `megatron_core`, `transformer_engine` and `apex`.
        is_supported: see `Facts.is_core_supported`.
        supported: see `Facts.supported_cores`.
    """
    import torch

    has_cuda = versions["cuda"] is not None
    count = torch.cuda.device_count() if has_cuda else 0
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return Facts(
        python=platform.python_version(),
        torch=str(versions["torch"]),
        cuda=versions["cuda"],
        nccl=".".join(map(str, nccl)) if isinstance(nccl, tuple) else None,
        megatron_core=versions["megatron_core"],
        is_core_supported=is_supported,
        supported_cores=supported,
        transformer_engine=versions["transformer_engine"],
        apex=versions["apex"],
        has_other_apex=versions["apex"] is None and _is_installed("apex"),
        deep_ep=_is_installed("deep_ep"),
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        capability=torch.cuda.get_device_capability(0) if count else None,
        lacks_peers=not all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs),
        has_driver=Path("/proc/driver/nvidia/version").exists(),
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        host=socket.gethostname(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        report_needs=tuple(name for name in ("matplotlib", "jinja2") if not _is_installed(name)),
        environment=dict(os.environ),
    )


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def check_core(facts: Facts) -> Finding | None:
    """The plugin replaces functions of known versions only."""
    if facts.is_core_supported:
        return None
    found = f"megatron-core {facts.megatron_core}" if facts.megatron_core else "no megatron-core"
    return Finding(
        "breaks",
        f"{found}. Not supported: this plugin needs {facts.supported_cores}.",
        "pip install 'megatron-core>=0.19,<0.20'",
    )


def check_torch(facts: Facts) -> Finding | None:
    """Grouped products and the collectives' names need a recent torch."""
    numbers = tuple(map(int, re.findall(r"\d+", facts.torch)[:2]))
    if numbers >= LEAST_TORCH:
        return None
    return Finding(
        "breaks", f"torch {facts.torch} is older than 2.10.", "pip install 'torch>=2.10'"
    )


def check_device(facts: Facts) -> Finding | None:
    """A driver without a device is a wrong torch, unless devices are hidden on purpose."""
    is_hidden = facts.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if facts.cuda or not facts.has_driver or is_hidden:
        return None
    return Finding(
        "breaks",
        "NVIDIA's driver is loaded, but torch finds no GPU: a CPU build, or a newer CUDA than the "
        "driver's.",
        "see `python -c 'import torch; torch.cuda.init()'`; install torch for the driver's CUDA",
    )


def check_transformer_engine(facts: Facts) -> Finding | None:
    """Without it Megatron computes experts one after the other."""
    if facts.transformer_engine or not facts.cuda:
        return None
    return Finding(
        "slows",
        "No Transformer Engine: experts are computed one after the other, not in one grouped "
        "product.",
        "pip install 'megatron-fssdp[te]' (builds for a quarter of an hour)",
    )


def check_apex(facts: Facts) -> Finding | None:
    """PyPI's apex is another project; Megatron takes it for NVIDIA's."""
    if not facts.has_other_apex:
        return None
    return Finding(
        "breaks",
        "The package apex here is not NVIDIA's, and Megatron imports it as if it were.",
        "pip uninstall apex; Megatron falls back to torch, or takes NVIDIA's from its repository",
    )


def check_connections(facts: Facts) -> Finding | None:
    """One hardware queue makes streams wait for each other."""
    if facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return None
    return Finding(
        "slows",
        "CUDA_DEVICE_MAX_CONNECTIONS is 1: kernels start in the order of their launch on all "
        "streams, so copies of experts hide less.",
        "unset it, unless Megatron asks for it (tensor or context parallelism before Blackwell)",
    )


# Variables that help to debug or to get around broken links, and are often forgotten.
_FORGOTTEN: tuple[tuple[str, str, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", r"[1-9]", "every kernel is waited for; nothing overlaps"),
    ("NCCL_P2P_DISABLE", r"[1-9]", "GPUs of a node talk through host memory"),
    ("NCCL_SHM_DISABLE", r"[1-9]", "GPUs of a node without NVLink talk through the network"),
    ("NCCL_IB_DISABLE", r"[1-9]", "nodes talk over TCP sockets instead of InfiniBand"),
    ("NCCL_NET_GDR_LEVEL", r"(0|LOC)", "the network reads GPU memory through the host"),
    ("NCCL_DEBUG", r"TRACE", "NCCL writes a line for every call"),
    ("NCCL_MAX_NCHANNELS", r"[12]", "NCCL may use one or two of its channels"),
    ("TORCH_DISTRIBUTED_DEBUG", r"DETAIL", "every collective is compared across ranks first"),
    ("TORCH_NCCL_BLOCKING_WAIT", r"[1-9]", "the host waits for every collective"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", r".+", "every tensor is a new allocation"),
)  # fmt: skip


def _check_forgotten(name: str, pattern: str, effect: str) -> Check:
    def check(facts: Facts) -> Finding | None:
        value = facts.environment.get(name, "")
        if not re.fullmatch(pattern, value, re.IGNORECASE):
            return None
        return Finding("slows", f"{name} is {value}: {effect}.", f"unset {name}")

    return check


def check_allocator(facts: Facts) -> Finding | None:
    """The tokens of an expert change with every iteration, which fragments fixed segments."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    told = " ".join(facts.environment.get(name, "") for name in names)
    if not facts.cuda or "expandable_segments:True" in told:
        return None
    return Finding(
        "slows",
        "torch's allocator keeps segments of fixed sizes: experts' tokens change with every "
        "iteration and fragment them, up to running out of memory.",
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


def check_peers(facts: Facts) -> Finding | None:
    """GPUs of a node should read each other's memory."""
    if not facts.lacks_peers:
        return None
    return Finding(
        "slows",
        "Some GPUs here cannot read each other's memory: copies inside the node go through the "
        "host.",
        "see `nvidia-smi topo -m`; in virtual machines switch PCIe's access control (ACS) off",
    )


def check_capability(facts: Facts) -> Finding | None:
    """Before Ampere there is no bf16 arithmetic in hardware."""
    if facts.capability is None or facts.capability >= (8, 0):
        return None
    major, minor = facts.capability
    return Finding(
        "slows",
        f"{facts.gpus[0]} (compute capability {major}.{minor}) has no bf16 arithmetic.",
        "train with --fp16",
    )


def check_nodes(facts: Facts) -> Finding | None:
    """Ranks with the same host name count as one node."""
    generic = facts.host.partition(".")[0].lower() in ("", "localhost", "container", "docker")
    if not generic or facts.num_nodes == 1:
        return None
    return Finding(
        "slows",
        f"The host is named {facts.host!r}, and the job has {facts.num_nodes} nodes: where all are "
        "named so, all ranks count as one node, and copies cross between nodes unseen.",
        "give --fssdp-ranks-per-node, or the nodes names of their own",
    )


def check_master(facts: Facts) -> Finding | None:
    """Several nodes cannot meet on the loopback."""
    address = facts.environment.get("MASTER_ADDR")
    if facts.num_nodes == 1 or address not in ("", "localhost", "127.0.0.1", "::1"):
        return None
    return Finding(
        "breaks",
        f"MASTER_ADDR is {address!r} in a job of {facts.num_nodes} nodes: each node waits for "
        "itself.",
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    )


def check_interface(facts: Facts) -> Finding | None:
    """NCCL's own connections need an interface that other nodes reach."""
    name = facts.environment.get("NCCL_SOCKET_IFNAME", "").lstrip("=")
    if facts.num_nodes == 1 or name not in ("lo", "docker0", "virbr0"):
        return None
    return Finding(
        "breaks",
        f"NCCL_SOCKET_IFNAME is {name}, which other nodes cannot reach.",
        "unset it, or name the interface of the cluster's network",
    )


def check_shared_memory(facts: Facts) -> Finding | None:
    """Containers have 64 MB unless told."""
    if facts.shm_bytes is None or facts.shm_bytes >= LEAST_SHM_BYTES:
        return None
    return Finding(
        "slows",
        f"/dev/shm has {facts.shm_bytes / 1e6:.0f} MB: data-loader workers and NCCL run out of "
        "it, and may end with a bus error.",
        "start the container with --ipc=host or --shm-size=16g; or --num-workers 0",
    )


def check_open_files(facts: Facts) -> Finding | None:
    """Every connection and every file of a checkpoint is one."""
    if facts.open_files is None or facts.open_files < 0 or facts.open_files >= LEAST_FILES:
        return None
    return Finding(
        "slows",
        f"A process may open {facts.open_files} files: connections of many ranks and checkpoints "
        "run out of them ('too many open files').",
        "ulimit -n 65536",
    )


def check_locked_memory(facts: Facts) -> Finding | None:
    """InfiniBand registers buffers by locking them."""
    if not facts.has_infiniband or facts.locked_bytes is None or facts.locked_bytes < 0:
        return None
    if facts.locked_bytes >= 1 << 32:
        return None
    return Finding(
        "slows",
        f"A process may lock {facts.locked_bytes / 1e6:.0f} MB of memory: InfiniBand cannot "
        "register its buffers.",
        "ulimit -l unlimited (with SLURM: PropagateResourceLimitsExcept=MEMLOCK)",
    )


CHECKS: tuple[Check, ...] = (
    check_core,
    check_torch,
    check_device,
    check_apex,
    check_master,
    check_interface,
    check_transformer_engine,
    check_connections,
    *(_check_forgotten(*each) for each in _FORGOTTEN),
    check_allocator,
    check_peers,
    check_capability,
    check_nodes,
    check_shared_memory,
    check_open_files,
    check_locked_memory,
)


def examine(facts: Facts) -> list[Finding]:
    """Return all findings, those that break a run first."""
    found = [finding for check in CHECKS if (finding := check(facts)) is not None]
    return sorted(found, key=lambda finding: finding.effect)


def describe(facts: Facts) -> dict[str, str]:
    """Return what was found, by name, in words."""
    gpus = f"{len(facts.gpus)} x {facts.gpus[0]}" if facts.gpus else ""
    report = "missing " + ", ".join(facts.report_needs) if facts.report_needs else "available"
    return {
        "Python": facts.python,
        "torch": facts.torch,
        "CUDA": f"{facts.cuda}, {gpus}" if facts.cuda else "no device: runs on CPUs over gloo",
        "NCCL": facts.nccl or "not in this torch",
        "megatron-core": facts.megatron_core or "not found",
        "Transformer Engine": facts.transformer_engine or "not found: experts use torch",
        "NVIDIA Apex": facts.apex or "not found: Megatron uses torch instead",
        "DeepEP": "found (its flex dispatcher is not supported yet)"
        if facts.deep_ep
        else "not found",
        "HTML report": report,
        "host": f"{facts.host}, {os.cpu_count()} CPUs, "
        + ("InfiniBand" if facts.has_infiniband else "no InfiniBand"),
        "job": f"{facts.num_nodes} node{'s' * (facts.num_nodes > 1)}, "
        f"{facts.environment.get('WORLD_SIZE', '1')} ranks",
    }

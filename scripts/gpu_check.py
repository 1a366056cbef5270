# SPDX-License-Identifier: Apache-2.0

"""Check on one GPU what CI cannot: correct on CUDA tensors, and no host synchronisation.

    python scripts/gpu_check.py [--device cuda]

Checks, each against the CPU or numpy: the quotas, the routing translation and the grouped GEMM.
Slots on Transformer Engine's experts must compute what its own do, in bf16 and in the fp8 formats
of the device, where it is installed; --only-te checks them alone.
Quotas and translation run under torch's synchronisation guard, which raises where an operation
waits for the device. Copies on the side stream must give the bits of copies without overlap, and of
a second process under CUDA_LAUNCH_BLOCKING=1. Where DeepEP or HybridEP is installed and there are
two GPUs, the flex dispatcher must agree with all-to-all; else the table says why not.

Prints a table with times at 256 experts, 8 of 256, 16k tokens, and what the fullest rank's experts
take under EP and under FSSDP; exits with 1 if a check failed. `--device cpu` runs the same
comparisons without the guard.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from gpu_check_copies import check_streams, digest, replayed_shares
from gpu_check_flex import BUFFERS, check_flex, obstacle
from gpu_check_te import check_te
from gpu_check_told import check_told
from rich.console import Console
from rich.table import Table

from megatron_fssdp.experts.compute import RowGroups, grouped_linear
from megatron_fssdp.experts.quotas import DEVICE_TURNS, DeviceTables, send_array, split_tokens
from megatron_fssdp.experts.routing import translate_routing
from megatron_fssdp.planning.plan import LayerPlan
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.quotas import balance, messages_of, rank_loads, split_source
from megatron_fssdp.planning.sharding import shard_evenly
from megatron_fssdp.planning.topology import Topology

RANKS, EXPERTS, TOPK, TOKENS, NODE = 64, 256, 8, 16384, 8


@contextlib.contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """Raise where a torch operation synchronises the host with the device."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def best_ms(action: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the least milliseconds of some runs, the device's work included; on a CPU one runs."""
    times = []
    for _ in range(repeats if device.type == "cuda" else 1):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def make_case() -> tuple[LayerPlan, tuple[int, ...], np.ndarray]:
    """Return a plan of skewed loads, the nodes, and counts that differ from the predicted ones."""
    rng = np.random.default_rng(0)
    share = np.arange(1, EXPERTS + 1) ** -1.0
    share = rng.permutation(share / share.sum())
    topology = Topology.uniform(RANKS, NODE)
    load_LE = rng.multinomial(RANKS * TOKENS * TOPK, share)[None]
    plan = plan_layers(
        load_LE, shard_evenly(1, EXPERTS, RANKS), topology, PlanSettings(num_replica_slots=2)
    ).layer(0)
    drifted = share * rng.uniform(0.8, 1.2, EXPERTS)
    counts_RE = rng.multinomial(TOKENS * TOPK, drifted / drifted.sum(), size=RANKS)
    return plan, topology.node_of_rank, counts_RE.astype(np.int64)


def check_quotas(device: torch.device) -> tuple[bool, float]:
    """Compare the device's quotas with numpy's, for three source ranks."""
    plan, nodes, counts_RE = make_case()
    tables = DeviceTables.build(plan, nodes, device)
    counts = torch.from_numpy(counts_RE).to(device)
    quota_EI = balance(counts_RE, plan, nodes, turns=DEVICE_TURNS)
    is_equal = True
    for source in (0, RANKS // 2, RANKS - 1):
        with no_synchronisation(device):
            split_EI, loads_R = split_tokens(counts, tables, source)
        want_EI = split_source(counts_RE, quota_EI, plan, nodes, source)
        is_equal &= np.array_equal(split_EI.cpu().numpy(), want_EI)
        is_equal &= np.array_equal(loads_R.cpu().numpy(), rank_loads(quota_EI, plan))
    return is_equal, best_ms(lambda: split_tokens(counts, tables, 0), device)


def check_host_quotas(device: torch.device) -> tuple[bool, float]:
    """Make quotas as training does: counts to the host, quotas there, the split to the device."""
    plan, nodes, counts_RE = make_case()
    counts = torch.from_numpy(counts_RE).to(device)

    def split() -> torch.Tensor:
        here = counts.cpu().numpy()
        quota_EI = balance(here, plan, nodes)
        return send_array(messages_of(here, quota_EI, plan, nodes, 0).split_EI, device)

    want_EI = split_source(counts_RE, balance(counts_RE, plan, nodes), plan, nodes, 0)
    return np.array_equal(split().cpu().numpy(), want_EI), best_ms(split, device)


def check_translation(device: torch.device) -> tuple[bool, float]:
    """Compare the device's routing translation with the CPU's."""
    plan, nodes, _ = make_case()
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK, dim=1).indices
    routing = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)
    probs = torch.rand(TOKENS, EXPERTS, generator=generator) * routing
    counts_RE = routing.sum(0).repeat(RANKS, 1).numpy()
    quota_EI = balance(counts_RE, plan, nodes)
    split = torch.from_numpy(split_source(counts_RE, quota_EI, plan, nodes, 0))
    physical = torch.from_numpy(np.maximum(plan.instance_physical_EI, 0))
    num_physical = plan.num_ranks * plan.num_slots

    def translate(where: torch.device) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        moved = [tensor.to(where) for tensor in (routing, probs, split, physical)]
        return lambda: translate_routing(moved[0], moved[1], moved[2], moved[3], num_physical)

    on_device = translate(device)
    with no_synchronisation(device):
        got_map, got_probs = on_device()
    want_map, want_probs = translate(torch.device("cpu"))()
    is_equal = torch.equal(got_map.cpu(), want_map) and torch.equal(got_probs.cpu(), want_probs)
    return is_equal, best_ms(on_device, device)


def check_grouped_gemm(device: torch.device) -> tuple[bool, float]:
    """Compare bf16 grouped GEMMs, forward and backward, with fp32 ones; empty slots included."""
    torch.manual_seed(0)
    counts = torch.tensor([4096, 0, 1, 2047, 0, 2048])
    rows = torch.randn(int(counts.sum()), 512)
    weights = [torch.randn(256, 512) for _ in counts]

    def run(dtype: torch.dtype, where: torch.device) -> list[torch.Tensor]:
        inputs = [each.to(where, dtype).requires_grad_() for each in (rows, *weights)]
        output = grouped_linear(inputs[0], inputs[1:], RowGroups(counts, where))
        return [output, *torch.autograd.grad(output.sum(), inputs)]

    got, want = run(torch.bfloat16, device), run(torch.float32, torch.device("cpu"))
    # bf16 keeps 8 bits; errors of a dot product grow with the root of its length.
    is_close = len(got) == len(want) and all(
        torch.allclose(ours.float().cpu(), theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())
        for ours, theirs in zip(got, want, strict=True)
    )
    return is_close, best_ms(lambda: run(torch.bfloat16, device), device)


def check_blocking(device: torch.device) -> tuple[bool, float]:
    """Compare the bits of this process with those of one that waits for each kernel."""
    ours = digest(device)
    start = time.perf_counter()
    answer = subprocess.run(
        [sys.executable, __file__, "--device", device.type, "--digest"],
        env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    is_equal = answer.stdout.split()[-1:] == [ours]
    if not is_equal:
        print(answer.stdout, answer.stderr, file=sys.stderr)
    return is_equal, 1e3 * (time.perf_counter() - start)


def print_shares(device: torch.device) -> None:
    """Print what the fullest rank's experts take under EP and under FSSDP."""
    plan, nodes, counts_RE = make_case()
    small = device.type != "cuda"
    if small:
        counts_RE = counts_RE // 512
    width = 64 if small else 2048
    ep_ms, fssdp_ms = replayed_shares(plan, nodes, counts_RE, device, best_ms, width)
    owned = np.bincount(plan.owner_E, weights=counts_RE.sum(axis=0))
    print(
        f"experts of the fullest rank, {int(owned.mean())} tokens a rank, width {width}: "
        f"EP {ep_ms:.2f} ms, FSSDP {fssdp_ms:.2f} ms, {ep_ms / fssdp_ms:.2f} x "
        f"(ideal {owned.max() / owned.mean():.2f} x)"
    )


def _add_checks(table: Table, device: torch.device) -> bool:
    """Run the checks that need no Transformer Engine."""
    all_good = True
    for title, check in (
        (f"quotas of {RANKS} ranks, {EXPERTS} experts, on the host", check_host_quotas),
        ("the same on the device", check_quotas),
        ("dispatcher, told what a stock one asks for", check_told),
        (f"translation of {TOKENS} tokens, top-{TOPK}", check_translation),
        ("grouped GEMM, 8192 rows, forward + backward", check_grouped_gemm),
        ("copies: overlap and re-materialization", check_streams),
        ("copies: with and without CUDA_LAUNCH_BLOCKING", check_blocking),
    ):
        is_good, milliseconds = check(device)
        all_good &= is_good
        table.add_row(title, "equal" if is_good else "WRONG", f"{milliseconds:.2f}")
    for backend in BUFFERS:
        title = f"flex dispatcher, {backend}"
        if reason := obstacle(backend):
            table.add_row(title, reason, "")
            continue
        is_good, milliseconds = check_flex(backend)
        all_good &= is_good
        table.add_row(title, "equal" if is_good else "WRONG", f"{milliseconds:.2f}")
    return all_good


def main() -> int:
    """Run all checks and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to compare without a GPU")
    parser.add_argument("--digest", action="store_true", help="print a checksum of a run, and end")
    parser.add_argument("--only-te", action="store_true", help="check Transformer Engine alone")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is available; run this on a machine that has one", file=sys.stderr)
        return 2
    if args.digest:
        print(digest(device))
        return 0
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    table = Table(title=f"{name}, torch {torch.__version__}")
    for column in ("check", "result", "ms"):
        table.add_column(column, justify="left" if column == "check" else "right")
    all_good = args.only_te or _add_checks(table, device)
    results = list(check_te(device))
    for title, is_right, reason in results:
        all_good &= is_right is not False
        result = "skipped" if is_right is None else "equal" if is_right else "WRONG"
        table.add_row(f"{title}: {reason}" if reason else title, result, "")
    Console().print(table)
    if not args.only_te:
        print_shares(device)
    elif all(is_right is None for _, is_right, _ in results):
        print("nothing was checked", file=sys.stderr)
        return 2
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())

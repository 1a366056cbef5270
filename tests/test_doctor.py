"""Each of the doctor's checks, alone: when it speaks, when it is silent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from megatron_fssdp.cli import app
from megatron_fssdp.integration import versions
from megatron_fssdp.integration.versions import SUPPORTED_CORES_TEXT
from megatron_fssdp.tools import doctor
from megatron_fssdp.tools.doctor import Facts, describe, examine

# A machine with nothing to complain about.
GOOD = Facts(
    torch="2.13.0+cu130", cuda="13.0", nccl="2.29.7", megatron_core="0.19.2",
    is_core_supported=True, supported_cores="megatron-core >= 0.19, < 0.21",
    transformer_engine="2.20", gpus=("NVIDIA H100",) * 8, capability=(9, 0), has_driver=True,
    has_infiniband=True, host="node7", shm_bytes=1 << 36, open_files=1 << 20, locked_bytes=-1,
    environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "SLURM_JOB_NUM_NODES": "4",
                 "MASTER_ADDR": "node0"},
)  # fmt: skip


def with_environment(**variables: str) -> Facts:
    return replace(GOOD, environment={**GOOD.environment, **variables})


# What is wrong, what it does, and a word of the sentence and of the fix.
CASES: dict[str, tuple[Facts, str, str, str]] = {
    "core": (replace(GOOD, is_core_supported=False, megatron_core="0.18.0"), "breaks",
             "megatron-core 0.18.0. Not supported", "pip install 'megatron-core>=0.19"),
    "no core": (replace(GOOD, is_core_supported=False, megatron_core=None), "breaks",
                "no megatron-core", "pip install"),
    "torch": (replace(GOOD, torch="2.9.1"), "breaks", "torch 2.9.1 is older", "torch>=2.10"),
    "device": (replace(GOOD, cuda=None, gpus=(), transformer_engine=None), "breaks",
               "driver is loaded, but torch finds no GPU", "torch.cuda.init"),
    "te": (replace(GOOD, transformer_engine=None), "slows", "No Transformer Engine", "[te]"),
    "apex": (replace(GOOD, has_other_apex=True), "breaks", "not NVIDIA's", "uninstall apex"),
    "connections": (with_environment(CUDA_DEVICE_MAX_CONNECTIONS="1"), "slows",
                    "kernels start in the order", "unset it, unless"),
    "blocking": (with_environment(CUDA_LAUNCH_BLOCKING="1"), "slows", "nothing overlaps", "unset"),
    "p2p": (with_environment(NCCL_P2P_DISABLE="1"), "slows", "host memory", "unset NCCL_P2P"),
    "ib": (with_environment(NCCL_IB_DISABLE="1"), "slows", "TCP sockets", "unset NCCL_IB"),
    "debug": (with_environment(TORCH_DISTRIBUTED_DEBUG="detail"), "slows", "compared", "unset"),
    "allocator": (replace(GOOD, environment={}), "slows", "fragment", "expandable_segments:True"),
    "peers": (replace(GOOD, lacks_peers=True), "slows", "each other's memory", "nvidia-smi topo"),
    "capability": (replace(GOOD, capability=(7, 0), gpus=("V100",)), "slows", "V100", "--fp16"),
    "hosts": (replace(GOOD, host="localhost"), "slows", "has 4 nodes", "--fssdp-ranks-per-node"),
    "master": (with_environment(MASTER_ADDR="127.0.0.1"), "breaks", "waits for itself", "scontrol"),
    "interface": (with_environment(NCCL_SOCKET_IFNAME="=lo"), "breaks", "is lo", "unset it"),
    "shm": (replace(GOOD, shm_bytes=64 << 20), "slows", "/dev/shm has 67 MB", "--shm-size"),
    "files": (replace(GOOD, open_files=1024), "slows", "may open 1024 files", "ulimit -n"),
    "locked": (replace(GOOD, locked_bytes=65536), "slows", "InfiniBand cannot", "ulimit -l"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_check_speaks_of_its_own_fault_alone(name: str) -> None:
    facts, effect, what, fix = CASES[name]
    (finding,) = examine(facts)
    assert finding.effect == effect
    assert what in finding.what
    assert fix in finding.fix


@pytest.mark.parametrize(
    "facts",
    [
        GOOD,
        # Hidden on purpose.
        replace(GOOD, cuda=None, gpus=(), environment={"CUDA_VISIBLE_DEVICES": ""}),
        # No GPU machine at all.
        replace(GOOD, cuda=None, gpus=(), has_driver=False, transformer_engine=None),
        # One node may call itself what it likes.
        replace(GOOD, host="localhost", environment={**GOOD.environment,
                "SLURM_JOB_NUM_NODES": "1", "MASTER_ADDR": "localhost"}),
        with_environment(NCCL_P2P_DISABLE="0", CUDA_DEVICE_MAX_CONNECTIONS="8"),
        replace(GOOD, has_infiniband=False, locked_bytes=65536),
        replace(GOOD, open_files=-1),
    ],
)  # fmt: skip
def test_silence_where_all_is_well(facts: Facts) -> None:
    assert examine(facts) == []


def test_every_check_has_a_case() -> None:
    spoken = {finding.what for facts, *_ in CASES.values() for finding in examine(facts)}
    assert len(spoken) == len(CASES)
    # The forgotten variables share a function; the others are named here one by one.
    named = {check for check in doctor.CHECKS if check.__name__ != "check"}
    silent = [
        check.__name__ for check in named if not any(check(facts) for facts, *_ in CASES.values())
    ]
    assert silent == []


def test_breaks_come_first() -> None:
    facts = replace(GOOD, shm_bytes=1, has_other_apex=True, open_files=1, torch="2.1")
    assert [finding.effect for finding in examine(facts)] == ["breaks"] * 2 + ["slows"] * 2


def test_facts_in_words() -> None:
    told = describe(GOOD)
    assert told["CUDA"] == "13.0, 8 x NVIDIA H100"
    assert told["job"].startswith("4 nodes")
    assert describe(replace(GOOD, report_needs=("jinja2",)))["HTML report"] == "missing jinja2"


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine; what breaks decides the exit code, and Megatron's warnings are not shown."""
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for name in ("torch", "CUDA", "NCCL", "megatron-core", "Transformer Engine", "DeepEP", "host"):
        assert f"\n{name} " in result.output
    assert f"Supported: {SUPPORTED_CORES_TEXT}." in result.output
    assert "UserWarning" not in result.output

    monkeypatch.setattr(versions, "core_version", lambda: "0.16.0")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "BREAKS: megatron-core 0.16.0. Not supported" in result.output
    assert "fix: pip install" in result.output

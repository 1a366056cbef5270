"""`fssdp train`: the command it prints and becomes, and what it refuses."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_fssdp.cli import app
from megatron_fssdp.presets.command import Request, build_command
from megatron_fssdp.presets.files import CONFIGS, from_words

ROOT = CONFIGS.resolve().parent
MIXTRAL = ("--preset", "mixtral_8x7b", "--nodes", "4")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pretrain_gpt.py is."""
    monkeypatch.chdir(ROOT)


def run(*words: str, **env: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["train", *words], env={"MASTER_ADDR": None, **env})
    return result.exit_code, result.stdout, result.stderr


def split(shell: str) -> list[str]:
    """Split as a shell does; shlex keeps the newlines of continued lines."""
    return shlex.split(shell.replace("\\\n", " "))


def flags_of(shell: str) -> dict[str, Any]:
    """The script's flags in a printed command."""
    words = split(shell)
    return from_words(words[words.index("pretrain_gpt.py") + 1 :])


def test_dry_run_prints_a_command_for_a_shell() -> None:
    status, printed, notes = run(*MIXTRAL, "--dry-run")
    assert status == 0
    assert "no --data-path: the run trains on Megatron's mock data" in notes
    lines = printed.splitlines()
    assert lines[:3] == [
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \\",
        "NCCL_NVLS_ENABLE=0 \\",
        "NCCL_P2P_NET_CHUNKSIZE=2097152 \\",
    ]
    assert lines[3] == (
        f"{sys.executable} -m torch.distributed.run --nproc-per-node 8 --nnodes 4 --node-rank "
        '"$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port 29500 -m megatron_fssdp.launch '
        "pretrain_gpt.py \\"
    )
    flags = flags_of(printed)
    expected = {
        "--num-layers": 32, "--swiglu": True, "--pipeline-model-parallel-size": 4,
        "--num-virtual-stages-per-pipeline-rank": 8, "--moe-parallel": "fssdp",
        "--fssdp-rematerialize": True, "--mock-data": True, "--tokenizer-type": "NullTokenizer",
        "--vocab-size": 31999,
    }  # fmt: skip
    assert {flag: flags.get(flag) for flag in expected} == expected


def test_plain_ep_gets_no_fssdp_flags() -> None:
    _, printed, _ = run(*MIXTRAL, "--moe-parallel", "ep", "--cluster", "h200_dgx", "--dry-run")
    flags = flags_of(printed)
    assert flags["--moe-parallel"] == "ep"
    assert [flag for flag in flags if flag.startswith("--fssdp")] == []


def test_the_user_wins_over_the_layout_and_the_layout_over_the_preset() -> None:
    words = ["--set", "--lr=3e-5", "--set", "--log-throughput=false", "--set", "--seq-length 2048"]
    words += ["--data-path", "0.3 a 0.7 b", "--dry-run", "--", "--lr", "1e-5", "--finetune"]
    _, printed, notes = run(*MIXTRAL, *words, "--num-virtual-stages-per-pipeline-rank", "4")
    flags = flags_of(printed)
    assert notes == ""
    assert flags["--lr"] == "1e-5"
    assert flags["--seq-length"] == 2048
    assert flags["--finetune"] is True
    assert flags["--num-virtual-stages-per-pipeline-rank"] == 4
    assert flags["--data-path"] == ["0.3", "a", "0.7", "b"]
    assert flags["--tokenizer-model"] == "mistralai/Mixtral-8x7B-v0.1"
    assert not {"--log-throughput", "--mock-data", "--vocab-size"} & set(flags)


def test_one_node_needs_no_address() -> None:
    _, printed, _ = run("--preset", "deepseek_v2_lite", "--dry-run")
    assert "--nproc-per-node 8 --standalone -m megatron_fssdp.launch" in printed


@pytest.mark.parametrize(
    ("cluster", "settings", "expected"),
    [
        ("h100_dgx", (), None),
        ("h100_dgx", ("--tensor-model-parallel-size=2", "--sequence-parallel"), "1"),
        ("h100_dgx", ("--context-parallel-size=2",), "1"),
        ("gb200_nvl72", ("--tensor-model-parallel-size=2", "--sequence-parallel"), None),
    ],
)
def test_one_queue_only_where_megatron_needs_it(
    cluster: str, settings: tuple[str, ...], expected: str | None
) -> None:
    """Fault 60: CUDA_DEVICE_MAX_CONNECTIONS=1 everywhere hides no communication."""
    whole_experts = ("--expert-tensor-parallel-size=1",)
    request = Request(
        preset="deepseek_v2_lite", num_nodes=2, cluster=cluster, settings=whole_experts + settings
    )
    assert build_command(request).env.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


def test_cluster_reaches_the_cost_model() -> None:
    hosts_of_4 = {"num_nodes": 4, "gpus_per_node": 4, "preset": "qwen3_30b_a3b"}
    words = build_command(Request(cluster="gb200_nvl72", **hosts_of_4)).words
    flags = from_words(words[words.index("pretrain_gpt.py") + 1 :])
    assert flags["--fssdp-cluster"] == str(CONFIGS / "clusters" / "gb200_nvl72.yaml")
    # 4 hosts behind one NVLink switch are one node.
    assert flags["--fssdp-ranks-per-node"] == 16
    assert (
        "--fssdp-ranks-per-node"
        not in build_command(Request(cluster="h200_dgx", **hosts_of_4)).words
    )


def test_memory_is_checked_against_the_cluster() -> None:
    status, _, message = run("--preset", "mixtral_8x7b", "--dry-run")
    assert status == 2
    assert (
        "mixtral_8x7b does not fit 8 GPUs: weights, gradients and optimizer state 114 GB" in message
    )
    assert "a GPU of h100_dgx has 80 GB, 4 of them for CUDA and NCCL. Use more nodes" in message
    assert run("--preset", "mixtral_8x7b", "--cluster", "h200_dgx", "--dry-run")[0] == 0
    assert run("--preset", "mixtral_8x7b", "--no-check-memory", "--dry-run")[0] == 0
    _, _, notes = run("--preset", "qwen3_235b_a22b", "--nodes", "8", "--dry-run")
    assert "may run out of memory" in notes


def test_gpus_without_bf16_say_what_to_set() -> None:
    words = ("--preset", "gpt_moe_s", "--nodes", "4", "--cluster", "v100_32g", "--dry-run")
    status, _, message = run(*words)
    assert status == 2
    assert "compute capability 7.0) have neither bf16 nor grouped products" in message
    way_out = message[message.index("--set") :].split()
    status, printed, _ = run(*words, *way_out)
    assert status == 0
    assert not {"--bf16", "--moe-grouped-gemm"} & set(flags_of(printed))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--preset", "mixtral"), "no model named 'mixtral' and no file of that name; use one of"),
        ((*MIXTRAL, "--cluster", "dgx"), "no cluster named 'dgx'"),
        (
            ("--preset", "mixtral_8x7b", "--nodes", "3"),
            "24 GPUs are not a multiple of EP x ETP x PP",
        ),
        (("--preset", "deepseek_v3"), "DeepSeek-V3 does not fit 8 GPUs"),
        ((*MIXTRAL, "--set", "lr=1"), "'lr=1' is no flag; flags start with --"),
        ((*MIXTRAL, "--set", "--lr"), "--lr needs a value, such as --lr=1e-4; --lr=false drops"),
        ((*MIXTRAL, "--set", "--swiglu="), "--swiglu needs a value; --swiglu=false drops it"),
        (
            (*MIXTRAL, "--set", "--micro-batch-size=abc"),
            "--micro-batch-size abc: give it a whole number of at least 1",
        ),
        ((*MIXTRAL, "--set", "--global-batch-size=0"), "--global-batch-size 0: give it a whole"),
        (
            (*MIXTRAL, "--set", "--fssdp-num-replica-slot=2"),
            "there is no flag --fssdp-num-replica-slot; did you mean --fssdp-num-replica-slots.",
        ),
        ((*MIXTRAL, "--set", "--fssdp-reshard=3"), "did you mean --fssdp-reshard-interval."),
        (
            (*MIXTRAL, "--set", "--fssdp-num-replica-slots=+3"),
            "--fssdp-num-replica-slots is '+3'; use a whole number",
        ),
        (
            (*MIXTRAL, "--set", "--fssdp-num-replica-slots=8"),
            "--fssdp-num-replica-slots 8 is more than the 7 experts that a rank does not own",
        ),
        ((*MIXTRAL, "--set", "--num-experts=false"), "--num-experts is not given; give it, or"),
        ((*MIXTRAL, "--set", "--fssdp-cluster=no.yaml"), "there is no cluster file no.yaml"),
        ((*MIXTRAL, "--set", "--fssdp-owners=no.json"), "there is no file no.json"),
        ((*MIXTRAL, "--set", "--=3"), "'--' is no flag; flags start with --, and a small letter"),
        (
            (*MIXTRAL, "--master-addr", "a", "--node-rank", "4"),
            "--node-rank is 4; with --nodes 4 use 0 to 3",
        ),
        ((*MIXTRAL, "--set", "--fssdp-log-plan=x"), "--fssdp-log-plan is 'x'; use a whole number"),
        ((*MIXTRAL, "--set", "--fssdp-log-plan=-1"), "--fssdp-log-plan is -1; use 0 to 1000000000"),
        (
            (*MIXTRAL, "--set", "--fssdp-balance-tolerance=nan"),
            "--fssdp-balance-tolerance is nan; use 0 to 10",
        ),
        ((*MIXTRAL, "--set", "--fssdp-overlap=maybe"), "--fssdp-overlap is 'maybe'; use on or off"),
        ((*MIXTRAL, "--set", "--fssdp-planner"), "--fssdp-planner needs one value"),
        (
            (*MIXTRAL, "--set", "--fssdp-rematerialize=yes"),
            "--fssdp-rematerialize takes no value; it is given 'yes'",
        ),
        ((*MIXTRAL, "--data-path", '"x'), '--data-path "x: No closing quotation'),
        ((*MIXTRAL, "--set", '"--lr'), '--set "--lr: No closing quotation'),
        ((*MIXTRAL, "--script", "none.py"), "there is no file none.py; give Megatron-LM's or"),
        (MIXTRAL, "4 nodes find each other by --master-addr (or the variable MASTER_ADDR)"),
        ((*MIXTRAL, "--master-addr", "a"), "4 nodes find each other by --node-rank"),
        ((*MIXTRAL, "--launcher", "srun"), "SLURM_PROCID is not set; start it with srun"),
    ],
)
def test_refused(words: tuple[str, ...], message: str) -> None:
    status, printed, errors = run(*words)
    assert (status, printed) == (2, "")
    assert message in " ".join(errors.split())


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the process would have become: program, words, environment."""
    calls: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    return calls


def test_it_becomes_what_it_printed(became: list[Any]) -> None:
    words = (*MIXTRAL, "--master-addr", "node0", "--node-rank", "0")
    status, printed, _ = run(*words, NCCL_NVLS_ENABLE="1")
    assert status == 0
    ((program, argv, env),) = became
    assert program == sys.executable
    spelled = split(printed)
    assert spelled[spelled.index(sys.executable) :] == argv
    assert env["NCCL_P2P_NET_CHUNKSIZE"] == "2097152"
    assert env["NCCL_NVLS_ENABLE"] == "1", "the user's own value wins"
    # Other nodes do the same in silence.
    assert run(*words[:-1], "1")[1] == ""


def test_a_task_of_srun_is_one_rank(became: list[Any]) -> None:
    slurm = {"SLURM_PROCID": "13", "SLURM_LOCALID": "5", "SLURM_NTASKS": "32", "SLURM_NODEID": "1"}
    words = (*MIXTRAL, "--launcher", "srun")
    status, printed, _ = run(*words, **slurm, MASTER_ADDR="node0", MASTER_PORT="2999")
    assert (status, printed) == (0, "")
    ((_, argv, env),) = became
    assert argv[1:4] == ["-m", "megatron_fssdp.launch", "pretrain_gpt.py"]
    ranks = {"RANK": "13", "LOCAL_RANK": "5", "WORLD_SIZE": "32", "MASTER_ADDR": "node0"}
    ranks["MASTER_PORT"] = "2999"
    assert {name: env[name] for name in ranks} == ranks


@pytest.mark.parametrize(
    ("launcher", "num_tasks", "message"),
    [
        ("srun", "4", "4 nodes x 8 GPUs, and srun started 4 tasks; set --ntasks-per-node=8"),
        ("torchrun", "32", "srun started 32 tasks on 4 nodes; set --ntasks-per-node=1, or use"),
    ],
)
def test_tasks_must_match_the_launcher(launcher: str, num_tasks: str, message: str) -> None:
    """Fault 62: torchrun in each of a node's 8 tasks starts 64 ranks there."""
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": num_tasks}
    words = (*MIXTRAL, "--launcher", launcher)
    status, _, errors = run(*words, **slurm, SLURM_NODEID="0", MASTER_ADDR="node0")
    assert status == 2
    assert message in " ".join(errors.split())


def test_srun_needs_an_address() -> None:
    """Fault 61: an empty address must not reach the ranks."""
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "32", "MASTER_ADDR": ""}
    status, _, errors = run(*MIXTRAL, "--launcher", "srun", **slurm)
    assert status == 2
    assert "MASTER_ADDR is not set" in errors

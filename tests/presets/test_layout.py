"""Layouts: they divide, they fit, and bad ones are refused with the numbers."""

from __future__ import annotations

import pytest

from megatron_fssdp.presets.files import (
    CONFIGS,
    Args,
    choose_layout,
    find_file,
    list_names,
    merge,
    read_preset,
)
from megatron_fssdp.presets.layout import Memory, estimate_memory, read_layout
from megatron_fssdp.presets.sizes import RESERVED_BYTES, count_parameters
from megatron_fssdp.simulation.cluster import load_cluster

GB = 1e9
# Layouts that need more than the 80 GB of an A100 or H100, as the model files say.
LARGE = {
    ("mixtral_8x7b", 8),
    ("mixtral_8x22b", 32),
    ("qwen3_30b_a3b", 8),
    ("qwen3_235b_a22b", 64),
    ("deepseek_v3", 128),
}


PRESETS = {name: read_preset(name) for name in list_names("models")}
# Every model on every power of two of nodes from its smallest layout to 64.
CASES = [
    (name, num_gpus)
    for name, preset in PRESETS.items()
    for num_gpus in (8, 16, 32, 64, 128, 256, 512)
    if num_gpus >= min(preset.layouts)
]


def args_for(name: str, num_gpus: int) -> Args:
    preset = PRESETS[name]
    fssdp = {"--moe-parallel": "fssdp", **preset.fssdp_args_for(num_gpus)}
    return merge([preset.args, fssdp, choose_layout(preset, num_gpus)])


@pytest.mark.parametrize(("name", "num_gpus"), CASES)
def test_layouts_divide_and_fit(name: str, num_gpus: int) -> None:
    args = args_for(name, num_gpus)
    layout = read_layout(args, num_gpus)
    assert layout.tp * layout.pp * layout.cp * layout.dp == num_gpus
    assert layout.ep * layout.etp * layout.pp * layout.edp == num_gpus
    assert layout.etp == 1, "--moe-parallel fssdp takes whole experts"
    assert sum(layout.layers_P) == args["--num-layers"]
    memory = estimate_memory(args, num_gpus)
    is_large = (name, num_gpus) in LARGE
    assert (80 * GB if is_large else 0) < memory.total < (141 if is_large else 80) * GB


def presets_table() -> str:
    """Build the README's table: from how many nodes on a model fits GPUs of 80 and 141 GB."""
    lines = ["| preset | published parameters | nodes of 8 GPUs, 80 GB each | with 141 GB |"]
    lines.append("| --- | --- | --- | --- |")
    for name, preset in PRESETS.items():
        published = preset.parameters["total"] / 1e9
        worlds = [num_gpus for other, num_gpus in CASES if other == name]
        needs = {gpus: estimate_memory(args_for(name, gpus), gpus).total for gpus in worlds}
        least = [min(g for g, need in needs.items() if need < size * GB) // 8 for size in (80, 141)]
        cells = " | ".join(f"{nodes} to 64" for nodes in least)
        lines.append(f"| `{name}` | {published:g} B | {cells} |")
    return "\n".join(lines)


def test_readmes_table_is_current() -> None:
    readme = (CONFIGS.resolve().parent / "README.md").read_text()
    assert presets_table() in readme, f"the README's table should be\n\n{presets_table()}\n"


def test_the_papers_models_fit_the_papers_clusters() -> None:
    for name in ("gpt_moe_s", "gpt_moe_l", "bert_moe", "bert_moe_deep"):
        assert estimate_memory(args_for(name, 32), 32).total < 32 * GB


@pytest.mark.parametrize("name", PRESETS)
def test_active_parameters(name: str) -> None:
    """Published to two digits; some publishers leave the embedding out, some do not."""
    preset = PRESETS[name]
    published, sizes = preset.parameters.get("active"), count_parameters(preset.args)
    if published is not None:
        counts = (sizes.active, sizes.active - sizes.embedding)
        assert min(abs(count / published - 1) for count in counts) < 0.025


def test_memory_of_a_small_model_by_hand() -> None:
    """4 layers on 2 stages; 8 GPUs = 2 stages x EP 2 x EDP 2; one expert has 2 * 8 * 16 numbers."""
    args: Args = {
        "--num-layers": 4, "--hidden-size": 8, "--ffn-hidden-size": 16, "--num-attention-heads": 2,
        "--num-experts": 4, "--moe-router-topk": 1, "--seq-length": 4, "--padded-vocab-size": 10,
        "--max-position-embeddings": 4, "--position-embedding-type": "rope", "--bf16": True,
        "--micro-batch-size": 1, "--global-batch-size": 8, "--disable-bias-linear": True,
        "--pipeline-model-parallel-size": 2, "--expert-model-parallel-size": 2,
        "--use-distributed-optimizer": True, "--untie-embeddings-and-output-weights": True,
        "--normalization": "RMSNorm", "--moe-parallel": "fssdp", "--fssdp-num-replica-slots": 1,
    }  # fmt: skip
    sizes = count_parameters(args)
    expert, layer, norm = 2 * 8 * 16, 4 * 8 * 8 + 2 * 8 + 8 * 4, 8
    assert (sizes.expert, sizes.dense, sizes.experts) == (expert, 4 * layer, 16 * expert)
    assert (sizes.embedding, sizes.output) == (80, 80 + norm)
    memory = estimate_memory(args, 8)
    # The first stage is the fullest, with 2 layers and the embedding: bf16 weights, fp32 gradients,
    # and 12 bytes of optimizer state over DP 4 and EDP 2. Each rank has 2 of 4 experts.
    dense, experts = 2 * layer + 80, 2 * 2 * expert
    assert memory.state == dense * (6 + 12 / 4) + experts * (6 + 12 / 2)
    # One slot in each of 2 layers; with 2 micro-batches gradients are kept, too.
    assert memory.replicas == 2 * expert * 6
    # Attention keeps 3 * 8 + 8 * 4 numbers of 2 bytes a token, the MoE layer 8, and of its expert
    # 2 * 8 + 2 * 16; 4 tokens, 2 layers, and 2 micro-batches until the first backward.
    assert memory.activations == 2 * 2 * 4 * 2 * (56 + 8 + 48)
    one_layer = {**args, "--fssdp-rematerialize": True}
    assert estimate_memory(one_layer, 8).replicas == expert * 6
    assert estimate_memory({**args, "--moe-parallel": "ep"}, 8).replicas == 0


@pytest.mark.parametrize(
    ("changes", "num_gpus", "message"),
    [
        ({}, 12, r"12 GPUs are not a multiple of TP x PP x CP = 8"),
        ({"--expert-model-parallel-size": 16}, 64, "64 GPUs .* EP x ETP x PP = 128"),
        ({"--num-experts": 12}, 64, "--num-experts 12 is not a multiple of --expert-model-par.* 8"),
        ({"--num-layers": 60}, 64, "--num-layers 60 do not split over .* 8"),
        ({"--decoder-first-pipeline-num-layers": 4}, 64, r"56 do not split .* with \[4\] layers"),
        (
            {"--tensor-model-parallel-size": 3, "--pipeline-model-parallel-size": 1},
            96,
            "TP x PP x CP|EP x ETP x PP|--num-attention-heads|--padded-vocab-size",
        ),
        ({"--tensor-model-parallel-size": 2}, 128, "2 trains MoE layers only with --sequence-par"),
        ({"--global-batch-size": 20}, 64, "--global-batch-size 20 .* 1 x 8 data-parallel replicas"),
        (
            {"--num-virtual-stages-per-pipeline-rank": 7, "--global-batch-size": 32},
            64,
            "needs a multiple of --pipeline-model-parallel-size 8 as micro-batches, not 4",
        ),
    ],
)
def test_bad_layouts_are_refused(changes: Args, num_gpus: int, message: str) -> None:
    """Fault 63: sizes that do not divide surfaced as hangs of the first collective."""
    with pytest.raises(ValueError, match=message):
        read_layout({**args_for("mixtral_8x22b", 64), **changes}, num_gpus)


def test_layer_patterns() -> None:
    args = args_for("deepseek_v3", 512)
    assert count_parameters(args).is_moe_L == (False,) * 3 + (True,) * 58
    every_other = count_parameters({**args, "--moe-layer-freq": 2}).is_moe_L
    assert every_other[:3] == (True, False, True)
    for wrong in ("[0]*3", "__import__('os')", "([1]*60)+['x']"):
        with pytest.raises(ValueError, match="--moe-layer-freq"):
            count_parameters({**args, "--moe-layer-freq": wrong})


def test_the_reserve_is_the_same_everywhere() -> None:
    """`train`'s estimate adds what `simulate` and `tune` leave free."""
    cluster = load_cluster(find_file("clusters", "h100_dgx"))
    assert cluster.memory_bytes is not None
    assert cluster.usable_bytes == cluster.memory_bytes - RESERVED_BYTES == 76e9
    assert Memory(state=0, replicas=0, activations=76e9).total == cluster.memory_bytes

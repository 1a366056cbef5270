"""Model and cluster files: what they hold, how they become flags, and that a wheel has them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from megatron_fssdp.planning.topology import read_cluster, read_topology
from megatron_fssdp.presets.files import (
    CONFIGS,
    choose_layout,
    find_file,
    from_words,
    list_names,
    merge,
    read_preset,
    to_words,
)

ROOT = Path(__file__).parent.parent.parent
MODELS = [
    "bert_moe", "bert_moe_deep", "deepseek_v2_lite", "deepseek_v3", "gpt_moe_l", "gpt_moe_s",
    "gpt_oss_20b", "mixtral_8x22b", "mixtral_8x7b", "qwen3_235b_a22b", "qwen3_30b_a3b",
]  # fmt: skip
CLUSTERS = ["a100_dgx", "a100_hgx", "gb200_nvl72", "h100_dgx", "h200_dgx", "v100_32g"]


def test_names() -> None:
    assert list_names("models") == MODELS
    assert list_names("clusters") == CLUSTERS


@pytest.mark.parametrize("name", MODELS)
def test_models_name_their_source(name: str) -> None:
    preset = read_preset(name)
    assert preset.source["paper"]
    assert len(preset.source["training"]) > 40
    assert preset.parameters["total"] > 1e9
    assert min(preset.layouts) >= 8
    assert max(preset.layouts) <= 512


@pytest.mark.parametrize("name", MODELS)
def test_no_preset_forces_the_balance_or_hides_missing_weights(name: str) -> None:
    """Fault 48: a lenient strictness swallowed that weights were missing from a checkpoint."""
    preset = read_preset(name)
    layouts = (*preset.layouts.values(), *preset.fssdp_layouts.values())
    flags = {*preset.args, *preset.fssdp_args, *(flag for each in layouts for flag in each)}
    assert not {"--moe-router-force-load-balancing", "--dist-ckpt-strictness"} & flags


def test_balance_losses_are_those_of_the_source() -> None:
    """Qwen3's report: over the global batch; Mixtral: Megatron's value, beside the config's."""
    for name in ("qwen3_30b_a3b", "qwen3_235b_a22b"):
        args = read_preset(name).args
        assert args["--moe-router-load-balancing-type"] == "global_aux_loss"
        assert float(args["--moe-aux-loss-coeff"]) == 1e-3
    for name, published in (("mixtral_8x7b", "(0.02)"), ("mixtral_8x22b", "(0.001)")):
        preset = read_preset(name)
        assert float(preset.args["--moe-aux-loss-coeff"]) == 1e-2
        assert f"router_aux_loss_coef {published}" in preset.source["training"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_name_their_source(name: str) -> None:
    path = find_file("clusters", name)
    values = read_cluster(path)
    assert values["name"] == name
    assert len(values["source"]) > 40
    assert values["gpu"]["memory_bytes"] > 1e10
    for line in path.read_text(encoding="utf-8").splitlines():
        if "latency_s" in line or "group_floor_s" in line:
            assert "assumption" in line, line
    topology = read_topology(path, 144)
    assert topology.intra_node.bytes_per_s > topology.inter_node.bytes_per_s
    assert values["topology"]["ranks_per_node"] == (72 if name == "gb200_nvl72" else 8)


def test_words_and_back() -> None:
    args = {"--swiglu": True, "--num-layers": 4, "--lr": "1e-4", "--data-path": [1, "a", 2, "b"]}
    words = to_words(args)
    assert words == "--swiglu --num-layers 4 --lr 1e-4 --data-path 1 a 2 b".split()
    assert from_words(words) == args


def test_later_parts_win_and_false_drops() -> None:
    user = from_words(["--b=3", "--swiglu=false", "--new", "--last", "x y"])
    merged = merge([{"--a": 1, "--b": 1, "--swiglu": True}, {"--b": 2}, user])
    assert merged == {"--a": 1, "--b": 3, "--new": True, "--last": "x y"}


def test_a_word_without_flag_is_refused() -> None:
    with pytest.raises(ValueError, match="'num-layers' is no flag; flags start with --"):
        from_words(["num-layers", "4"])


def test_unknown_names_list_the_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model named 'mixtral'.*bert_moe, .*mixtral_8x7b"):
        read_preset("mixtral")
    broken = tmp_path / "broken.yaml"
    broken.write_text("MODEL_ARGS: {--num-layers: 2}")
    with pytest.raises(ValueError, match="MODEL_ARGS lacks --hidden-size, "):
        read_preset(str(broken))
    broken.write_text("model: {}")
    with pytest.raises(ValueError, match="is no model file: it has no MODEL_ARGS"):
        read_preset(str(broken))
    broken.write_text("MODEL_ARGS: {num_layers: 2}")
    with pytest.raises(ValueError, match="'num_layers' is no flag"):
        read_preset(str(broken))


def test_a_layout_serves_up_to_the_next() -> None:
    preset = read_preset("mixtral_8x7b")
    pipeline = "--pipeline-model-parallel-size"
    chosen = {gpus: choose_layout(preset, gpus).get(pipeline) for gpus in (8, 16, 24, 32, 512)}
    assert chosen == {8: None, 16: 2, 24: 2, 32: 4, 512: 4}
    with pytest.raises(ValueError, match=r"DeepSeek-V3 does not fit 64 GPUs.* for 128 GPUs"):
        choose_layout(read_preset("deepseek_v3"), 64)


def test_a_wheel_has_the_files(tmp_path: Path) -> None:
    """`configs` is a folder of the repository; an installed package has a copy."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("megatron_fssdp", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(tmp_path)],
        cwd=source,
        check=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in CONFIGS.rglob("*.yaml"):
        packed = f"megatron_fssdp/configs/{path.relative_to(CONFIGS)}"
        assert packed in names
        assert yaml.safe_load(zipfile.ZipFile(wheel).read(packed)) is not None


def test_fssdps_flags_by_nodes(tmp_path: Path) -> None:
    """From 2 nodes on 1 slot, from 4 on kept; a layout replaces, it does not add to the last."""
    values = yaml.safe_load((CONFIGS / "models" / "gpt_moe_s.yaml").read_text())
    values["FSSDP_ARGS"] = {"--fssdp-rematerialize": True}
    values["FSSDP_LAYOUTS"] = {
        4: {"--fssdp-rematerialize": False},
        2: {"--fssdp-num-replica-slots": 1},
    }
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(values))
    preset = read_preset(str(path))
    found = [merge([preset.fssdp_args_for(num_gpus)]) for num_gpus in (8, 16, 31, 32)]
    again = {"--fssdp-rematerialize": True}
    assert found == [again, *[{**again, "--fssdp-num-replica-slots": 1}] * 2, {}]
    path.write_text(yaml.safe_dump({**values, "FSSDP_LAYOUTS": {"two": {}}}))
    with pytest.raises(ValueError, match="FSSDP_LAYOUTS is no mapping from numbers of nodes"):
        read_preset(str(path))

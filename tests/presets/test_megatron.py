"""Presets against Megatron: its parser takes them, and its models have the published sizes."""

from __future__ import annotations

import pytest

from megatron_fssdp.presets.files import choose_layout, list_names, merge, read_preset, to_words
from megatron_fssdp.presets.sizes import count_parameters as count_by_arithmetic
from tests.presets.jobs import check_command_lines, count_parameters
from tests.ranks import run_ranks


def test_megatrons_parser_takes_every_preset_and_layout() -> None:
    """With its validate_args and, for FSSDP, our own checks after it."""
    commands = {}
    for name in list_names("models"):
        preset = read_preset(name)
        for num_gpus in {*preset.layouts, *preset.fssdp_layouts}:
            fssdp = {"--moe-parallel": "fssdp", **preset.fssdp_args_for(num_gpus)}
            layout = choose_layout(preset, num_gpus)
            common = merge([preset.args, layout, {"--mock-data": True}])
            commands[f"{name} {num_gpus}"] = (to_words(merge([common, fssdp])), num_gpus)
    # A flag that Megatron does not know must fail, or nothing above was checked.
    commands["unknown"] = ([*to_words(common), "--no-such-flag"], num_gpus)
    (found,) = run_ranks(1, check_command_lines, commands)
    assert "unrecognized arguments: --no-such-flag" in found.pop("unknown")
    assert {name: error for name, error in found.items() if error} == {}


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, int]]:
    """Megatron's models, all layers, on the meta device."""
    return run_ranks(1, count_parameters, list_names("models"))[0]


@pytest.mark.parametrize("name", list_names("models"))
def test_parameters_are_the_published(name: str, counts: dict[str, dict[str, int]]) -> None:
    published = read_preset(name).parameters
    parts = dict(counts[name])
    for left_out in published.get("without", []):
        parts.pop(left_out)
    assert sum(parts.values()) == pytest.approx(published["total"], rel=0.003)


@pytest.mark.parametrize("name", list_names("models"))
def test_arithmetic_counts_as_megatron(name: str, counts: dict[str, dict[str, int]]) -> None:
    """What the memory check starts from; exact."""
    sizes, args = count_by_arithmetic(read_preset(name).args), read_preset(name).args
    found = counts[name]
    assert found["expert"] == sizes.experts
    assert found["embedding"] == sizes.embedding
    assert found["mtp"] == sizes.mtp
    # The final norm is the output's here, and the decoder's in Megatron.
    dense = sizes.dense + sizes.output
    if args.get("--multi-latent-attention") and "--q-lora-rank" not in args:
        # Built without the norms of queries and keys: see tests/presets/jobs.py.
        dense -= args["--num-layers"] * (args["--hidden-size"] + args["--kv-lora-rank"])
    assert found["dense"] + found["output"] == dense

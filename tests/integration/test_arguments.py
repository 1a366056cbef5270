"""The flags: their names are frozen here, and Megatron's own parser reads them."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import fields

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_fssdp.config import FSSDPConfig, flag_of
from megatron_fssdp.integration.arguments import add_arguments, parse_moe_parallel

FLAGS = {
    "--moe-parallel": "ep",
    "--fssdp-num-replica-slots": 2,
    "--fssdp-predictor": "exponential",
    "--fssdp-prediction-window": 5,
    "--fssdp-overlap-degree": "auto",
    "--fssdp-ranks-per-node": None,
    "--fssdp-planner": "gain",
    "--fssdp-balance-tolerance": 0.01,
    "--fssdp-reshard-interval": None,
    "--fssdp-sharding": "swaps",
    "--fssdp-owners": None,
    "--fssdp-quotas": "host",
    "--fssdp-collectives": "auto",
    "--fssdp-etp-schedule": "auto",
    "--fssdp-overlap": "on",
    "--fssdp-rematerialize": False,
    "--fssdp-calibration": False,
    "--fssdp-grad-dtype": "fp32",
    "--fssdp-cluster": None,
    "--fssdp-check-plans": False,
    "--fssdp-log-plan": 0,
    "--fssdp-record-trace": None,
}


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    return add_arguments(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))


def test_flags_and_defaults_are_frozen() -> None:
    ours = add_arguments(ArgumentParser())
    flags = {flag for flag in ours._option_string_actions if flag not in ("-h", "--help")}
    assert flags == set(FLAGS)
    assert {flag_of(field.name): field.default for field in fields(FSSDPConfig)} == FLAGS


def test_every_flag_has_help() -> None:
    # Alone: Megatron's own help has a stray percent sign, which argparse refuses to print.
    ours = add_arguments(ArgumentParser())
    for flag in FLAGS:
        assert len(ours._option_string_actions[flag].help or "") > 40, flag
        assert flag in ours.format_help()


def test_defaults_are_plain_ep(parser: ArgumentParser) -> None:
    assert FSSDPConfig.from_args(parser.parse_args([])) == FSSDPConfig()


def test_values_are_plain_and_typed(parser: ArgumentParser) -> None:
    """Megatron stores them in checkpoints and loads them under an allow-list of types."""
    words = (
        "--moe-parallel fssdp --fssdp-num-replica-slots 3"
        " --fssdp-predictor sliding --fssdp-prediction-window 7"
        " --fssdp-overlap-degree 4 --fssdp-ranks-per-node 8 --fssdp-planner load"
        " --fssdp-balance-tolerance 0.1 --fssdp-quotas device"
        " --fssdp-log-plan 10 --fssdp-record-trace runs/x"
        " --fssdp-reshard-interval 50 --fssdp-sharding load --fssdp-owners o.json"
        " --fssdp-collectives tree --fssdp-etp-schedule fused"
        " --fssdp-overlap off --fssdp-rematerialize --fssdp-calibration"
        " --fssdp-grad-dtype param --fssdp-cluster c.yaml --fssdp-check-plans"
    )
    config = FSSDPConfig.from_args(parser.parse_args(words.split()))
    values = [getattr(config, field.name) for field in fields(config)]
    ours = ["fssdp", 3, "sliding", 7, "4", 8, "load", 0.1, "device"]
    copies = [50, "load", "o.json", "tree", "fused", "off", True, True, "param", "c.yaml", True]
    assert values == [*ours, *copies, 10, "runs/x"]
    assert {type(value) for value in values} == {str, int, float, bool}
    assert config.overlap_degree == 4
    assert FSSDPConfig().overlap_degree is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--moe-parallel fsdp", "invalid choice: 'fsdp'"),
        ("--fssdp-planner best", "invalid choice: 'best'"),
        ("--fssdp-overlap yes", "invalid choice: 'yes'"),
        ("--fssdp-collectives ring", "invalid choice: 'ring'"),
        ("--fssdp-num-replica-slots many", "invalid int value: 'many'"),
        ("--fssdp-num-replica-slot 2", "unrecognized arguments"),
    ],
)
def test_parser_refuses(
    words: str, message: str, parser: ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fssdp_num_replica_slots": -1}, "--fssdp-num-replica-slots is -1; use 0 to 10000."),
        ({"fssdp_prediction_window": 0}, "--fssdp-prediction-window is 0; use 1 to 10000."),
        ({"fssdp_ranks_per_node": 0}, "--fssdp-ranks-per-node is 0; use 1 to 1000000."),
        ({"fssdp_balance_tolerance": -0.1}, "--fssdp-balance-tolerance is -0.1; use 0 to 10."),
        ({"fssdp_balance_tolerance": float("nan")}, "--fssdp-balance-tolerance is nan"),
        ({"fssdp_balance_tolerance": float("inf")}, "use 0 to 10."),
        ({"fssdp_balance_tolerance": float("nan")}, "use 0 to 10."),
        ({"fssdp_prediction_window": 10**30}, "use 1 to 10000."),
        ({"fssdp_log_plan": -1}, "--fssdp-log-plan is -1; use 0 to 1000000000."),
        ({"fssdp_overlap_degree": "-1"}, "use auto or a whole number, 0 or more."),
        ({"fssdp_overlap_degree": "some"}, "--fssdp-overlap-degree is 'some'"),
        ({"moe_parallel": "dp"}, "--moe-parallel is 'dp'; use ep or fssdp."),
        ({"fssdp_grad_dtype": "bf16"}, "--fssdp-grad-dtype is 'bf16'; use fp32 or param."),
        ({"fssdp_collectives": "ring"}, "use auto or flat or tree."),
        ({"fssdp_etp_schedule": "best"}, "use auto or megatron or fused."),
        ({"fssdp_planner": "best"}, "--fssdp-planner is 'best'; use gain or load."),
    ],
)
def test_config_refuses(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        FSSDPConfig(**settings)


def test_moe_parallel_is_found_among_other_flags() -> None:
    assert parse_moe_parallel(["--x", "1", "--moe-parallel", "fssdp", "--y"]) == "fssdp"
    assert parse_moe_parallel(["--moe-parallel=fssdp"]) == "fssdp"
    assert parse_moe_parallel(["--yaml-cfg", "a.yaml"]) == "ep"

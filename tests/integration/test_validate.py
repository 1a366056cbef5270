from __future__ import annotations

from argparse import ArgumentParser
from itertools import pairwise
from types import SimpleNamespace

import pytest
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.training.arguments import add_megatron_arguments

from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.integration import versions
from megatron_fssdp.integration.arguments import add_arguments
from megatron_fssdp.integration.rules import RULES
from megatron_fssdp.integration.slot_experts import build_slot_experts
from megatron_fssdp.integration.validate import validate

MOE = "--moe-parallel fssdp --num-experts 8 --expert-model-parallel-size 4"
GOOD = f"{MOE} --moe-token-dispatcher-type alltoall --moe-grouped-gemm"

# One command line that each rule refuses.
BAD = {
    "spec": "--spec my_package my_spec",
    "hybrid_layer_pattern": "--hybrid-layer-pattern M*E",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path x.json",
    "transformer_impl": "--transformer-impl inference_optimized",
    "moe_use_upcycling": "--moe-use-upcycling",
    "perform_rl_step": "--perform-rl-step",
    "moe_pad_expert_input_to_capacity": "--moe-pad-expert-input-to-capacity",
    "moe_expert_rank_capacity_factor": "--moe-expert-rank-capacity-factor 1.5",
    "moe_flex_dispatcher_backend": (
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep"
    ),
    "moe_latent_size": "--moe-latent-size 64",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "delay_wgrad_compute": "--delay-wgrad-compute",
    "overlap_dispatch_backward_with_experts_wgrad": (
        "--overlap-dispatch-backward-with-experts-wgrad"
    ),
    "cuda_graph_impl": "--cuda-graph-impl transformer_engine",
    "offload_modules": "--offload-modules core_attn expert_fc1",
    "moe_paged_stash": "--moe-paged-stash",
    "moe_single_grouped_weight": "--moe-single-grouped-weight",
    "moe_single_grouped_bias": "--moe-single-grouped-bias",
    "use_transformer_engine_op_fuser": "--use-transformer-engine-op-fuser",
    "moe_mlp_glu_interleave_size": "--moe-mlp-glu-interleave-size 32",
    "fp8_recipe": "--fp8-format hybrid --fp8-recipe delayed",
    "fp8_param_gather": "--fp8-param-gather",
    "fp4": "--fp4-format e2m1",
    "te_precision_config_file": "--te-precision-config-file x.yaml",
    "optimizer_cuda_graph": "--optimizer-cuda-graph",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "optimizer": "--optimizer muon",
}
# Megatron's validate_args computes the first; its flag has another field. Of the second every value
# of this Megatron works.
COMPUTED = {"expert_gtp_weight_remat_size", "moe_token_dispatcher_type"}

IS_OLDER = versions.core_release() < (0, 19)


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    return add_arguments(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))


@pytest.fixture(autouse=True)
def _needs_its_flag(request: pytest.FixtureRequest, parser: ArgumentParser) -> None:
    """Skip the cases of flags, and of values, that came after this version."""
    case = getattr(request.node, "callspec", None)
    words = BAD.get(case.params.get("name", "") if case else "", "").split()
    if "another_dispatcher" in request.node.name:
        words = BAD["moe_flex_dispatcher_backend"].split()
    for flag, value in pairwise([*words, "--"]):
        action = parser._option_string_actions.get(flag)
        is_value = not value.startswith("--")
        lacks = action is None or (is_value and action.choices and value not in action.choices)
        if IS_OLDER and flag.startswith("--") and lacks:
            pytest.skip(f"megatron-core {versions.core_version()} has no {flag} {value}")


@pytest.mark.skipif(IS_OLDER, reason="rules are for the flags of 0.19; older versions lack some")
def test_every_rule_names_a_flag_of_this_megatron(parser: ArgumentParser) -> None:
    for rule in RULES:
        action = parser._option_string_actions[rule.flag]
        assert rule.name in COMPUTED or action.dest == rule.name


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES} - COMPUTED == set(BAD)
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("name", BAD)
def test_unsupported_flag_is_refused(name: str, parser: ArgumentParser) -> None:
    (rule,) = [rule for rule in RULES if rule.name == name]
    # On a clean command line the rule is quiet.
    assert validate(parser.parse_args(GOOD.split())).moe_parallel == "fssdp"
    with pytest.raises(ValueError, match="does not work with") as caught:
        validate(parser.parse_args(f"{GOOD} {BAD[name]}".split()))
    message = str(caught.value)
    assert message.startswith("--moe-parallel fssdp does not work with --")
    # What was given, word for word, the reason, the way out; one sentence.
    assert BAD[name] in message
    assert rule.reason in message
    assert rule.way_out in message
    assert message.endswith(", or use --moe-parallel ep.")
    assert "\n" not in message


@pytest.mark.parametrize("name", BAD)
def test_plain_ep_is_never_refused(name: str, parser: ArgumentParser) -> None:
    ep = GOOD.replace("--moe-parallel fssdp ", "")
    assert validate(parser.parse_args(f"{ep} {BAD[name]}".split())) == FSSDPConfig()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--moe-parallel fssdp",
            "--moe-parallel fssdp balances the experts of MoE layers, and --num-experts is not "
            "given; give it, or drop --moe-parallel fssdp.",
        ),
        (
            "--moe-parallel fssdp --num-experts 8",
            "--moe-parallel fssdp has nothing to balance with --expert-model-parallel-size 1, "
            "where every rank holds every expert; use 2 or more, or --moe-parallel ep.",
        ),
        (
            "--moe-parallel fssdp --num-experts 9 --expert-model-parallel-size 4",
            "--num-experts 9 is not a multiple of --expert-model-parallel-size 4; "
            "change one of them.",
        ),
        (
            f"{MOE} --fssdp-num-replica-slots 7",
            "--fssdp-num-replica-slots 7 is more than the 6 experts that a rank does not own "
            "(--num-experts 8, --expert-model-parallel-size 4); use 0 to 6.",
        ),
        (MOE, "--moe-parallel fssdp does not work with --moe-token-dispatcher-type"),
    ],
)
def test_sizes(flags: str, message: str, parser: ArgumentParser) -> None:
    args = parser.parse_args(flags.split())
    if flags == MOE:
        args.moe_token_dispatcher_type = "new-in-0.21"
    with pytest.raises(ValueError, match="-") as caught:
        validate(args)
    assert str(caught.value).startswith(message)


def test_tensor_parallel_needs_sequence_parallel(parser: ArgumentParser) -> None:
    """Megatron says so in the first forward (Megatron-LM#1587, fault 41), we at the start."""
    words = f"{GOOD} --tensor-model-parallel-size 2"
    with pytest.raises(ValueError, match="size 2 without --sequence-parallel"):
        validate(parser.parse_args(words.split()))
    validate(parser.parse_args(f"{words} --sequence-parallel".split()))


def test_all_spare_slots_are_allowed(parser: ArgumentParser) -> None:
    args = parser.parse_args(f"{GOOD} --fssdp-num-replica-slots 6".split())
    assert validate(args).fssdp_num_replica_slots == 6


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--use-precision-aware-optimizer", "--use-precision-aware-optimizer"),
        ("--optimizer-cpu-offload", "--optimizer-cpu-offload"),
        ("--save x --ckpt-assume-constant-structure", "--ckpt-assume-constant-structure"),
        ("--save x --ckpt-format torch", "--ckpt-format torch"),
        ("--save x --use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
        ("--save x --non-persistent-ckpt-type local", "--non-persistent-ckpt-type"),
    ],
)
def test_state_that_is_kept_by_place_needs_fixed_owners(
    flags: str, named: str, parser: ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{GOOD} {flags}"
    with pytest.raises(ValueError, match=f"does not work with .*{named}"):
        validate(parser.parse_args(f"{words} --fssdp-reshard-interval 10".split()))
    assert validate(parser.parse_args(words.split())).reshard_interval == 0
    assert named in capsys.readouterr().out
    validate(parser.parse_args(f"{words} --fssdp-reshard-interval 0".split()))


def test_fp8_recipes_without_state_are_accepted(parser: ArgumentParser) -> None:
    """Delayed scaling, Megatron's default, is meant by --fp8-format alone, and by it only."""
    for recipe in ("tensorwise", "blockwise", "mxfp8"):
        words = f"{GOOD} --fp8-format hybrid --fp8-recipe {recipe}"
        validate(parser.parse_args(words.split()))
    validate(parser.parse_args(f"{GOOD} --fp8-recipe delayed".split()))
    with pytest.raises(ValueError, match="--fp8-format hybrid --fp8-recipe delayed"):
        validate(parser.parse_args(f"{GOOD} --fp8-format hybrid".split()))


def test_a_backend_of_another_dispatcher_means_nothing(parser: ArgumentParser) -> None:
    validate(parser.parse_args(f"{GOOD} --moe-flex-dispatcher-backend ncclep".split()))


def test_fp8_is_refused_on_all_ranks_where_experts_are_not_grouped(parser: ArgumentParser) -> None:
    """Only stages with MoE layers used to notice; the others waited for them."""
    fp8 = "--fp8-format hybrid --fp8-recipe mxfp8"
    for words in (f"{GOOD} --transformer-impl local", MOE):
        with pytest.raises(ValueError, match="add --moe-grouped-gemm"):
            validate(parser.parse_args(f"{words} {fp8}".split()))


def test_a_schedule_of_shards_needs_shards(parser: ArgumentParser) -> None:
    with pytest.raises(ValueError, match="--expert-tensor-parallel-size is 1"):
        validate(parser.parse_args(f"{GOOD} --fssdp-etp-schedule fused".split()))


def test_fp8_needs_transformer_engines_experts() -> None:
    """Ours would compute SequentialMLP's experts in bf16, and say nothing."""
    experts = SequentialMLP.__new__(SequentialMLP)
    object.__setattr__(experts, "config", SimpleNamespace(fp8="hybrid"))
    with pytest.raises(ValueError, match="--moe-grouped-gemm"):
        build_slot_experts(experts, 4, None, None)


def test_owners_of_a_file_need_owners_that_may_change(parser: ArgumentParser) -> None:
    for flags in ("--fssdp-reshard-interval 0", "--save x --use-distributed-optimizer"):
        with pytest.raises(ValueError, match="without --fssdp-owners"):
            validate(parser.parse_args(f"{GOOD} --fssdp-owners o.json {flags}".split()))
    validate(parser.parse_args(f"{GOOD} --fssdp-owners o.json".split()))


def test_owners_may_change_by_default(parser: ArgumentParser) -> None:
    for flags in ("", "--save x", "--use-distributed-optimizer"):
        assert validate(parser.parse_args(f"{GOOD} {flags}".split())).reshard_interval == 100
    flags = "--save x --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
    assert validate(parser.parse_args(f"{GOOD} {flags}".split())).reshard_interval == 100


def test_the_fused_schedule_needs_the_alltoall_dispatcher(parser: ArgumentParser) -> None:
    fused = f"{MOE} --expert-tensor-parallel-size 2 --fssdp-etp-schedule fused"
    with pytest.raises(ValueError, match="--moe-token-dispatcher-type is allgather; use alltoall"):
        validate(parser.parse_args(f"{fused} --moe-token-dispatcher-type allgather".split()))
    validate(parser.parse_args(f"{fused} --moe-token-dispatcher-type alltoall".split()))

"""Tuning finds settings that pay, judges them fairly, or says to leave it off."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from megatron_fssdp.cli import app
from megatron_fssdp.config import FSSDPConfig
from megatron_fssdp.presets.files import find_file, from_words
from megatron_fssdp.presets.sizes import RESERVED_BYTES
from megatron_fssdp.simulation.cluster import Cluster, load_cluster
from megatron_fssdp.simulation.generate import Shape, generate
from megatron_fssdp.simulation.model import Job, read_job
from megatron_fssdp.simulation.simulate import simulate
from megatron_fssdp.simulation.systems import Options
from megatron_fssdp.simulation.systems.planning import FUSED_S, fssdp_planning, host_quotas_s
from megatron_fssdp.simulation.traces import Trace
from megatron_fssdp.simulation.tune import (
    LEAST_HELD_OUT,
    Settings,
    Tried,
    _against_preset,
    _choose,
    _is_surely_faster,
    bootstrap,
    halves,
    tune,
)
from megatron_fssdp.tools.tune import advise, show
from tests.simulation.cases import FLAGS, make_job

SHAPE = Shape(
    num_iterations=21, num_layers=2, num_ranks=8, num_experts=8, tokens=4096, topk=2, skew=1.0
)


@pytest.fixture(scope="module")
def job() -> Job:
    """Two of Mixtral 8x7B's layers on 8 ranks."""
    return make_job(
        8, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, seq_length=4096,
        max_position_embeddings=4096, micro_batch_size=1, expert_model_parallel_size=8,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return replace(load_cluster(find_file("clusters", "h100_dgx")), memory_bytes=None)


@pytest.fixture(scope="module")
def skewed() -> Trace:
    return generate("zipf", SHAPE)


def test_skewed_loads_turn_it_on(job: Job, cluster: Cluster, skewed: Trace) -> None:
    seen: list[str] = []
    advice = tune(job, cluster, skewed, planning_s=FUSED_S, progress=seen.append)
    assert advice.best is not None
    assert advice.is_worth_it
    assert 1 < advice.low <= advice.gain <= advice.high
    # Judged on the second half of the iterations, chosen on the first.
    ep, best = advice.ep.iteration_s, advice.best.result.iteration_s
    assert len(ep) == 16
    assert advice.gain == pytest.approx(ep[8:].mean() / best[8:].mean())
    # No other is surely faster where it was chosen.
    assert not any(_is_surely_faster(each, advice.best) for each in advice.tried)
    # Every candidate is tried once, and its flags are ours.
    assert len(seen) == len(set(seen)) == len(advice.tried)
    for flags in seen:
        given = from_words(flags.split())
        names = {flag.removeprefix("--").replace("-", "_") for flag in given}
        assert names <= set(FSSDPConfig.__dataclass_fields__)
    said = advise(advice)
    assert said[0].startswith("Turn it on: expect ")
    assert said[1].strip() == advice.best.settings.flags
    # With quotas of the break-even time the gain is gone.
    assert advice.break_even_s is not None
    assert advice.break_even_s > FUSED_S
    assert said[2].startswith("Quotas: 110 us")
    late = advice.best.settings.options(advice.break_even_s)
    system = advice.best.settings.system
    result = simulate(job, cluster, skewed, ["ep", system], options=late)
    ep_s, late_s = (each.iteration_s[6:].mean() for each in result.systems)
    assert late_s == pytest.approx(ep_s, rel=2e-3)


def test_todays_quotas_are_charged_unless_something_else_is_known(
    job: Job, cluster: Cluster, skewed: Trace
) -> None:
    advice = tune(job, cluster, skewed, num_iterations=2 * LEAST_HELD_OUT)
    assert advice.planning_s == host_quotas_s(job.layout.ep)
    assert advice.break_even_s is not None
    # So few iterations tell nothing of moves, also not that none are best.
    assert {each.settings.reshard_interval for each in advice.tried} == {100}
    slow = tune(
        job,
        cluster,
        skewed,
        num_iterations=2 * LEAST_HELD_OUT,
        planning_s=1.2 * advice.break_even_s,
    )
    assert not slow.is_worth_it
    assert slow.break_even_s == pytest.approx(advice.break_even_s, rel=0.05)
    assert slow.break_even_s is not None
    assert slow.break_even_s < slow.planning_s
    assert "as given" in advise(slow)[2]
    said = advise(advice)[2]
    assert f"{1e6 * advice.planning_s:,.0f} us" in said
    assert "as measured on a core" in said
    assert "Break-even" in said
    assert any("--planning-us" in note for note in advice.notes)
    assert fssdp_planning(cluster, None, 8)[0] == host_quotas_s(8) < host_quotas_s(64)
    assert fssdp_planning(replace(cluster, shared_cores=2), None, 8)[0] < host_quotas_s(8)
    assert fssdp_planning(replace(cluster, planning_s=1e-3), None, 8)[0] == 1e-3
    assert fssdp_planning(replace(cluster, planning_s=1e-3), 2e-3, 8)[0] == 2e-3


def test_the_presets_flags_are_where_the_search_starts(
    job: Job, cluster: Cluster, skewed: Trace
) -> None:
    preset = replace(job, fssdp_args={"--fssdp-rematerialize": True, "--fssdp-predictor": "last"})
    options = Options.of_flags(preset.fssdp_args)
    assert Settings.of_options(options) == Settings(rematerializes=True, predictor="last")
    names = ("fssdp", "fssdp-rm")
    alike = simulate(preset, cluster, skewed, names, num_iterations=2)
    assert alike.system("fssdp").mean_s == alike.system("fssdp-rm").mean_s
    assert alike.system("fssdp").peak_bytes == alike.system("fssdp-rm").peak_bytes
    kept = simulate(job, cluster, skewed, names, num_iterations=2)
    assert kept.system("fssdp").peak_bytes > kept.system("fssdp-rm").peak_bytes
    mixtral, larger = (read_job("mixtral_8x7b", num_ranks) for num_ranks in (32, 64))
    assert Settings.of_options(Options.of_flags(mixtral.fssdp_args)).flags.split(" ", 2)[2] == (
        "--fssdp-num-replica-slots 1 --fssdp-rematerialize"
    )
    assert any("--fssdp-rematerialize, where" in note for note in mixtral.notes)
    # From 8 nodes on there is memory to keep them.
    assert larger.fssdp_args == {"--fssdp-num-replica-slots": 1}


def test_even_loads_leave_it_off(job: Job, cluster: Cluster) -> None:
    advice = tune(job, cluster, generate("even", SHAPE))
    assert not advice.is_worth_it
    said = advise(advice)
    assert said[0].startswith("Leave it off")
    assert "Loads are even" in said[0]
    assert said[1].strip() == "--moe-parallel ep"


def test_few_iterations_get_no_verdict(job: Job, cluster: Cluster, skewed: Trace) -> None:
    """Whatever the gain looks like: what is needed is said, and no interval."""
    advice = tune(job, cluster, skewed, num_iterations=14)
    assert (advice.held_out, advice.is_enough, advice.is_worth_it) == (7, False, False)
    (said,) = advise(advice)
    assert said.startswith("No verdict: 14 iterations after the warm-up are too few.")
    assert "record 21 iterations or more" in said
    assert "95 %" not in said


def test_a_default_is_kept_within_noise(job: Job, cluster: Cluster, skewed: Trace) -> None:
    ep = tune(job, cluster, skewed, num_iterations=2).ep
    noise = np.random.default_rng(0).normal(1, 0.01, 16)

    def tried(factor: float | np.ndarray, **settings: object) -> Tried:
        result = replace(ep, iteration_s=factor * np.ones(16))
        return Tried(replace(Settings(), **settings), result, fits=True)

    default, last = tried(1.0), tried(0.998, predictor="last")
    lucky, better = tried(0.994 * noise, predictor="last"), tried(0.98, predictor="last")
    assert _choose([default, last, lucky], default) is default
    assert _choose([default, last, better], default) is better
    assert _choose([last, better], replace(default, fits=False)) is better


def test_memory_decides_too(job: Job, cluster: Cluster, skewed: Trace) -> None:
    """Kept replicas may not fit where re-materialized ones do; and where nothing fits, say so."""
    free = tune(job, cluster, skewed, num_iterations=2)
    peaks = {each.settings: each.result.peak_bytes or 0 for each in free.tried}
    kept, dropped = peaks[Settings()], peaks[Settings(rematerializes=True)]
    assert dropped < kept
    # Later rounds vary other settings around what fits.
    first = [replace(Settings(), num_replica_slots=n, rematerializes=True) for n in (1, 2)]
    least = min(peaks[each] for each in first if each in peaks)
    tight = replace(cluster, memory_bytes=RESERVED_BYTES + least + 1)
    advice = tune(job, tight, skewed, num_iterations=2)
    assert advice.best is not None
    assert advice.best.settings.rematerializes
    assert not all(each.fits for each in advice.tried)
    nothing = tune(
        job,
        replace(cluster, memory_bytes=RESERVED_BYTES + (free.ep.peak_bytes or 0)),
        skewed,
        num_iterations=2,
    )
    assert nothing.best is None
    assert advise(nothing)[0].startswith("Leave it off: no setting fits in memory")
    # Not even EP: then memory says nothing about FSSDP.
    hopeless = tune(job, replace(cluster, memory_bytes=1e9), skewed, num_iterations=2)
    assert hopeless.best is not None
    assert any("plain EP neither" in note for note in hopeless.notes)
    console = Console(width=140, file=io.StringIO())
    show(advice, console)
    assert "(too much)" in console.file.getvalue()


def test_flags_of_settings() -> None:
    assert Settings().flags == "--moe-parallel fssdp"
    every = Settings(
        num_replica_slots=4, rematerializes=True, predictor="last", balance_tolerance=0.05,
        reshard_interval=0,
    )  # fmt: skip
    assert every.flags == (
        "--moe-parallel fssdp --fssdp-num-replica-slots 4 --fssdp-rematerialize "
        "--fssdp-predictor last --fssdp-balance-tolerance 0.05 --fssdp-reshard-interval 0"
    )
    # The defaults are the flags' own.
    config = FSSDPConfig()
    assert Settings().num_replica_slots == config.fssdp_num_replica_slots
    assert Settings().predictor == config.fssdp_predictor
    assert Settings().balance_tolerance == config.fssdp_balance_tolerance
    assert Settings().reshard_interval == config.reshard_interval
    assert Settings().rematerializes == config.fssdp_rematerialize


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Noisy iterations of which neighbours resemble each other; the true gain is 1.5."""
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(60):
        noise = rng.standard_normal(201)
        noise = 0.1 * np.array([noise[i] + noise[i - 1] for i in range(1, 201)])
        shared = 1 + 0.2 * rng.standard_normal(200)
        ep = 1.5 * np.exp(noise) * shared
        fssdp = np.exp(0.1 * rng.standard_normal(200)) * np.exp(0.01) * shared
        gain, low, high = bootstrap(ep, fssdp, seed=trial)
        assert low <= gain <= high
        truth = 1.5 * np.exp(0.01) / np.exp(0.015)
        covered += low <= truth <= high
    assert covered >= 50
    assert bootstrap(np.array([3.0]), np.array([2.0])) == (1.5, 1.5, 1.5)
    assert halves(np.ones(5)) == 2


def test_the_command_takes_made_up_loads(tmp_path: Path) -> None:
    """As `fssdp simulate` does, and with its words for wrong ones."""
    flags = {**FLAGS, "--global-batch-size": 16}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({"MODEL_ARGS": flags}))
    words = f"tune --model {tmp_path}/tiny.yaml --cluster h100_dgx --nodes 1 --trace".split()
    answer = CliRunner().invoke(app, [*words, "zipf:0.5", "--iterations", "2"])
    assert answer.exit_code == 0, answer.output
    assert "No verdict: 2 iterations" in answer.output
    assert "loads are made up: Zipf 0.5" in answer.output
    answer = CliRunner().invoke(app, [*words, "zipf:nan"])
    assert answer.exit_code == 2
    assert "fssdp tune: --trace zipf:nan: write zipf:EXPONENT" in answer.output


def test_flags_that_differ_from_the_presets_alone_are_told() -> None:
    """A default is not among the printed flags, and the preset's value would stay."""
    preset = Settings(num_replica_slots=1, rematerializes=True, predictor="last")
    assert _against_preset(preset, preset) == []
    notes = _against_preset(Settings(predictor="sliding"), preset)
    assert [note.split(": add ")[1] for note in notes] == [
        "--fssdp-rematerialize=false to these flags",
        "--fssdp-num-replica-slots 2 to these flags",
    ]

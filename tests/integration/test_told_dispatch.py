"""Quotas on the host: the dispatcher is told what a stock one would ask and wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.test_equality import assert_equal_training, assert_replicated, train
from tests.integration.tiny import Job, TinyRun
from tests.ranks import run_ranks

TOLD = (
    "num_out_tokens",
    "input_splits",
    "output_splits",
    "num_global_tokens_per_local_expert",
)


def watch_dispatch(job: Job) -> dict[str, int]:
    """Train; compare every told dispatch with what stock finds out about the same routing map."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_fssdp.integration.told_dispatch import ToldAlltoAllDispatcher

    seen = {"told": 0, "stock": 0}
    told, stock = ToldAlltoAllDispatcher.preprocess, MoEAlltoAllTokenDispatcher.preprocess

    def preprocess(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        if self._told is None:
            seen["stock"] += 1
            return told(self, routing_map)
        seen["told"] += 1
        wanted = stock(self, routing_map)
        theirs = [np.array(getattr(self, name)) for name in TOLD]
        self.cuda_sync_point = "no_sync"
        tokens = told(self, routing_map)
        assert tokens.tolist() == wanted.tolist()
        assert tokens.dtype == wanted.dtype
        for name, value in zip(TOLD, theirs, strict=True):
            assert value.tolist() == np.array(getattr(self, name)).tolist(), name
        # Nothing is left to wait for.
        assert self.cuda_sync_point == "no_sync"
        return tokens

    ToldAlltoAllDispatcher.preprocess = preprocess
    try:
        TinyRun(job).train()
    finally:
        ToldAlltoAllDispatcher.preprocess = told
    return seen


@pytest.mark.parametrize("model", [{}, {"moe_expert_capacity_factor": 0.75}])
def test_it_is_told_what_stock_finds(model: dict[str, Any]) -> None:
    """With dropped tokens too: then each rank's rows are not tokens times top-k."""
    job = Job(ep=4, steps=3, num_microbatches=2, num_layers=2, model=model)
    for seen in run_ranks(4, watch_dispatch, job.as_fssdp()):
        assert seen == {"told": 3 * 2 * 2, "stock": 0}


def train_with_quotas_of_its_own(job: Job, num_more: int) -> str:
    """Let rank 1 expect so many tokens more than it is sent; return what stops this rank."""
    from megatron_fssdp.planning.quotas import Messages

    stock = Messages.received_RS.func

    def shifted(self: Messages) -> np.ndarray:
        received_RS = stock(self)
        received_RS[0, 0] += num_more
        return received_RS

    if torch.distributed.get_rank() == 1:
        Messages.received_RS = property(shifted)
    try:
        TinyRun(job).train()
    except RuntimeError as error:
        return str(error)
    return "trained"


def test_checked_quotas_that_differ_stop_the_run() -> None:
    job = Job(ep=2, steps=1).as_fssdp(fssdp_check_plans=True)
    other, odd = run_ranks(2, train_with_quotas_of_its_own, job, 1)
    assert "made different quotas (rank 1 expects" in odd
    # Told as well, and not left in the tokens' exchange.
    assert "made different quotas (the others' differ" in other
    # And the same quotas do not.
    assert run_ranks(2, train_with_quotas_of_its_own, job, 0) == ["trained"] * 2


def test_quotas_on_the_device_train_the_same() -> None:
    """There the dispatcher is not told: the host does not know."""
    job = Job(ep=4, steps=5, num_microbatches=2)
    want, got = train(4, job, job.as_fssdp(fssdp_quotas="device"))
    assert_replicated(got)
    assert_equal_training(got, want)
    for seen in run_ranks(4, watch_dispatch, job.as_fssdp(fssdp_quotas="device")):
        assert seen == {"told": 0, "stock": 5 * 2 * 2}

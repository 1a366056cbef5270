from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_fssdp.integration import cpu_platform
from tests.pretrain import pretrain
from tests.ranks import a_few, run_ranks


def test_refuses_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    stock = torch.empty
    with pytest.raises(RuntimeError, match="a CUDA device is available here"):
        cpu_platform.enable()
    assert torch.empty is stock
    assert not cpu_platform.is_requested(["--distributed-backend", "gloo"])


@pytest.mark.parametrize(
    ("argv", "is_asked"),
    [
        (["x.py", "--distributed-backend", "gloo"], True),
        (["x.py", "--distributed-backend=gloo"], True),
        (["x.py", "--distributed-backend", "nccl"], False),
        (["x.py", "gloo"], False),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform is off where CUDA is")
def test_is_requested(argv: list[str], is_asked: bool) -> None:
    assert cpu_platform.is_requested(argv) is is_asked


def _use_cuda_names() -> None:
    cpu_platform.enable()
    cpu_platform.enable()
    assert not torch.cuda.is_available()
    for device in ("cuda", "cuda:0", torch.device("cuda"), torch.cuda.current_device()):
        assert torch.zeros(2, device=device).device.type == "cpu"
        assert torch.ones(2).to(device).device.type == "cpu"
        assert torch.ones(2).to(device=device).device.type == "cpu"
    assert torch.ones(2).to("cuda", torch.float64).dtype == torch.float64
    assert torch.empty_like(torch.ones(2), device="cuda", pin_memory=True).shape == (2,)
    assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
    assert torch.ones(2).cuda().pin_memory().device.type == "cpu"
    assert torch.ones(2).type() == "torch.cuda.FloatTensor"
    assert torch.ones(2).bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(2).type(torch.int64).dtype == torch.int64
    stream = torch.cuda.Stream(device="cuda", priority=-1)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
        event = stream.record_event(torch.cuda.Event(enable_timing=True))
    torch.cuda.current_stream().wait_event(event)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    assert torch.compile(lambda x: x + 1)(torch.ones(1)) == 2


def test_cuda_names_mean_the_cpu() -> None:
    run_ranks(1, _use_cuda_names)


def _draw_from_tracker() -> tuple[list[float], list[float], list[float]]:
    cpu_platform.enable()
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.manual_seed(1)
    outside = torch.rand(2).tolist()
    tracker = get_cuda_rng_tracker()
    tracker.add("expert-parallel-rng", 100 + torch.distributed.get_rank())
    torch.manual_seed(1)
    with tracker.fork("expert-parallel-rng"):
        inside = torch.rand(2).tolist()
    after = torch.rand(2).tolist()
    return outside, inside, after


def test_random_tracker_gives_each_rank_its_own_experts() -> None:
    """Experts of different ranks must start different: --use-cpu-initialization made them equal."""
    (outside_0, inside_0, after_0), (outside_1, inside_1, after_1) = run_ranks(
        2, _draw_from_tracker
    )
    assert inside_0 != inside_1
    # The fork leaves the default generator where it was.
    assert outside_0 == after_0 == outside_1 == after_1


def _split_sizes() -> object:
    cpu_platform.enable()
    from megatron.core.transformer.moe import token_dispatcher

    sizes = torch.tensor([3, 4])
    assert token_dispatcher.maybe_move_tensor_to_cpu(sizes) is sizes
    return token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True)


def test_dispatcher_gets_numpy_splits() -> None:
    (splits,) = run_ranks(1, _split_sizes)
    assert isinstance(splits, np.ndarray)


@pytest.mark.slow
@pytest.mark.parametrize("moe_parallel", a_few(["ep", "fssdp"], [1]))
def test_resumed_training_equals_uninterrupted(moe_parallel: str, tmp_path: Path) -> None:
    """Loading restored Adam's moments but not its step count: stock Megatron without TE or Apex.

    The first loss after loading was right and the later ones were not.
    """
    flags = (
        "--moe-parallel", moe_parallel, "--train-iters", "5", "--use-distributed-optimizer",
        "--overlap-grad-reduce", "--overlap-param-gather",
    )  # fmt: skip
    folder = str(tmp_path)
    whole = pretrain(*flags, "--save", folder, "--save-interval", "2")
    assert whole.status == 0, whole.output
    # Megatron's first printed loss after loading is a mean with the next one's; the grad norms
    # are not.
    resumed = pretrain(*flags, "--load", folder, "--ckpt-step", "2")
    assert resumed.status == 0, resumed.output
    assert len(whole.grad_norms) == 5
    # FSSDP's loads and owners were in the checkpoint: it adds in the same order.
    assert resumed.grad_norms == whole.grad_norms[2:]
    assert resumed.losses[-1] == whole.losses[-1]

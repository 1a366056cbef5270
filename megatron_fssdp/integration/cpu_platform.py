# SPDX-License-Identifier: Apache-2.0

"""Let Megatron train on CPUs over gloo: for the quick start, the tests and CI.

Megatron names CUDA outright in a few hundred places. Nothing in its arithmetic needs a GPU, so
this module answers those names with their CPU meaning. One table:

    Megatron says                          on this platform
    torch.cuda.current_device()            "cpu", which every device= argument accepts
    device="cuda", .to("cuda"), .cuda()    the CPU
    streams, events, synchronize           torch.cpu's: one stream, everything already done
    CUDA random state                      the CPU generator's state
    Tensor.type() == "torch.cuda.*"        true of CPU tensors
    torch.compile                          runs the function as written (no C++ compile at start)

`enable()` is the only way in. It refuses to run where a CUDA device is available, and importing
this module changes nothing. `torch.cuda.is_available()` stays False, so code that asks is told
the truth. Written against megatron-core 0.19.2; tests/integration/test_cpu_platform.py trains
with it.
"""

import copy
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

# Flags without which Megatron 0.19 asks for a GPU kernel. `--use-cpu-initialization` is absent
# on purpose: it would give every expert-parallel rank the same expert weights, because
# Megatron's CPU initialization does not use the per-rank random state for experts.
MEGATRON_FLAGS: tuple[str, ...] = (
    "--transformer-impl",
    "local",
    "--distributed-backend",
    "gloo",
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
)

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
)

_enabled: set[str] = set()


def is_requested(argv: Sequence[str]) -> bool:
    """Whether a command line asks for gloo on a machine that has no CUDA device."""
    joined = " ".join(argv).replace("=", " ")
    return not torch.cuda.is_available() and "--distributed-backend gloo" in joined


def enable(*, training: bool = False) -> None:
    """Bridge torch and megatron.core to the CPU, once per process; calling again does nothing.

    Call it before the first model is built; before or after importing Megatron does not matter.

    Args:
        training: also bridge `megatron.training` (importing it takes seconds; models built
            directly from megatron.core do not need it).

    Raises:
        RuntimeError: a CUDA device is available, where Megatron must run as it is.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "the CPU platform replaces CUDA calls and a CUDA device is available here; "
            "call cpu_platform.enable() only where torch.cuda.is_available() is False."
        )
    bridges: list[tuple[str, Callable[[], None]]] = [
        ("cuda calls", _bridge_cuda_calls),
        ("tensors", _bridge_tensors),
        ("core", _bridge_megatron_core),
        ("uneven collectives", _bridge_uneven_collectives),
        ("optimizer", _bridge_optimizer),
    ]
    if training:
        bridges.append(("training", _bridge_megatron_training))
    for name, bridge in bridges:
        if name not in _enabled:
            bridge()
            _enabled.add(name)


class _Stream(torch.cpu.Stream):
    """The one CPU stream; accepts and ignores what CUDA streams are made with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    # torch.cpu's returns nothing.
    def record_event(self, event: Any = None) -> "_Event":  # type: ignore[override]
        return event or _Event()

    def synchronize(self) -> None:
        """Everything on a CPU stream is already done."""


class _Event(torch.cpu.Event):
    """An event that has already happened; accepts what CUDA events are made with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a call that has no CPU meaning."""


def _replace(owner: Any, replacements: dict[str, Any]) -> None:
    for name, value in replacements.items():
        setattr(owner, name, value)


def _bridge_cuda_calls() -> None:
    """Give torch.cuda's functions their CPU meaning."""
    # New functions, not torch.cpu's own: torch.compile keeps one rule a function, by identity,
    # and refuses a function that has two names.
    random = {
        # The tracker of model-parallel random states forks these; on CPUs it forks the CPU's.
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
        "manual_seed": torch.manual_seed,
    }
    _replace(torch.cuda.random, random)
    _replace(
        torch.cuda,
        {
            **random,
            "current_device": lambda: "cpu",
            # Megatron builds its process groups and seeds only where it counts a device.
            "device_count": lambda: 1,
            "set_device": lambda device: None,
            "Stream": _Stream,
            "Event": _Event,
            "stream": lambda stream: torch.cpu.stream(stream),
            "current_stream": lambda device=None: torch.cpu.current_stream(),
            "default_stream": lambda device=None: torch.cpu.current_stream(),
            "set_stream": lambda stream: None,
            "synchronize": lambda device=None: None,
            "is_current_stream_capturing": lambda: False,
            # The newest class has no rule about CUDA_DEVICE_MAX_CONNECTIONS and passes the
            # "at least 8.0" check of --moe-grouped-gemm.
            "get_device_capability": lambda device=None: (10, 0),
            "get_device_properties": lambda device=None: SimpleNamespace(major=10, minor=0),
            "memory_stats": lambda device=None: _ZeroStats(),
            "device_memory_used": lambda device=None: 0,
        },
    )
    # CPU-only builds of torch raise here.
    _replace(torch.cuda.nvtx, {"range_push": lambda message: None, "range_pop": lambda: None})
    # Looked up at every call, so functions wrapped before this one count too.
    torch.compiler.set_stance("force_eager")


class _ZeroStats(dict[str, int]):
    """Allocator figures of a device that allocates nothing."""

    def __missing__(self, key: str) -> int:
        return 0


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its `device="cuda"` (and pinned memory) mean the CPU."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        # Pinning needs a driver; an ordinary tensor serves.
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return wrapper


def _bridge_tensors() -> None:
    """Give "cuda" tensors and modules their CPU meaning."""
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    stock_to, stock_type = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(stock_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = ("cpu", *args[1:])
        elif _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return stock_to(self, *args, **kwargs)

    @functools.wraps(stock_type)
    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return stock_type(self, dtype, *args, **kwargs)
        # Megatron's optimizers sort parameters by comparing this string.
        name = stock_type(self)
        on_cpu = self.device.type == "cpu" and not name.startswith("torch.cuda.")
        return name.replace("torch.", "torch.cuda.", 1) if on_cpu else name

    def unchanged(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    _replace(
        torch.Tensor,
        {
            "to": to,
            "type": tensor_type,
            "cuda": unchanged,
            "pin_memory": unchanged,
            "record_stream": _nothing,
        },
    )
    torch.nn.Module.cuda = unchanged  # type: ignore[method-assign]


def _bridge_megatron_core() -> None:
    """Fix the few places of megatron.core that the table above does not reach."""
    from megatron.core.datasets import utils as datasets
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # These reach into torch.cuda's generators and would wait for a CUDA start that never comes.
    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    _replace(random, {"_set_cuda_rng_state": set_state})
    # The tracker warns when the CPU generator moves inside a fork; here it is the one forked.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )

    # Stock returns CPU tensors as they are, also where the caller asked for numpy splits.
    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _replace(token_dispatcher, {"maybe_move_tensor_to_cpu": move_to_cpu})

    # Stock has sequence parallelism only with Apex's or TE's norms: all it asks of a norm is this
    # mark, by which the gradients of a tensor-parallel group are summed.
    stock_norm = WrappedTorchNorm.__new__

    def make_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = stock_norm(cls, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    _replace(WrappedTorchNorm, {"__new__": make_norm})
    # The wheel ships the index builder compiled, but not the Makefile that stock would call.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp"):
        _replace(datasets, {"compile_helpers": _nothing})


def _bridge_uneven_collectives() -> None:
    """Gather and reduce-scatter parts of unequal size, which gloo refuses, by its all-to-all.

    Expert tensor parallelism does both with tokens. Sums are in the order of ranks.
    """
    from megatron.core.tensor_parallel import mappings

    stock_gather = mappings._gather_along_first_dim
    stock_reduce = mappings._reduce_scatter_along_first_dim

    def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> Any:
        result = rows.new_empty(sum(received), *rows.shape[1:])
        torch.distributed.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    def gather(rows: torch.Tensor, group: Any, sizes: Any = None, *rest: Any, **named: Any) -> Any:
        sizes = named.pop("output_split_sizes", sizes)
        if sizes is None or group.size() == 1:
            return stock_gather(rows, group, None, *rest, **named)
        sent = [len(rows)] * group.size()
        return exchange(torch.cat([rows] * group.size()), sent, list(sizes), group)

    def reduce(rows: torch.Tensor, group: Any, sizes: Any = None, *rest: Any, **named: Any) -> Any:
        sizes = named.pop("input_split_sizes", sizes)
        if sizes is None or group.size() == 1:
            return stock_reduce(rows, group, None, *rest, **named)
        mine = int(sizes[group.rank()])
        parts = exchange(rows, list(sizes), [mine] * group.size(), group)
        return parts.view(group.size(), mine, *rows.shape[1:]).sum(0)

    _replace(
        mappings, {"_gather_along_first_dim": gather, "_reduce_scatter_along_first_dim": reduce}
    )


def _bridge_optimizer() -> None:
    """Let the distributed optimizer load checkpoints in fp32 with torch's Adam (no TE, no Apex).

    Stock 0.19.2 fails on a fresh optimizer, whose step count torch has not made yet; leaves every
    parameter with one shared step count of 0 instead of the loaded one; and copies into fp32
    parameters, which are their own main copies, with autograd on.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    stock_state_dict = DistributedOptimizer.state_dict
    stock_load_state_dict = DistributedOptimizer.load_state_dict

    @functools.wraps(stock_state_dict)
    def state_dict(self: Any) -> Any:
        state = self.optimizer.state
        if state:
            return stock_state_dict(self)
        state["no step yet"] = {"step": torch.zeros(())}
        try:
            return stock_state_dict(self)
        finally:
            del state["no step yet"]

    @functools.wraps(stock_load_state_dict)
    def load_state_dict(self: Any, loaded: Any) -> None:
        stock_load_state_dict(self, loaded)
        step = float(loaded["optimizer"]["param_groups"][0]["step"])
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(step)

    stock_set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    @torch.no_grad()
    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> Any:
        # A fully reshardable checkpoint has no step per parameter; None is skipped.
        return stock_set_states(self, model_param, {"step": None, **tensors})

    _replace(
        DistributedOptimizer,
        {
            "state_dict": state_dict,
            "load_state_dict": load_state_dict,
            "_set_main_param_and_optimizer_states": set_states,
        },
    )


def _bridge_megatron_training() -> None:
    """Skip megatron.training's check for a CUDA device."""
    from megatron.training import training

    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )

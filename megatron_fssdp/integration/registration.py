# SPDX-License-Identifier: Apache-2.0

"""Hook the plugin into megatron.training: the only place that replaces its functions.

    Megatron's function (module)                    replaced     what is added
    add_megatron_arguments (training.arguments)     always       our flag group, after Megatron's
    validate_args (training.arguments)              always       our checks; with fssdp, our layer
    load_yaml (training.yaml_arguments)             always       a refusal: it drops our flags
    setup_model_and_optimizer (training.training)   if asked     fssdp: proof that our layers are
                                                                 there; ep with a trace: hooks that
                                                                 count the routing
    load_checkpoint (training.training)             with fssdp   loads seen and owners are read
    generate_state_dict (training.checkpointing)    with fssdp   loads seen and owners are saved

Every replacement calls the function it replaces, with the caller's own arguments, so a script's
`extra_args_provider` and `args_defaults` work as before. tests/integration/test_registration.py
fails when Megatron renames one of these.
"""

import dataclasses
import functools
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_fssdp.config import FSSDPConfig, flag_of
from megatron_fssdp.integration import arguments, compat, cpu_platform, validate, versions

_registered = False
# The runtime of the model that this process trains, if FSSDP or a trace is on.
_runtimes: list[Any] = []
# That runtime, once it has its model.
_prepared: list[Any] = []


def register() -> None:
    """Install the hooks, once per process. See `megatron_fssdp.integration.register`."""
    global _registered
    if _registered:
        return
    versions.check_core()
    if cpu_platform.is_requested(sys.argv):
        cpu_platform.enable(training=True)
    from megatron.training import arguments as megatron_arguments
    from megatron.training import yaml_arguments

    _wrap(megatron_arguments, "add_megatron_arguments", _with_our_flags)
    for module in compat.modules_that_validate():
        _wrap(module, "validate_args", _with_our_checks)
    _wrap(yaml_arguments, "load_yaml", _refusing_our_flags)
    _registered = True


def _wrap(module: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    stock = getattr(module, name)
    setattr(module, name, functools.wraps(stock)(wrap(stock)))


def _with_our_flags(stock: Callable[..., ArgumentParser]) -> Callable[..., ArgumentParser]:
    def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
        return arguments.add_arguments(stock(parser))

    return add_megatron_arguments


def _with_our_checks(stock: Callable[..., Any]) -> Callable[..., Any]:
    def validate_args(args: Namespace, *rest: Any, **options: Any) -> Any:
        result = stock(args, *rest, **options)
        # After Megatron's own checks: they fill in defaults such as the expert tensor size.
        compat.check_flags(args)
        _apply(validate.validate(args))
        return result

    return validate_args


def _refusing_our_flags(stock: Callable[..., Any]) -> Callable[..., Any]:
    def load_yaml(path: str) -> Any:
        loaded = stock(path)
        # The YAML file replaces every parsed flag: ours would be dropped and plain EP would run.
        asked = arguments.parse_moe_parallel(sys.argv[1:])
        if "fssdp" in (asked, getattr(loaded, "moe_parallel", None)):
            raise ValueError(
                "--moe-parallel fssdp does not work with --yaml-cfg, which replaces all other "
                "flags; give the settings as flags instead of --yaml-cfg."
            )
        return loaded

    return load_yaml


def _apply(config: FSSDPConfig) -> None:
    """Make Megatron build our MoE layer, or watch its own, as the flags ask.

    A second validation (an in-process restart) starts over with a new runtime.
    """
    if _runtimes:
        _runtimes.pop().close()
    if config.moe_parallel == "ep":
        _warn_of_idle_flags(config)
        if config.fssdp_record_trace is None:
            return
    from megatron.training import checkpointing, training

    # Not at the top: plain EP must not even import our layer.
    from megatron_fssdp.integration import metrics, spec

    if config.moe_parallel == "fssdp":
        runtime = spec.register(config)
    else:
        runtime = metrics.watching_runtime(config)
    _runtimes.append(runtime)
    if not getattr(training.setup_model_and_optimizer, "uses_model", None):
        _wrap(training, "setup_model_and_optimizer", _then(_use_model))
        if config.moe_parallel == "fssdp":
            _wrap(training, "load_checkpoint", _restoring_our_state)
            _wrap(checkpointing, "generate_state_dict", _saving_our_state)


def _warn_of_idle_flags(config: FSSDPConfig) -> None:
    """Tell who gives `--fssdp-*` flags and forgets `--moe-parallel fssdp`."""
    works_with_ep = ("fssdp_record_trace",)
    idle = [
        flag_of(field.name)
        for field in dataclasses.fields(config)
        if field.name not in works_with_ep and getattr(config, field.name) != field.default
    ]
    if idle and os.environ.get("RANK", "0") == "0":
        print(f"WARNING: {', '.join(idle)}: without effect, as --moe-parallel is ep", flush=True)


def _use_model(model: Any, optimizer: Any) -> None:
    """Take the model and optimizer that Megatron built, and count iterations as Megatron does."""
    from megatron.training import get_args

    _prepare(model, optimizer)
    iteration = get_args().iteration
    _runtimes[-1].iteration = iteration
    if iteration:
        # A look at the owners may have been due when the checkpoint was written.
        _runtimes[-1].owners.end_iteration(iteration)


def _prepare(model: Any, optimizer: Any) -> None:
    """Take the model and optimizer that Megatron built; once, before a checkpoint is loaded."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

    from megatron_fssdp.integration import metrics, spec
    from megatron_fssdp.integration.recorder import write_preset
    from megatron_fssdp.integration.scalars import ScalarWriter

    runtime = _runtimes[-1]
    if runtime in _prepared:
        return
    _prepared[:] = [runtime]
    if runtime.config.moe_parallel == "fssdp":
        spec.prepare(model, runtime)
        runtime.num_microbatches = get_num_microbatches
    else:
        metrics.watch_routers(model, runtime)
    moves = metrics.attach(runtime, runtime.config)
    args, tensorboard, wandb = get_args(), get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is not None or wandb is not None:
        numbers = [layer.number for layer in runtime.layers] * args.moe_per_layer_logging
        runtime.listeners.append(
            ScalarWriter(args.tensorboard_log_interval, tensorboard, wandb, moves, numbers)
        )
    if runtime.config.fssdp_record_trace is not None and args.rank == 0:
        write_preset(Path(runtime.config.fssdp_record_trace), args)
    # Megatron's optimizers hold torch's; a stub (nothing to train here) holds none.
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [getattr(each, "optimizer", None) for each in chained]
    runtime.watch_optimizers(each for each in inner if each is not None)
    if runtime.config.moe_parallel == "fssdp" and runtime.config.reshard_interval:
        _enable_resharding(runtime, model, optimizer)


def _restoring_our_state(stock: Callable[..., Any]) -> Callable[..., Any]:
    def load_checkpoint(
        model: Any, optimizer: Any, scheduler: Any, load_arg: str = "load", **options: Any
    ) -> Any:
        from megatron.training import checkpointing, get_args, print_rank_0

        args = get_args()
        # Only the run's own checkpoint: a model to start from has another run's loads.
        if _runtimes and _runtimes[-1].config.moe_parallel == "fssdp" and args.load:
            from megatron_fssdp.integration import saved_state

            _prepare(model, optimizer)
            folder = checkpointing.get_load_checkpoint_path_by_args(args)
            print_rank_0(f" fssdp: {saved_state.restore(_runtimes[-1], folder)}")
        return stock(model, optimizer, scheduler, load_arg=load_arg, **options)

    return load_checkpoint


def _saving_our_state(stock: Callable[..., Any]) -> Callable[..., Any]:
    def generate_state_dict(args: Any, *rest: Any, **options: Any) -> Any:
        state = stock(args, *rest, **options)
        is_loading = (options.get("optim_sd_kwargs") or {}).get("is_loading", False)
        trains_fssdp = bool(_prepared) and _prepared[-1].config.moe_parallel == "fssdp"
        if trains_fssdp and not is_loading and args.ckpt_format == "torch_dist":
            from megatron_fssdp.integration import saved_state

            state["fssdp"] = saved_state.describe(_prepared[-1])
        return state

    return generate_state_dict


def _enable_resharding(runtime: Any, model: Any, optimizer: Any) -> None:
    from megatron.core import parallel_state

    def sync_parameters() -> None:
        for chunk in model:
            chunk.start_param_sync(force_sync=True)

    overlaps = any(chunk.ddp_config.overlap_param_gather for chunk in model)
    runtime.owners.enable_moves(
        optimizer,
        parallel_state.get_expert_data_parallel_group(),
        sync_parameters if overlaps else None,
    )


def _then(
    use_model: Callable[[Any, Any], Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wrap Megatron's model set-up so that `use_model` gets the built model chunks."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        def setup_model_and_optimizer(*rest: Any, **options: Any) -> Any:
            model, optimizer, *others = stock(*rest, **options)
            use_model(model, optimizer)
            return (model, optimizer, *others)

        setup_model_and_optimizer.uses_model = use_model  # type: ignore[attr-defined]
        return setup_model_and_optimizer

    return wrap

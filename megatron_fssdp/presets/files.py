# SPDX-License-Identifier: Apache-2.0

"""Read `configs/models/*.yaml` and turn them into Megatron's flags.

A model file has the form of Megatron's own test and recipe files, literal flags with their values:

    title: Mixtral 8x7B
    source: {model: ..., paper: ..., training: ...}    where each number is from
    parameters: {total: 46.7e+9, active: 12.9e+9}      as published; without: parts not counted
    ENV_VARS: {NAME: value}
    MODEL_ARGS: {--num-layers: 32, --swiglu: true}     true: a switch; false: drop it
    FSSDP_ARGS: {--fssdp-rematerialize: true}          with --moe-parallel fssdp only
    LAYOUTS: {4: {--pipeline-model-parallel-size: 4}}  additions, by nodes of 8 GPUs
    FSSDP_LAYOUTS: {8: {--fssdp-rematerialize: false}} additions to FSSDP_ARGS, the same way

A layout serves its number of nodes and more, up to the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fssdp.planning.files import read_yaml

# Flag -> value: a str, a number, a list of them, True (a switch) or False (not given).
Args = dict[str, Any]

# Layouts are written for nodes of this many GPUs.
GPUS_PER_NODE = 8

# Without these neither layout nor memory can be checked.
REQUIRED = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--seq-length",
    "--max-position-embeddings",
    "--padded-vocab-size",
    "--micro-batch-size",
    "--global-batch-size",
)

# The folder `configs` of the repository; a wheel holds a copy.
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model file.

    Attributes:
        name: the file's name without its ending.
        title: the model's name.
        source: where the numbers are from, by what they are.
        parameters: published counts, `total` and, where published, `active`; `without` lists the
            parts that the count leaves out (`embedding`, `mtp`).
        env: environment variables.
        args: Megatron's flags for the model and its training.
        fssdp_args: additions to `args` with `--moe-parallel fssdp`; see `fssdp_args_for`.
        layouts: additions to `args` by the least number of GPUs that they are for, ascending.
        fssdp_layouts: the same for `fssdp_args`.
    """

    name: str
    title: str
    source: Mapping[str, str]
    parameters: Mapping[str, Any]
    env: Mapping[str, str]
    args: Args
    fssdp_args: Args
    layouts: Mapping[int, Args]
    fssdp_layouts: Mapping[int, Args]

    def fssdp_args_for(self, num_gpus: int) -> Args:
        """Return the additions with `--moe-parallel fssdp` on a number of GPUs; false drops one."""
        fitting = [least for least in self.fssdp_layouts if least <= num_gpus]
        return {**self.fssdp_args, **(self.fssdp_layouts[max(fitting)] if fitting else {})}


def list_names(kind: str) -> list[str]:
    """Return the names of the files in `configs/<kind>`: models or clusters."""
    return sorted(path.stem for path in (CONFIGS / kind).glob("*.yaml"))


def find_file(kind: str, name: str) -> Path:
    """Return the file of a name in `configs/<kind>`, or the file that `name` itself is.

    Raises:
        ValueError: there is neither; the message lists the names.
    """
    shipped = CONFIGS / kind / f"{name}.yaml"
    for path in (shipped, Path(name)):
        if path.is_file():
            return path
    raise ValueError(
        f"there is no {kind.removesuffix('s')} named {name!r} and no file of that name; "
        f"use one of {', '.join(list_names(kind))}, or the path of a YAML file"
    )


def read_preset(name: str) -> Preset:
    """Read a model file, by its name in `configs/models` or by its path.

    Raises:
        ValueError: there is no such file, or it lacks a part.
    """
    path = find_file("models", name)
    values = read_yaml(path)
    if not isinstance(values, dict) or not isinstance(values.get("MODEL_ARGS"), dict):
        raise ValueError(f"{path} is no model file: it has no MODEL_ARGS part")
    fssdp_args, env = values.get("FSSDP_ARGS") or {}, values.get("ENV_VARS") or {}
    layouts, fssdp_layouts = values.get("LAYOUTS") or {}, values.get("FSSDP_LAYOUTS") or {}
    for part_name, by_nodes in (("LAYOUTS", layouts), ("FSSDP_LAYOUTS", fssdp_layouts)):
        counts = by_nodes if isinstance(by_nodes, dict) else [0]
        if not all(type(nodes) is int and nodes > 0 for nodes in counts):
            raise ValueError(
                f"{path}: {part_name} is no mapping from numbers of nodes, of at least 1, to flags"
            )
    flags = (values["MODEL_ARGS"], fssdp_args, *layouts.values(), *fssdp_layouts.values())
    for part in (*flags, env):
        if not isinstance(part, dict):
            raise ValueError(f"{path}: {part!r} is no mapping of names to values")
    for part in flags:
        wrong = [flag for flag in part if not str(flag).startswith("--")]
        if wrong:
            raise ValueError(f"{path}: {wrong[0]!r} is no flag; flags start with --")
    missing = [flag for flag in REQUIRED if flag not in values["MODEL_ARGS"]]
    if missing:
        raise ValueError(f"{path}: MODEL_ARGS lacks {', '.join(missing)}")
    return Preset(
        name=path.stem,
        title=values.get("title", path.stem),
        source=values.get("source", {}),
        parameters=values.get("parameters", {}),
        env={key: str(value) for key, value in env.items()},
        args=values["MODEL_ARGS"],
        fssdp_args=fssdp_args,
        layouts=_by_gpus(layouts),
        fssdp_layouts=_by_gpus(fssdp_layouts),
    )


def _by_gpus(by_nodes: Mapping[int, Args]) -> dict[int, Args]:
    return {nodes * GPUS_PER_NODE: by_nodes[nodes] for nodes in sorted(by_nodes)}


def merge(parts: Iterable[Mapping[str, Any]]) -> Args:
    """Merge flags; later parts win, and a flag that is false in the end is dropped."""
    merged: Args = {}
    for part in parts:
        merged.update(part)
    return {flag: value for flag, value in merged.items() if value is not False}


def to_words(args: Mapping[str, Any]) -> list[str]:
    """Spell flags as words of a command line."""
    words: list[str] = []
    for flag, value in args.items():
        words.append(flag)
        if value is not True:
            words += map(str, value) if isinstance(value, list) else [str(value)]
    return words


def from_words(words: Iterable[str]) -> Args:
    """Read flags from words of a command line: `--flag`, `--flag value...`, `--flag=value`.

    `--flag=false` drops a flag of the preset.

    Raises:
        ValueError: a word stands before any flag.
    """
    values: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            values[flag] = [value] if equals else []
        elif not flag:
            raise ValueError(f"{word!r} is no flag; flags start with --")
        else:
            values[flag].append(word)
    return {flag: _value_of(given) for flag, given in values.items()}


def _value_of(given: list[str]) -> Any:
    if not given or given == ["true"]:
        return True
    if given == ["false"]:
        return False
    values = [int(word) if word.isdecimal() else word for word in given]
    return values[0] if len(values) == 1 else values


def choose_layout(preset: Preset, num_gpus: int) -> Args:
    """Return the layout for a number of GPUs: the one for the most GPUs that are not more.

    Raises:
        ValueError: the model needs more GPUs than these.
    """
    fitting = [least for least in preset.layouts if least <= num_gpus]
    if preset.layouts and not fitting:
        least = min(preset.layouts)
        raise ValueError(
            f"{preset.title} does not fit {num_gpus} GPUs: its smallest layout is for {least} GPUs "
            f"({least // GPUS_PER_NODE} nodes of {GPUS_PER_NODE}); use more nodes"
        )
    return dict(preset.layouts[max(fitting)]) if fitting else {}

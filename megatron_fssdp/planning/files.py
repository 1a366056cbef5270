# SPDX-License-Identifier: Apache-2.0

"""Read YAML and cluster files, and refuse what cannot be with the file's name and the key."""

from __future__ import annotations

import csv
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Whole numbers of at least 1; `ranks_per_node` may be a list of them.
COUNTS = ("ranks_per_node", "num_nodes", "adapters_per_node", "shared_cores")
SWITCHES = ("cores_copy", "has_fused_kernels")
LINKS = ("intra_node", "inter_node")
NEEDED = {
    "topology": ("ranks_per_node",),
    "compute": ("flops_per_s",),
    **{f"topology.{link}": ("bytes_per_s", "latency_s") for link in LINKS},
}
# Parts whose keys are all known. A misspelt one would silently be the default.
KNOWN = {
    "compute": (
        *("flops_per_s", "group_floor_s", "rate_by_rows", "memory_bytes_per_s", "shared_cores"),
        *(*SWITCHES, "planning_s"),
    ),
    **{f"topology.{link}": NEEDED[f"topology.{link}"] for link in LINKS},
}

# What a file's contents can make fail.
UNREADABLE = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, EOFError),
    *(RecursionError, MemoryError, zlib.error, zipfile.BadZipFile, csv.Error),
)


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn whatever a user's file makes fail into one error that names the file.

    Raises:
        ValueError: with the file's name and what is wrong. One that has the name passes as it is.
    """
    try:
        yield
    except UNREADABLE as error:
        if type(error) is ValueError and str(path) in str(error):
            raise
        what = "" if type(error) is ValueError else " cannot be read"
        raise ValueError(f"{path}{what}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Say in words what went wrong."""
    if isinstance(error, UnicodeDecodeError):
        return f"its byte {error.start} is no UTF-8 text"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, zlib.error):
        return f"it is damaged ({error})"
    if isinstance(error, TypeError | AttributeError):
        return f"a part of it is of another kind than expected ({error})"
    return str(error) or type(error).__name__


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file.

    Raises:
        ValueError: it is none; the message has its name, and the place in it.
    """
    # Imported here so that planning itself needs numpy only.
    import yaml

    with reading(path):
        try:
            return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no YAML file: {_reason(error)}") from None


def check_cluster(values: Any, path: str | Path) -> None:
    """Refuse a cluster file that lacks a part, or with a number that cannot be.

    Rates (`*_per_s`), sizes and counts must be above 0, times (`*_s`) not below.

    Raises:
        ValueError: the message has the file and the key.
    """
    if not isinstance(values, dict) or not isinstance(values.get("topology"), dict):
        raise ValueError(f"{path} is no cluster file: it has no 'topology' part")
    topology = values["topology"]
    parts = {name: values[name] for name in ("topology", "compute", "gpu") if name in values}
    parts |= {f"topology.{link}": topology[link] for link in LINKS if link in topology}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise ValueError(f"{path}: {name} is {part!r}; use a mapping")
        missing = [key for key in NEEDED.get(name, ()) if key not in part]
        if missing:
            raise ValueError(f"{path}: {name} lacks {', '.join(missing)}")
        known = KNOWN.get(name, part)
        for key, value in part.items():
            if key not in known:
                raise ValueError(f"{path}: {name}.{key} is unknown; use {', '.join(known)}")
            _check(key, value, f"{path}: {name}.{key}")
    sizes, adapters = topology["ranks_per_node"], topology.get("adapters_per_node", 1)
    if adapters > (most := max(sizes) if isinstance(sizes, list) else sizes):
        raise ValueError(
            f"{path}: topology.adapters_per_node is {adapters}, more than the {most} ranks of a "
            f"node, and ranks share adapters; use 1 to {most}, or leave it out: one each"
        )


def _check(key: str, value: Any, where: str) -> None:
    if key in COUNTS:
        sizes = value if key == "ranks_per_node" and isinstance(value, list) else [value]
        if not sizes or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"{where} is {value!r}; use a whole number of at least 1")
    elif key in SWITCHES:
        if not isinstance(value, bool):
            raise ValueError(f"{where} is {value!r}; use true or false")
    elif key == "rate_by_rows":
        pairs = value if isinstance(value, list) else [value]
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"{where} is {value!r}; use a list of [rows, flop/s]")
        if not all(_number(each) > 0 for pair in pairs for each in pair):
            raise ValueError(f"{where} is {value!r}; use numbers above 0")
    elif key.endswith("_per_s") or key in ("memory_bytes", "compute_capability"):
        if not _number(value) > 0:
            raise ValueError(f"{where} is {value!r}; use a number above 0")
    elif key.endswith("_s") and not _number(value) >= 0:
        raise ValueError(f"{where} is {value!r}; use a number of at least 0")


def _number(value: Any) -> float:
    """Return a finite number, or NaN, which no comparison lets pass."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan

# SPDX-License-Identifier: Apache-2.0

"""Read YAML and cluster files, and refuse what cannot be with the file's name and the key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

# Whole numbers of at least 1; `ranks_per_node` may be a list of them.
COUNTS = ("ranks_per_node", "num_nodes", "adapters_per_node", "shared_cores")
LINKS = ("intra_node", "inter_node")
NEEDED = {
    "topology": ("ranks_per_node",),
    "compute": ("flops_per_s",),
    **{f"topology.{link}": ("bytes_per_s", "latency_s") for link in LINKS},
}


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file.

    Raises:
        ValueError: it is none; the message has its name, and the place in it.
    """
    # Imported here so that planning itself needs numpy only.
    import yaml

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML file: {error}") from None


def check_cluster(values: Any, path: str | Path) -> None:
    """Refuse a cluster file that lacks a part, or with a number that cannot be.

    Rates (`*_per_s`), sizes and counts must be above 0, times (`*_s`) not below.

    Raises:
        ValueError: the message has the file and the key.
    """
    if not isinstance(values, dict) or not isinstance(values.get("topology"), dict):
        raise ValueError(f"{path} is no cluster file: it has no 'topology' part")
    topology = values["topology"]
    parts = {name: values[name] for name in ("topology", "compute", "gpu") if values.get(name)}
    parts |= {f"topology.{link}": topology[link] for link in LINKS if link in topology}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise ValueError(f"{path}: {name} is {part!r}; use a mapping")
        missing = [key for key in NEEDED.get(name, ()) if key not in part]
        if missing:
            raise ValueError(f"{path}: {name} lacks {', '.join(missing)}")
        known = NEEDED[name] if name.startswith("topology.") else part
        for key, value in part.items():
            if key not in known:
                raise ValueError(f"{path}: {name}.{key} is unknown; use {', '.join(known)}")
            _check(key, value, f"{path}: {name}.{key}")


def _check(key: str, value: Any, where: str) -> None:
    if key in COUNTS:
        sizes = value if key == "ranks_per_node" and isinstance(value, list) else [value]
        if not sizes or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"{where} is {value!r}; use a whole number of at least 1")
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
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan

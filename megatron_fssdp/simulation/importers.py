# SPDX-License-Identifier: Apache-2.0

"""Read expert loads that other programs wrote.

    program, how it is made                                what is read
    Megatron, --moe-routing-trace-path (0.19)              folder of router_trace_rank*.jsonl: each
                                                           rank's chosen experts, by step and layer
    SGLang, expert distribution recorder, mode stat        logical_count: (steps, L, E) or (L, E)
    SGLang, the same, modes per_pass and per_token         records' global_physical_count (L, P) and
                                                           last_physical_to_logical_map (L, P)
    vLLM, EPLB state (EplbModelState)                      expert_load_window (steps, L, P) and
                                                           physical_to_logical_map (L, P)
    vLLM, outputs with enable_return_routed_experts        routed_experts (tokens, L, k) of each
                                                           request, one JSON object a line
    anything                                               .npz with counts, or .csv (see below)

SGLang and vLLM keep tensors: write them as JSON (`tolist()`), or let `fssdp trace import` read the
`.pt` file, which needs torch. P physical experts are added up to E logical ones. Sources that they
do not tell are made up by dealing out each expert's tokens evenly.

`.npz`: `counts` or `loads`, (I, L, R, E) or (I, L, E). `.csv`: a head line with the columns
iteration, layer, expert, tokens and, if known, rank; numbers from 0, in any order, absent means 0;
iterations and layers that no row names are left out.
"""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fssdp.planning.files import reading
from megatron_fssdp.simulation.recording import Int64Array

Read = tuple[Int64Array, list[str]]

DEALT = "source ranks are not told: each expert's tokens were dealt out evenly over {} ranks"


# The most that a count, the number of an expert and the counts of a trace in memory can be.
MOST_TOKENS, MOST_EXPERTS, MOST_COUNTS = 2**40, 2**16, 2**29


def whole_numbers(values: Any, name: str, least: int = 0) -> Int64Array:
    """Return an array of whole numbers from `least` on.

    Raises:
        ValueError: a value is another; the message has the name.
    """
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"the rows of {name} differ in length; use rows of one length") from None
    wanted = f"use whole numbers of at least {least}"
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} has values that are no numbers; {wanted}")
    is_wrong = ~((array >= least) & (array <= MOST_TOKENS) & (array == np.floor(array)))
    if is_wrong.any():
        raise ValueError(f"{name} has {array[is_wrong][0]}; {wanted} and at most {MOST_TOKENS}")
    return array.astype(np.int64)


def _experts(highest: int, num_experts: int | None) -> int:
    """Return E: as given, or the highest expert that a token chose, plus 1.

    Raises:
        ValueError: a token chose a higher one.
    """
    if highest >= (num_experts or MOST_EXPERTS):
        raise ValueError(
            f"a token chose expert {highest}, and {num_experts or MOST_EXPERTS} experts are "
            "numbered from 0; use more experts (--experts), or correct the file"
        )
    return num_experts or highest + 1


def _check_size(shape: tuple[int, ...], names: str) -> None:
    if not 0 < math.prod(shape) <= MOST_COUNTS:
        sizes = " x ".join(map(str, shape))
        raise ValueError(
            f"it has {sizes} ({names}) counts; use 1 to {MOST_COUNTS}: fewer iterations or ranks"
        )


def deal(load_E: Int64Array, num_ranks: int) -> Int64Array:
    """Deal tokens out to source ranks, as evenly as whole numbers can.

    Args:
        load_E: (..., E) int64.
        num_ranks: R.

    Returns:
        (..., R, E) int64. What cannot be divided goes to other ranks for each expert.
    """
    _check_size((*np.shape(load_E)[:-1], num_ranks, np.shape(load_E)[-1]), "..., ranks, experts")
    every, rest = np.divmod(np.asarray(load_E, dtype=np.int64), num_ranks)
    place_RE = np.add.outer(np.arange(num_ranks), np.arange(every.shape[-1])) % num_ranks
    dealt: Int64Array = every[..., None, :] + (place_RE < rest[..., None, :])
    return dealt


def read_foreign(path: Path, num_ranks: int, num_experts: int | None) -> Read:
    """Read a file or folder that is not in the recorded format.

    Args:
        path: it.
        num_ranks: R, where the file does not tell source ranks.
        num_experts: E, where it names chosen experts only.

    Returns:
        (I, L, R, E) int64, and sentences on what was left out or assumed.

    Raises:
        ValueError: nothing of it can be read.
    """
    with reading(path):
        if path.is_dir():
            return _read_folder(path, num_ranks, num_experts)
        if path.suffix == ".npz":
            return _read_npz(path, num_ranks)
        if path.suffix == ".csv":
            return _read_csv(path, num_ranks)
        if path.suffix in (".json", ".jsonl"):
            return _read_json(path, num_ranks, num_experts)
    if path.suffix == ".pt":
        raise ValueError(f"{path} is torch's: `fssdp trace import {path} FOLDER` converts it")
    raise ValueError(
        f"{path} is of no known kind; use a folder that --fssdp-record-trace or Megatron's "
        "--moe-routing-trace-path wrote, or a .json, .jsonl, .npz, .csv or .pt file"
    )


def _read_folder(path: Path, num_ranks: int, num_experts: int | None) -> Read:
    if files := sorted(path.glob("router_trace_rank*.jsonl")):
        return _read_megatron(files, num_experts)
    if files := sorted(path.glob("expert_distribution_recorder_*.json")):
        # Each rank counts what it saw; together they are the whole.
        tables = []
        for file in files:
            with reading(file):
                tables.append(json.loads(file.read_text(encoding="utf-8")))
        return from_dumps(tables, str(path), num_ranks)
    raise ValueError(
        f"{path} holds no trace: neither trace-stage*.json (--fssdp-record-trace) nor "
        "router_trace_rank*.jsonl (Megatron) nor expert_distribution_recorder_*.json (SGLang)"
    )


def _json_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file; lines that are none are counted in `notes`."""
    num_bad = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line)
            except json.JSONDecodeError:
                value = None
            if isinstance(value, dict):
                yield value
            else:
                num_bad += bool(line.strip())
    if num_bad:
        notes.append(f"{path.name}: {num_bad} lines are no JSON objects and were left out")


def _read_megatron(files: list[Path], num_experts: int | None) -> Read:
    notes: list[str] = []
    # By step, layer and rank: chosen experts of all micro-batches. A resumed run writes a new file.
    chosen: dict[tuple[int, tuple[str, int, int], int], list[Int64Array]] = defaultdict(list)
    for file in files:
        for each in _json_lines(file, notes):
            try:
                # MTP layers come last, in their own order.
                layer = (str(each["block"]), int(each.get("mtp_idx", -1)), int(each["layer"]))
                key = (int(each["step"]), layer, int(each["rank"]))
                chosen[key].append(whole_numbers(each["top_indices"], "top_indices").ravel())
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                notes.append(f"{file.name}: a record was left out: {error!r}")
    if not chosen:
        raise ValueError(f"{files[0].parent}: no routing record in {len(files)} files")
    steps = sorted({step for step, _, _ in chosen})
    # With pipeline parallelism a rank sees its stage's layers only.
    ranks: dict[tuple[str, int, int], list[int]] = {
        layer: sorted({rank for _, each, rank in chosen if each == layer})
        for layer in sorted({layer for _, layer, _ in chosen})
    }
    sizes = sorted({len(each) for each in ranks.values()})
    if len(sizes) != 1:
        raise ValueError(
            f"{files[0].parent}: layers were recorded by {sizes} ranks: give all files"
        )
    highest = max(int(part.max(initial=0)) for parts in chosen.values() for part in parts)
    num_experts = _experts(highest, num_experts)
    notes.append(f"E is {num_experts}: as given, or the highest expert that a token chose, plus 1")
    whole, torn = [], []
    for step in steps:
        places = [[(step, layer, rank) for rank in of_layer] for layer, of_layer in ranks.items()]
        # As many micro-batches everywhere.
        if len({len(chosen.get(key, ())) for row in places for key in row}) != 1:
            torn.append(step)
            continue
        whole.append(
            [
                [np.bincount(np.concatenate(chosen[key]), minlength=num_experts) for key in row]
                for row in places
            ]
        )
    if torn:
        notes.append(f"steps {torn} lack records of some layer or rank and were left out")
    if not whole:
        raise ValueError(f"{files[0].parent}: no step is whole")
    return np.array(whole, dtype=np.int64), notes


def _read_json(path: Path, num_ranks: int, num_experts: int | None) -> Read:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        if "routed_experts" not in text:
            raise ValueError(f"{path} is no JSON: {error}") from None
        table = None
    if isinstance(table, dict) and any(key in table for key in KEYS):
        return from_dumps([table], str(path), num_ranks)
    notes: list[str] = []
    requests = [table] if table is not None else list(_json_lines(path, notes))
    found = [routed for request in requests for routed in _routed(request)]
    if not found:
        raise ValueError(f"{path} has none of: {', '.join(KEYS)}, routed_experts")
    num_experts = _experts(max(int(each.max(initial=0)) for each in found), num_experts)
    notes.append(f"each of {len(found)} requests is an iteration, E is {num_experts}")
    notes.append(DEALT.format(num_ranks))
    if len({each.shape[1] for each in found}) != 1:
        raise ValueError(f"{path}: the requests' routed_experts differ in layers")
    load_ILE = [
        [np.bincount(each_T[each_T >= 0], minlength=num_experts) for each_T in layers]
        for layers in (each.transpose(1, 0, 2).reshape(each.shape[1], -1) for each in found)
    ]
    return deal(np.array(load_ILE), num_ranks), notes


def _routed(value: Any) -> Iterator[Int64Array]:
    """Find every routed_experts below a request's object."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "routed_experts" and isinstance(each, list) and each:
                # A padded token has no expert: -1.
                routed = whole_numbers(each, key, least=-1)
                if routed.ndim != 3:
                    raise ValueError(f"{key} is {routed.shape}; use (tokens, layers, top-k)")
                yield routed
            else:
                yield from _routed(each)
    elif isinstance(value, list):
        for each in value:
            if isinstance(each, dict):
                yield from _routed(each)


KEYS = ("logical_count", "records", "expert_load_window", "expert_load_pass")


def from_dumps(tables: list[Any], source: str, num_ranks: int) -> Read:
    """Add up the dumps of several ranks: dictionaries of lists or arrays. See the module's table.

    Raises:
        ValueError: a dump has none of the known keys, or shapes that do not fit.
    """
    load_ILE: Int64Array | None = None
    for table in tables:
        if not isinstance(table, Mapping) or not any(key in table for key in KEYS):
            raise ValueError(f"{source} has none of: {', '.join(KEYS)}, routed_experts")
        with reading(source):
            each = _logical_loads(table)
        if load_ILE is not None and load_ILE.shape[1:] != each.shape[1:]:
            raise ValueError(f"{source}: ranks differ in layers or experts")
        num = len(each) if load_ILE is None else min(len(each), len(load_ILE))
        load_ILE = each[:num] if load_ILE is None else load_ILE[:num] + each[:num]
    assert load_ILE is not None, "there is a dump"
    used = load_ILE.any(axis=(1, 2))
    notes = [DEALT.format(num_ranks)]
    if not used.all():
        notes.append(f"{int((~used).sum())} empty steps were left out")
    if not used.any():
        raise ValueError(f"{source} counts no token")
    return deal(load_ILE[used], num_ranks), notes


def _logical_loads(table: Mapping[str, Any]) -> Int64Array:
    """Return one dump's (I, L, E) loads."""
    if "logical_count" in table:
        return _stacked(table["logical_count"], "logical_count")
    if "records" in table:
        key, map_name = "global_physical_count", "last_physical_to_logical_map"
        counts = [whole_numbers(each[key], key) for each in table["records"]]
        if len({each.shape for each in counts}) != 1:
            raise ValueError(f"records are none, or differ in the shape of {key}")
        load_ILP = _stacked(np.stack(counts), key)
    else:
        key = "expert_load_window" if "expert_load_window" in table else "expert_load_pass"
        load_ILP, map_name = _stacked(table[key], key), "physical_to_logical_map"
    logical_LP = whole_numbers(table[map_name], map_name)
    if logical_LP.shape != load_ILP.shape[1:] or logical_LP.max() >= logical_LP.shape[1]:
        raise ValueError(
            f"{map_name} is {logical_LP.shape} with experts up to {logical_LP.max(initial=0)}, and "
            f"{key} has {load_ILP.shape[1:]} (layers, physical experts); use the same, and "
            "logical experts below the number of physical ones"
        )
    is_copy_LPE = np.eye(int(logical_LP.max()) + 1, dtype=np.int64)[logical_LP]
    load_ILE: Int64Array = np.einsum("ilp,lpe->ile", load_ILP, is_copy_LPE)
    return load_ILE


def _stacked(values: Any, name: str) -> Int64Array:
    """Return (I, L, E) counts of (L, E), (I, L, E) or more leading numbers of steps."""
    load = whole_numbers(values, name)
    if load.ndim < 2 or not load.size:
        raise ValueError(f"{name} is {load.shape}; use (steps, layers, experts)")
    return load.reshape(-1, *load.shape[-2:])


def _read_npz(path: Path, num_ranks: int) -> Read:
    try:
        data = np.load(path, allow_pickle=False)
    except ValueError:
        raise ValueError(f"{path} cannot be read: it is no .npz file of numpy.savez") from None
    with data:
        name = next((name for name in ("counts", "loads") if name in data.files), None)
        if name is None:
            raise ValueError(f"{path} has {data.files}, neither counts nor loads")
        try:
            array = data[name]
        except ValueError:
            raise ValueError(f"{path}: {name} is no array of numbers") from None
    counts = whole_numbers(array, name)
    if counts.ndim not in (3, 4) or not counts.size:
        raise ValueError(
            f"{path}: {name} is {counts.shape}; use token counts, (iterations, layers, source "
            "ranks, experts) or (iterations, layers, experts)"
        )
    return (
        (deal(counts, num_ranks), [DEALT.format(num_ranks)]) if counts.ndim == 3 else (counts, [])
    )


def _read_csv(path: Path, num_ranks: int) -> Read:
    needed = ["iteration", "layer", "expert", "tokens"]
    rows, num_bad = [], 0
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        names = [name.strip() for name in reader.fieldnames or []]
        if not set(needed) <= set(names):
            raise ValueError(
                f"{path}: its columns are {names}; needed are {needed}, and maybe rank"
            )
        reader.fieldnames = names
        columns = [*needed, "rank"] if "rank" in names else needed
        for row in reader:
            try:
                values = [int(row[name]) for name in columns]
                is_count = min(values) >= 0 and max(values) <= MOST_TOKENS
            except (TypeError, ValueError):
                is_count = False
            if is_count:
                rows.append(values)
            num_bad += not is_count
    if not rows:
        raise ValueError(f"{path} has no row of whole numbers")
    notes = [f"{path.name}: {num_bad} rows are no whole numbers and were left out"] * bool(num_bad)
    table = np.array(rows, dtype=np.int64)
    for column, name in enumerate(("iterations", "layers")):
        named, table[:, column] = np.unique(table[:, column], return_inverse=True)
        if named[-1] >= len(named):
            notes.append(f"{path.name}: no row names some {name} up to {named[-1]}: left out")
    shape = tuple(int(each) + 1 for each in table[:, [0, 1, 2]].max(axis=0))
    if "rank" not in columns:
        _check_size((*shape[:2], num_ranks, shape[2]), "iterations, layers, ranks, experts")
        load_ILE = np.zeros(shape, dtype=np.int64)
        np.add.at(load_ILE, tuple(table[:, :3].T), table[:, 3])
        return deal(load_ILE, num_ranks), [*notes, DEALT.format(num_ranks)]
    shape = (*shape[:2], int(table[:, 4].max()) + 1, shape[2])
    _check_size(shape, "iterations, layers, ranks, experts")
    counts_ILRE = np.zeros(shape, dtype=np.int64)
    np.add.at(counts_ILRE, tuple(table[:, [0, 1, 4, 2]].T), table[:, 3])
    return counts_ILRE, notes

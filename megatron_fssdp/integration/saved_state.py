# SPDX-License-Identifier: Apache-2.0

"""What a checkpoint keeps of FSSDP beside plain expert parallelism's: loads seen, and owners.

One object for each pipeline stage and expert-data-parallel replica, under a key of its own that
plain Megatron does not ask for. With it a resumed run plans its first iteration like one that was
never stopped, and experts are where they were; without it (a checkpoint of plain EP, another
layout) a run starts even, and knows no loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_fssdp.integration.agreement import all_agree
from megatron_fssdp.integration.runtime import FSSDPRuntime


def describe(runtime: FSSDPRuntime) -> ShardedObject:
    """Return this rank's entry of a sharded state, under "fssdp" of its top level."""
    return _entry(runtime.state_dict())


def restore(runtime: FSSDPRuntime, folder: str | Path) -> str:
    """Take over what a checkpoint has, before its parameters are loaded. Collective.

    Args:
        runtime: of a model that is prepared.
        folder: of one iteration's checkpoint.

    Returns:
        One sentence for the log on what was found.
    """
    if not Path(folder).exists() or not check_is_distributed_checkpoint(str(folder)):
        return "no loads or owners in the checkpoint: experts start even"
    entry = _entry(None)
    known = serialization.load_sharded_metadata(str(folder))
    keys = {getattr(each, "unique_key", None) for each in known.values()}
    if not all_agree(entry.unique_key in keys):
        return "no loads or owners for this layout in the checkpoint: experts start even"
    problem, state = "", None
    try:
        found = dist_checkpointing.load({"fssdp": entry}, str(folder))["fssdp"]
        state = runtime.check_state_dict(found)
    except Exception as error:  # whatever a damaged file makes of itself
        problem = f" ({type(error).__name__}: {error})"
    if not all_agree(state is not None):
        return (
            f"the checkpoint's loads and owners are damaged: not used{problem}, experts start even"
        )
    assert state is not None
    return runtime.load_state_dict(state)


def _entry(data: dict[str, Any] | None) -> ShardedObject:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    replica = parallel_state.get_expert_data_parallel_rank()
    # The same on all ranks that share a plan: one of them writes.
    writer = (
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    key = f"fssdp.stage{stage}.replica{replica}"
    return ShardedObject(key, data, (1,), (0,), replica_id=(0, *writer))

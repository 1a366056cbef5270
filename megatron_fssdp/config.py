# SPDX-License-Identifier: Apache-2.0

"""The settings: the only list of them.

Each field is a command-line flag (`fssdp_num_replica_slots` is `--fssdp-num-replica-slots`) and
the string below it is the flag's help. Megatron stores flags in checkpoints and reads them back
under an allow-list, so fields hold str, int, float, bool or None only. This file may not import
`annotations` from `__future__`: Megatron's flag builder reads the types.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, get_args


@dataclass(frozen=True, kw_only=True, slots=True)
class FSSDPConfig:
    """Fully Sharded Sparse Data Parallelism of the experts; off unless --moe-parallel fssdp."""

    moe_parallel: Literal["ep", "fssdp"] = "ep"
    """How the experts of a MoE layer are spread over the expert-parallel group. ep: Megatron's
    expert parallelism, untouched. fssdp: each expert has one owner, and the experts that draw the
    most tokens are copied into other ranks' spare slots for one iteration."""

    fssdp_num_replica_slots: int = 2
    """Spare expert slots of each rank in each MoE layer. A used slot holds one expert's weights
    for an iteration, and the sum of its gradients over the micro-batches (less with
    --fssdp-rematerialize). 0 copies no expert."""

    fssdp_predictor: Literal["exponential", "sliding", "last"] = "exponential"
    """How the next iteration's loads are predicted from those measured. exponential: a mean whose
    weights halve with each iteration of age. sliding: the mean of the last
    --fssdp-prediction-window iterations (the paper's). last: the last iteration's."""

    fssdp_prediction_window: int = 5
    """Iterations that --fssdp-predictor sliding averages."""

    fssdp_overlap_degree: str = "auto"
    """The paper's t, a limit on copies by the time that could hide them. Planner load: experts that
    may be copied at all. Planner gain: copies that a rank may receive. auto: no limit besides the
    slots."""

    fssdp_ranks_per_node: int | None = None
    """Ranks that share a node, in the order of global ranks, so that tokens and copies stay on
    their node where they can. Default: ranks with the same host name share a node."""

    fssdp_planner: Literal["gain", "load"] = "gain"
    """Which experts are copied, and where. gain: the copies that lower the fullest rank most; in a
    layer that needs any, slots that are left get spare copies, against drift, where the cost model
    finds that they pay. load: the paper's algorithm 1, the most loaded experts first, also where
    loads are even."""

    fssdp_balance_tolerance: float = 0.01
    """Fraction by which the fullest rank may exceed the mean tokens. A layer predicted below it
    gets no replica (planner gain), and what is left of it is spent on keeping tokens on their
    node."""

    fssdp_quotas: Literal["host", "device"] = "host"
    """Where a micro-batch's tokens are divided among an expert's copies, once they are counted.
    host: in about half a millisecond per MoE layer; the host waits for the counts, and the alltoall
    dispatcher, told what each rank sends, then waits no more (other dispatchers, expert tensor
    parallelism and --moe-router-padding-for-quantization wait once more than Megatron does).
    device: no wait but the dispatcher's own, but 600 to 1,700 small launches per MoE layer."""

    fssdp_reshard_interval: int | None = None
    """Iterations between two looks at who owns which expert. Experts move, with their optimizer
    state, if the time that this saves until the next look exceeds the move's; 0: never. Default:
    100, or 0 where other flags keep state by place, not by expert (the start says which: with the
    distributed optimizer, add --dist-ckpt-optim-fully-reshardable)."""

    fssdp_sharding: Literal["swaps", "load"] = "swaps"
    """How owners are chosen. swaps: the fewest swaps inside a layer that save replicas. load: the
    paper's algorithm 2, all layers together; a rank may own from none to all experts of a
    layer."""

    fssdp_owners: str | None = None
    """JSON file with the owners to start from: {"3": [0, 0, 1, 1], ...}, by the number of the MoE
    layer (from 1, as in the model) the rank of each expert in the expert-parallel group. Layers
    that are not named start even. Over the layers of a model chunk every rank must own as many. A
    resumed run keeps the checkpoint's owners."""

    fssdp_collectives: Literal["auto", "flat", "tree"] = "auto"
    """How copies travel. flat: from the owner to each replica. tree: once to each other node, and
    from there on inside it; gradients are summed inside a node before they cross. auto: whichever
    the cost model finds faster for the layer's plan."""

    fssdp_etp_schedule: Literal["auto", "megatron", "fused"] = "auto"
    """How the alltoall dispatcher takes tokens to all shards of an expert (expert tensor
    parallelism). megatron: all-to-all over EP, all-gather over ETP, and the reverse. fused: one
    all-to-all over both, each way. auto: whichever the cost model finds faster for the layer's
    sizes."""

    fssdp_overlap: Literal["on", "off"] = "on"
    """on: replicas are fetched under the layer's attention, and their gradients return under the
    attention's backward. off: computation waits for each; the results are the same bits."""

    fssdp_rematerialize: bool = False
    """Drop replicas after the layer's forward and fetch them again for its backward: memory for one
    layer's replicas serves all layers, for one more fetch per layer and micro-batch. Default:
    replicas stay for the iteration, are fetched once, and send one sum of gradients."""

    fssdp_calibration: bool = False
    """When the gate has decided, fetch further replicas for the true loads if the cost model finds
    the layer faster with them. Their fetch is not hidden, and the host waits for the counts."""

    fssdp_grad_dtype: Literal["fp32", "param"] = "fp32"
    """What replicas' gradients are summed and sent in. param: the parameters' type: half the bytes
    in bf16, with its rounding. Where Transformer Engine adds gradients in place
    (--gradient-accumulation-fusion) they are summed in main_grad's type, and sent in this one."""

    fssdp_cluster: str | None = None
    """Cluster file with the links and rates that the cost model uses, as `fssdp calibrate` writes
    it; the same on all ranks. Default: an H100 cluster's; over gloo, rough figures of CPUs."""

    fssdp_check_plans: bool = False
    """Prove in each iteration that all ranks made the same plans, and in each dispatch that is told
    of quotas (--fssdp-quotas host, alltoall) that they made the same ones; stop all ranks with the
    first difference if not. Costs small messages."""

    fssdp_log_plan: int = 0
    """Iterations between two printed lines of balance, replicas and copied megabytes; 0: none."""

    fssdp_record_trace: str | None = None
    """Folder to write each iteration's loads to, per layer, source rank and expert, and what the
    iteration took: for `fssdp report`, `simulate` and `tune`. Works with --moe-parallel ep too."""

    def __post_init__(self) -> None:
        """Refuse values that no cluster makes right."""
        for name, least, most in (
            ("fssdp_num_replica_slots", 0, 10_000),
            ("fssdp_prediction_window", 1, 10_000),
            ("fssdp_ranks_per_node", 1, 1_000_000),
            ("fssdp_balance_tolerance", 0, 10),
            ("fssdp_reshard_interval", 0, 1_000_000_000),
            ("fssdp_log_plan", 0, 1_000_000_000),
        ):
            value = getattr(self, name)
            # Written so that NaN is refused too.
            if value is not None and not least <= value <= most:
                raise ValueError(f"{flag_of(name)} is {value}; use {least} to {most}.")
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{flag_of(name)} is {getattr(self, name)!r}; use {' or '.join(allowed)}."
                )
        degree = self.fssdp_overlap_degree
        if degree != "auto" and not str(degree).isdecimal():
            raise ValueError(
                f"--fssdp-overlap-degree is {degree!r}; use auto or a whole number, 0 or more."
            )

    @property
    def overlap_degree(self) -> int | None:
        """The paper's t; None: no limit besides the slots."""
        return None if self.fssdp_overlap_degree == "auto" else int(self.fssdp_overlap_degree)

    @property
    def reshard_interval(self) -> int:
        """Iterations between two looks at the owners; 0: never."""
        return 100 if self.fssdp_reshard_interval is None else self.fssdp_reshard_interval

    @classmethod
    def from_args(cls, args: Any) -> "FSSDPConfig":
        """Read the settings from Megatron's parsed arguments.

        Raises:
            ValueError: a value is out of range; the message names the flag and what is allowed.
        """
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> "FSSDPConfig":
        """Read the settings from flags with their values, among which Megatron's may be.

        Raises:
            ValueError: there is no such flag, or its value is wrong; the message says what is.
        """
        known = {flag_of(field.name): field for field in fields(cls)}
        values = {}
        for flag, value in flags.items():
            if flag in known:
                values[known[flag].name] = _value_of(flag, value, known[flag].type)
            elif flag.startswith("--fssdp"):
                near = [name for name in known if name.startswith(flag)]
                near = near[:1] if len(near) == 1 else get_close_matches(flag, known, n=1)
                hint = f"; did you mean {near[0]}" if near else ""
                raise ValueError(f"there is no flag {flag}{hint}.")
        return cls(**values)

    def check_experts(self, num_experts: int | None, num_ranks: int) -> None:
        """Refuse sizes that FSSDP cannot balance.

        Args:
            num_experts: of a layer; None: there are none.
            num_ranks: expert-parallel size.

        Raises:
            ValueError: the message names the flags.
        """
        if num_experts is None:
            raise ValueError(
                "--moe-parallel fssdp balances the experts of MoE layers, and --num-experts is not "
                "given; give it, or drop --moe-parallel fssdp."
            )
        if num_ranks == 1:
            raise ValueError(
                "--moe-parallel fssdp has nothing to balance with --expert-model-parallel-size 1, "
                "where every rank holds every expert; use 2 or more, or --moe-parallel ep."
            )
        if num_experts % num_ranks:
            raise ValueError(
                f"--num-experts {num_experts} is not a multiple of --expert-model-parallel-size "
                f"{num_ranks}; change one of them."
            )
        num_others = num_experts - num_experts // num_ranks
        if self.fssdp_num_replica_slots > num_others:
            raise ValueError(
                f"--fssdp-num-replica-slots {self.fssdp_num_replica_slots} is more than the "
                f"{num_others} experts that a rank does not own (--num-experts {num_experts}, "
                f"--expert-model-parallel-size {num_ranks}); use 0 to {num_others}."
            )


def _value_of(flag: str, value: Any, kind: Any) -> Any:
    """Convert a flag's value to its field's type."""
    kinds = get_args(kind) or (kind,)
    if bool in kinds:
        if value is not True:
            raise ValueError(f"{flag} takes no value; it is given {value!r}.")
        return True
    if value is True or isinstance(value, list):
        raise ValueError(f"{flag} needs one value.")
    if int in kinds:
        # int() takes more, such as 1_000, of which a reader of the flags would not know.
        if not re.fullmatch("-?[0-9]+", str(value)):
            raise ValueError(f"{flag} is {value!r}; use a whole number.")
        return int(value)
    if float in kinds:
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{flag} is {value!r}; use a number.") from None
    return str(value)


ALLOWED = {
    "moe_parallel": ("ep", "fssdp"),
    "fssdp_predictor": ("exponential", "sliding", "last"),
    "fssdp_planner": ("gain", "load"),
    "fssdp_quotas": ("host", "device"),
    "fssdp_sharding": ("swaps", "load"),
    "fssdp_collectives": ("auto", "flat", "tree"),
    "fssdp_etp_schedule": ("auto", "megatron", "fused"),
    "fssdp_overlap": ("on", "off"),
    "fssdp_grad_dtype": ("fp32", "param"),
}


def flag_of(name: str) -> str:
    """Spell a field as its flag: `fssdp_log_plan` is `--fssdp-log-plan`."""
    return "--" + name.replace("_", "-")

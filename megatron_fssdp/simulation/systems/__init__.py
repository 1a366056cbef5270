# SPDX-License-Identifier: Apache-2.0

"""The systems that the simulator compares: what each places, moves and holds, and when.

Each is written from its paper or public source; what is simplified is in its `notes`, which every
result carries.
"""

from __future__ import annotations

from megatron_fssdp.simulation.systems.common import Options, Placed, System
from megatron_fssdp.simulation.systems.gated import FasterMoE, MoonEP
from megatron_fssdp.simulation.systems.hecate import Hecate, HecateRM
from megatron_fssdp.simulation.systems.laer import Laer
from megatron_fssdp.simulation.systems.ours import Fssdp, FssdpRematerialized, PlainEp
from megatron_fssdp.simulation.systems.rearranged import Eplb, FlexMoE, SmartMoE

SYSTEMS: dict[str, type[System]] = {
    "ep": PlainEp,
    "fastermoe": FasterMoE,
    "smartmoe": SmartMoE,
    "flexmoe": FlexMoE,
    "eplb": Eplb,
    "laer": Laer,
    "moonep": MoonEP,
    "hecate": Hecate,
    "hecate-rm": HecateRM,
    "fssdp": Fssdp,
    "fssdp-rm": FssdpRematerialized,
}
# What `fssdp simulate` compares if nothing else is asked for.
DEFAULT_SYSTEMS = ("ep", "fastermoe", "smartmoe", "flexmoe", "eplb", "laer", "moonep", "fssdp")

__all__ = ["DEFAULT_SYSTEMS", "SYSTEMS", "Options", "Placed", "System"]

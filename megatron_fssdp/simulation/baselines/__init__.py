# SPDX-License-Identifier: Apache-2.0

"""Planners of other systems, for comparison only; written from their public descriptions."""

from megatron_fssdp.simulation.baselines import (
    echo,
    eplb,
    fastermoe,
    flexmoe,
    laer,
    moonep,
    plain_ep,
    scale_eplb,
    smartmoe,
    ultraep,
)
from megatron_fssdp.simulation.baselines.common import Baseline

BASELINES: dict[str, Baseline] = {
    "plain EP": plain_ep.plan,
    "FasterMoE": fastermoe.plan,
    "SmartMoE": smartmoe.plan,
    "FlexMoE": flexmoe.plan,
    "EPLB global": eplb.plan_global,
    "EPLB hier.": eplb.plan_hierarchical,
    "LAER-MoE": laer.plan,
    "MoonEP": moonep.plan,
    "ECHO": echo.plan,
    "UltraEP": ultraep.plan,
    "Scale-EPLB": scale_eplb.plan,
}

__all__ = ["BASELINES", "Baseline"]

# SPDX-License-Identifier: Apache-2.0

"""What systems share that predict loads: FSSDP, Hecate, LAER."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_fssdp.planning.moves import Homes
from megatron_fssdp.planning.plan import Int64Array, LayerPlan
from megatron_fssdp.planning.planner import PlanSettings, plan_layers
from megatron_fssdp.planning.predict import Predictor
from megatron_fssdp.simulation.systems.common import Placed, System


class Predicting(System):
    """A system that predicts the loads of each expert-parallel group.

    Attributes:
        predictors: one a group; a subclass makes them.
    """

    predictors: Sequence[Predictor]

    def observe(self, counts_GLRE: Int64Array) -> None:
        """Feed the predictors."""
        for predictor, counts_LRE in zip(self.predictors, counts_GLRE, strict=True):
            predictor.update(counts_LRE.sum(axis=1))
        self.iteration += 1


class Planned(Predicting):
    """Replicas are planned from predicted loads, and owners are looked at now and then.

    Attributes:
        settings: of the planner; a subclass makes them.
        homes: who owns what, by pipeline stage.
    """

    settings: PlanSettings

    def set_up(self) -> None:
        """Start with even owners."""
        self.homes = [
            Homes.even(stage.stop - stage.start, self.owner_LE.shape[1], self.num_ranks)
            for stage in self.stages
        ]

    def before_iteration(self) -> tuple[int, float]:
        """Look at the owners if it is time, stages side by side."""
        interval = self.options.reshard_interval
        if not interval or not self.iteration or self.iteration % interval:
            return 0, 0.0
        loads = [predictor.predict() for predictor in self.predictors]
        load_LE = np.sum([load for load in loads if load is not None], axis=0)
        looks = [self._look(index, load_LE[stage]) for index, stage in enumerate(self.stages)]
        self.owner_LE = np.concatenate([homes.owner_LE for homes in self.homes])
        return sum(moved for moved, _ in looks), max(move_s for _, move_s in looks)

    def place(self, group: int, counts_LRE: Int64Array) -> list[Placed]:
        """Plan from predicted loads, then place the true counts."""
        plans = self._plan(self.predictors[group].predict())
        return [
            self._place(counts_RE, plan) for counts_RE, plan in zip(counts_LRE, plans, strict=True)
        ]

    def move_bytes(self) -> int:
        """Two experts' state at most are in flight on a rank, if experts move."""
        return self.two_states() if self.options.reshard_interval else 0

    def _plan(self, predicted_LE: Int64Array | None) -> Sequence[LayerPlan]:
        """Plan all layers for (L, E) predicted tokens; None: not known."""
        return plan_layers(predicted_LE, self.owner_LE, self.topology, self.settings).layers

    def _look(self, index: int, load_LE: Int64Array) -> tuple[int, float]:
        """Move a stage's experts, or not; return how many, and the seconds.

        Args:
            index: of the stage.
            load_LE: (L, E) predicted tokens of its layers, all groups together.
        """
        raise NotImplementedError

    def _place(self, counts_RE: Int64Array, plan: LayerPlan) -> Placed:
        """Split a layer's true tokens over a plan."""
        raise NotImplementedError

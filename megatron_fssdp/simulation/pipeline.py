# SPDX-License-Identifier: Apache-2.0

"""Pipeline stages: Megatron's 1F1B order, without interleaving.

Shape letters: S stages, M micro-batches, K cases that are scheduled together (iterations).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


class Scheduled(NamedTuple):
    """When every stage works on every micro-batch.

    Attributes:
        forward_SMK, backward_SMK: (S, M, K) seconds at which they begin.
        end_SK: (S, K) seconds at which a stage is through.
    """

    forward_SMK: Float64Array
    backward_SMK: Float64Array
    end_SK: Float64Array


def schedule_1f1b(
    forward_SMK: Float64Array, backward_SMK: Float64Array, send_s: float = 0.0
) -> Scheduled:
    """Schedule the stages of an iteration.

    A stage runs S - 1 - s forwards ahead, then takes turns, one forward and one backward, then
    drains (Narayanan et al., arXiv 2104.04473, section 2.2). With equal times f and b this takes
    (M + S - 1)(f + b): the bubble is S - 1 of them.

    Args:
        forward_SMK: (S, M, K) seconds of each forward.
        backward_SMK: (S, M, K) seconds of each backward.
        send_s: seconds between stages.
    """
    num_stages, num_micro, num_cases = forward_SMK.shape
    orders = [_order(stage, num_stages, num_micro) for stage in range(num_stages)]
    begin = (np.zeros_like(forward_SMK), np.zeros_like(backward_SMK))
    took = (forward_SMK, backward_SMK)
    done = np.zeros((2, num_stages, num_micro), dtype=bool)
    free_SK = np.zeros((num_stages, num_cases))
    at = [0] * num_stages
    while any(at[stage] < 2 * num_micro for stage in range(num_stages)):
        for stage in range(num_stages):
            while at[stage] < 2 * num_micro:
                kind, micro = orders[stage][at[stage]]
                before = stage - 1 if kind == 0 else stage + 1
                ready = free_SK[stage]
                if 0 <= before < num_stages:
                    if not done[kind, before, micro]:
                        break
                    came = begin[kind][before, micro] + took[kind][before, micro] + send_s
                    ready = np.maximum(ready, came)
                begin[kind][stage, micro] = ready
                free_SK[stage] = ready + took[kind][stage, micro]
                done[kind, stage, micro] = True
                at[stage] += 1
    return Scheduled(*begin, free_SK)


def _order(stage: int, num_stages: int, num_micro: int) -> list[tuple[int, int]]:
    """List (0 forward or 1 backward, micro-batch) of a stage."""
    warm_up = min(num_stages - 1 - stage, num_micro)
    order = [(0, micro) for micro in range(warm_up)]
    for micro in range(num_micro - warm_up):
        order += [(0, warm_up + micro), (1, micro)]
    return order + [(1, micro) for micro in range(num_micro - warm_up, num_micro)]

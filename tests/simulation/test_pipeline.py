# SPDX-License-Identifier: Apache-2.0

"""1F1B: its closed form, a straggling stage, and the order of work."""

import numpy as np
import pytest

from megatron_fssdp.simulation.pipeline import schedule_1f1b


def times(num_stages: int, num_micro: int, seconds: float) -> np.ndarray:
    return np.full((num_stages, num_micro, 1), seconds)


@pytest.mark.parametrize(("stages", "micro"), [(1, 1), (1, 4), (2, 2), (4, 8), (4, 2), (3, 7)])
def test_equal_stages_take_the_closed_form(stages, micro) -> None:
    found = schedule_1f1b(times(stages, micro, 1.0), times(stages, micro, 2.0))
    assert found.end_SK.max() == (micro + stages - 1) * 3.0
    assert found.end_SK[0, 0] == found.end_SK.max()


def test_a_slow_stage_sets_the_pace() -> None:
    """2 stages, 3 micro-batches; forwards 1 and 3 s, backwards 1 and 3 s.

    Stage 1 begins at 1 and works without a pause: 3 x 6 = 18, to 19. Stage 0's last backward: 20.
    """
    forward_SMK, backward_SMK = times(2, 3, 1.0), times(2, 3, 1.0)
    forward_SMK[1] = backward_SMK[1] = 3.0
    found = schedule_1f1b(forward_SMK, backward_SMK)
    assert found.end_SK[:, 0].tolist() == [20.0, 19.0]
    assert found.forward_SMK[1, :, 0].tolist() == [1.0, 7.0, 13.0]


def test_sending_delays_and_cases_do_not_mix() -> None:
    forward_SMK = np.concatenate([times(2, 1, 1.0), times(2, 1, 2.0)], axis=2)
    found = schedule_1f1b(forward_SMK, forward_SMK, send_s=0.5)
    assert found.end_SK[0].tolist() == [5.0, 9.0]

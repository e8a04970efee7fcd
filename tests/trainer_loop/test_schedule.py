from __future__ import annotations

import pytest

from fathom.config.families import Schedule
from fathom.config.trainer import OptimizerConfig
from fathom.trainer.backends.schedule import SCHEDULES, learning_rate


def test_the_shapes_cover_the_family():
    assert set(SCHEDULES) == set(Schedule)


def test_warm_up_is_linear_and_reaches_the_peak():
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", [Schedule.LINEAR, Schedule.COSINE])
def test_decay_goes_from_the_peak_to_the_floor_and_stays(schedule):
    config = OptimizerConfig(lr=2.0, warmup_steps=2, schedule=schedule, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 12) for step in range(14)]
    assert rates[1] == rates[2] == 2.0
    assert rates[11:] == pytest.approx([0.2, 0.2, 0.2])
    assert rates[2:12] == sorted(rates[2:12], reverse=True)


def test_cosine_is_half_way_in_the_middle_and_a_single_step_gets_the_peak():
    config = OptimizerConfig(lr=1.0, schedule=Schedule.COSINE)
    assert learning_rate(config, 5, 11) == pytest.approx(0.5)
    assert learning_rate(config, 0, 1) == 1.0

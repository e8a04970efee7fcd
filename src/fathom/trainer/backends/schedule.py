"""The learning rate as a function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from collections.abc import Callable

from fathom.config.families import Schedule
from fathom.config.trainer import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Rate of the update that follows `step` updates (from 0), out of `steps` planned ones.

    It rises linearly over `warmup_steps` and reaches the peak with the last of them; then the schedule falls from the
    peak to `min_lr_ratio` of it at the last planned step, and stays there.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_steps = steps - config.warmup_steps - 1
    progress = min(1.0, (step - config.warmup_steps) / decay_steps) if decay_steps > 0 else 0.0
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * SCHEDULES[config.schedule](progress))


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: dict[Schedule, Callable[[float], float]] = {
    Schedule.CONSTANT: _constant,
    Schedule.LINEAR: _linear,
    Schedule.COSINE: _cosine,
}
"""Share of the way from the floor to the peak, by progress in [0, 1]."""

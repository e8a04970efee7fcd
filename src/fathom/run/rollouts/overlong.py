"""Rewards that fall as a trajectory nears its length limit (`algorithms.md` D.3), as a component of their own."""

from __future__ import annotations

from typing import final

from msgspec.structs import replace

from fathom.config.objective import ObjectiveConfig
from fathom.core.errors import ConfigError
from fathom.core.records.trajectory import Graded, Trajectory
from fathom.rollout.episode import EpisodePlan
from fathom.run.parts import Runner

COMPONENT = "overlong"
"""Name of the component."""
_GRADER = "overlong/1"


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """0 up to limit - buffer tokens, then falling evenly to -1 at the limit, and -1 beyond. arXiv 2503.14476.

    Args:
        length: sampled tokens.
        limit: L_max, at least `buffer`.
        buffer: L_cache, at least 1.
    """
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))


def shaped(trajectory: Trajectory, limit: int, buffer: int) -> Trajectory:
    """The trajectory with that component in its reward, 0 where it is short enough. Ungraded ones stay as they are.

    Raises:
        ConfigError: the task's own reward has a component of that name.
    """
    reward = trajectory.header.reward
    if not isinstance(reward, Graded):
        return trajectory
    if COMPONENT in reward.components:
        raise ConfigError(
            f"the task's reward has a component {COMPONENT!r} of its own; rename that, or remove "
            "objective.overlong_limit and objective.overlong_buffer"
        )
    penalty = overlong_penalty(trajectory.payload.num_sampled, limit, buffer)
    reward = replace(reward, components=reward.components | {COMPONENT: penalty}, grader=f"{reward.grader} + {_GRADER}")
    return replace(trajectory, header=replace(trajectory.header, reward=reward))


@final
class Shaping:
    """A runner whose rewards are shaped by length. Not for evaluation: there lengths are measured, not paid for."""

    def __init__(self, runner: Runner, limit: int, buffer: int) -> None:
        self._runner = runner
        self._limit = limit
        self._buffer = buffer

    async def run(self, plan: EpisodePlan) -> Trajectory:
        """See `parts.Runner`."""
        return shaped(await self._runner.run(plan), self._limit, self._buffer)


def shaping(runner: Runner, objective: ObjectiveConfig) -> Runner:
    """The runner of what is trained: as it is where the objective does not shape rewards."""
    if objective.overlong_limit is None or objective.overlong_buffer is None:
        return runner
    return Shaping(runner, objective.overlong_limit, objective.overlong_buffer)

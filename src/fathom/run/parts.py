"""What the pipeline drives. `local` makes them for one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fathom.buffer.group_buffer import GroupBuffer
from fathom.config.run import RunConfig
from fathom.core.records.trajectory import Trajectory
from fathom.rollout.episode import EpisodePlan
from fathom.run.history.checkpoint import Checkpoints
from fathom.run.history.recorder import Recorder
from fathom.run.learner import Learner
from fathom.run.resolve import PromptedTask
from fathom.run.rollouts.evaluation import Evaluator
from fathom.run.stop import Stop
from fathom.run.weights.delivery import Delivery
from fathom.run.weights.desk import Desk
from fathom.run.weights.fleet import Fleet


class Runner(Protocol):
    """Plays trajectories."""

    async def run(self, plan: EpisodePlan) -> Trajectory:
        """Play one. What an engine, a grader or an agent does is data; only what ends the run is raised."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the pipeline drives."""

    config: RunConfig
    """The run's options."""
    fresh: bool
    """True: from the start. False: from a checkpoint."""
    evaluated: int | None
    """Number of the version that was evaluated last, as the surviving history says. None: none was."""
    tasks: Sequence[PromptedTask]
    """Training tasks."""
    buffer: GroupBuffer
    """Clock, books, data order and groups."""
    runner: Runner
    """Plays trajectories."""
    learner: Learner
    """Takes steps."""
    delivery: Delivery
    """Publishes versions."""
    fleet: Fleet
    """The engines."""
    desk: Desk
    """Where the operator's requests are carried out."""
    recorder: Recorder
    """Writes the history."""
    checkpoints: Checkpoints
    """Saves and keeps states."""
    evaluator: Evaluator | None
    """Evaluates. None: not asked for."""
    stop: Stop
    """The request to end."""

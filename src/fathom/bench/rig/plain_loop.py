"""The plain synchronous loop: generate, grade, train, publish, one after the other, and nothing else.

It drives the same engine, grader, trainer and publisher as a run does, without buffer, clock, books or ledger: the
reference for what those cost, and the loop that a reader would write first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fathom.bench.rig.stand import Stand
from fathom.core.errors import NoProgressError
from fathom.core.records.row import rows_of
from fathom.core.records.step import GroupBatch, TrainBatch
from fathom.core.records.trajectory import Graded, Trajectory, TrajectoryStatus
from fathom.rollout.episode import EpisodePlan, EpisodeRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Where one step's time went, seconds."""

    rollout_s: float
    """Generating and grading, until the last trajectory is there."""
    train_s: float
    """The optimizer step."""
    publish_s: float
    """Until its weights serve."""

    @property
    def total_s(self) -> float:
        """The step."""
        return self.rollout_s + self.train_s + self.publish_s


async def plain_loop(stand: Stand, runner: EpisodeRunner, batches: Iterable[Sequence[EpisodePlan]]) -> list[StepTimes]:
    """One step per batch of plans, from the version the trainer is at, which must serve already.

    Raises:
        NoProgressError: a trajectory failed, or a step changed nothing: then its time means nothing either.
    """
    times: list[StepTimes] = []
    for plans in batches:
        began = time.perf_counter()
        trajectories = await asyncio.gather(*(runner.run(plan) for plan in plans))
        generated = time.perf_counter()
        for outcome in stand.trainer.steps(train_batch(trajectories), stand.trainer.version):
            if not outcome.stepped:
                raise NoProgressError(f"step {outcome.number} changed nothing: {outcome.why_not}")
        trained = time.perf_counter()
        await stand.publish(stand.trainer.version)
        published = time.perf_counter()
        times.append(StepTimes(rollout_s=generated - began, train_s=trained - generated, publish_s=published - trained))
    return times


def train_batch(trajectories: Sequence[Trajectory]) -> TrainBatch:
    """Trajectories by group, in the given order. Raises NoProgressError when one has no reward."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.header.group, []).append(trajectory)
    return TrainBatch(groups=tuple(_group_batch(members) for members in groups.values()))


def _group_batch(members: Sequence[Trajectory]) -> GroupBatch:
    headers = [member.header for member in members]
    return GroupBatch(
        group=headers[0].group,
        rewards={header.id: _reward(trajectory) for header, trajectory in zip(headers, members, strict=True)},
        truncated=frozenset(header.id for header in headers if header.status is TrajectoryStatus.TRUNCATED),
        rows=tuple(row for member in members for row in rows_of(member)),
    )


def _reward(trajectory: Trajectory) -> float:
    match trajectory.header.reward:
        case Graded() as graded:
            return graded.total
        case ungraded:
            raise NoProgressError(f"trajectory {trajectory.header.id} is ungraded: {ungraded.cause}: {ungraded.detail}")

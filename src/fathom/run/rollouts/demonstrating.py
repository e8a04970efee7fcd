"""A warm start where an agent acts: the agent plays scripts for real, and what it was asked and said is imitated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import final

import numpy as np

from fathom.core.errors import DataError
from fathom.core.ids import GroupId, Occurrence, trajectory_id
from fathom.core.ports.agent import DemonstratedAgentEnvironment
from fathom.core.ports.environment import Task
from fathom.core.records.demonstration import Demonstration
from fathom.core.records.message import Message, Role
from fathom.core.records.row import Row, rows_of
from fathom.core.records.sampling import Purpose, SamplingParams
from fathom.core.records.trajectory import Graded, Trajectory, TrajectoryStatus
from fathom.envs.agents.processes import AgentProcesses
from fathom.ledger.events import DemonstrationsPlayed
from fathom.rollout.agent_episode import AgentEpisodeRunner
from fathom.rollout.episode import EpisodePlan
from fathom.rollout.scripted_model import ScriptedModel
from fathom.run.history.recorder import Recorder
from fathom.run.resolve import Resolved
from fathom.run.rollouts.agents import agent_runner
from fathom.run.turns import TurnText

_QUESTION = Message(role=Role.USER, content="?")
_AT_ONCE = 8
_TOLD_EVERY = 32


async def played_demonstrations(
    resolved: Resolved, processes: AgentProcesses, count: int, recorder: Recorder
) -> list[Demonstration]:
    """Demonstrations of the first `count` training tasks.

    Raises:
        DataError: the agent did not play a script to its end, or did so without a reward.
    """
    environment, text = resolved.environment, resolved.turns
    assert isinstance(environment, DemonstratedAgentEnvironment), "checked when the run was resolved"
    assert text is not None, "an agent acts"
    model = ScriptedModel()
    config, identity = resolved.config, resolved.renderer.identity
    async with agent_runner(
        config,
        text,
        processes,
        model.generate,
        lambda _: None,
        identity,
        record_routes=False,
        incarnation=recorder.incarnation,
    ) as runner:
        shows = _Shows(environment, runner, model, text, config.rollout.max_new_tokens, recorder)
        return await shows.all([prompted.task for prompted in resolved.train[:count]])


@final
class _Shows:
    """Plays tasks, several at once; tells how far it is."""

    def __init__(
        self,
        environment: DemonstratedAgentEnvironment,
        runner: AgentEpisodeRunner,
        model: ScriptedModel,
        text: TurnText,
        longest: int,
        recorder: Recorder,
    ) -> None:
        self._environment = environment
        self._runner = runner
        self._model = model
        self._text = text
        self._longest = longest
        self._recorder = recorder
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._played = self._tokens = 0
        self._started_s = time.monotonic()

    async def all(self, tasks: Sequence[Task]) -> list[Demonstration]:
        playing: list[asyncio.Task[list[Demonstration]]] = []
        try:
            async with asyncio.TaskGroup() as group:
                playing = [group.create_task(self._show(task, len(tasks))) for task in tasks]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others only ended because of it
        return [row for task in playing for row in task.result()]

    async def _show(self, task: Task, of: int) -> list[Demonstration]:
        async with self._slots:
            rows = await self._play(task)
        self._played += 1
        self._tokens += sum(int(row.loss_mask.sum()) for row in rows)
        if self._played % _TOLD_EVERY == 0 or self._played == of:
            seconds = time.monotonic() - self._started_s
            self._recorder.record(
                DemonstrationsPlayed(played=self._played, of=of, tokens=self._tokens, seconds=seconds)
            )
            self._recorder.commit()
        return rows

    async def _play(self, task: Task) -> list[Demonstration]:
        plan = _plan(task, self._longest)
        name = trajectory_id(plan.group, plan.member)
        answers = [self._text.renderer.answer([_QUESTION], said, ()) for said in self._environment.script(task)]
        self._model.learn(name, answers)
        trajectory = await self._runner.run(plan)
        unsaid = self._model.forget(name)
        _check(task, trajectory, unsaid)
        return [_demonstration(row, source=task.id) for row in rows_of(trajectory)]


def _plan(task: Task, longest: int) -> EpisodePlan:
    return EpisodePlan(
        group=GroupId(f"demonstration/{task.id}"),
        member=0,
        occurrence=Occurrence(epoch=0, index=0),
        attempt=0,
        task=task,
        prompt_ids=np.empty(0, np.int32),
        sampling=SamplingParams(),
        max_new_tokens=longest,
        seed=0,
        priority=0,
        purpose=Purpose.ROLLOUT,
        pinned=None,
        barrier=None,
    )


def _check(task: Task, trajectory: Trajectory, unsaid: int) -> None:
    header = trajectory.header
    if header.status is not TrajectoryStatus.COMPLETED:
        raise DataError(f"task {task.id}: its script was not played to the end: {header.status} ({header.cause})")
    if unsaid:
        raise DataError(f"task {task.id}: the agent ended {unsaid} answers before the end of the script")
    if not isinstance(header.reward, Graded):
        raise DataError(f"task {task.id}: its script was not graded: {header.reward.cause}: {header.reward.detail}")
    if header.reward.total <= 0:
        raise DataError(f"task {task.id}: its script gets reward {header.reward.total:g}; it shows no solution")


def _demonstration(row: Row, source: str) -> Demonstration:
    loss_mask = np.zeros(len(row.token_ids), np.bool_)
    loss_mask[row.positions] = True
    return Demonstration(token_ids=row.token_ids, loss_mask=loss_mask, source=source)

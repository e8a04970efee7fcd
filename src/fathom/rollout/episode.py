"""One single-turn episode: a task becomes a graded trajectory, or a failed one with its cause."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from fathom.core.errors import EngineError, RecordError
from fathom.core.ids import GroupId, Occurrence, PolicyVersion, trajectory_id
from fathom.core.ports.engine import Barrier, GenerateChunk, GenerateRequest
from fathom.core.ports.environment import Task
from fathom.core.records.message import Message, Role
from fathom.core.records.sampling import FinishReason, Purpose, SamplingParams
from fathom.core.records.trajectory import (
    Reward,
    TokenizerIdentity,
    TokenPayload,
    Trajectory,
    TrajectoryHeader,
    TrajectoryStatus,
    Ungraded,
)
from fathom.rollout.engines.stop_strings import first_stop
from fathom.rollout.router.router import Router
from fathom.rollout.sampled import sampled_from
from fathom.rollout.session.tree import TokenTree

Decode = Callable[[list[int]], str]
Grade = Callable[[Task, str], Awaitable[Reward]]

_STATUS = {
    FinishReason.STOP: TrajectoryStatus.COMPLETED,
    FinishReason.LENGTH: TrajectoryStatus.TRUNCATED,
    FinishReason.CONTEXT: TrajectoryStatus.TRUNCATED,
    FinishReason.ABORTED: TrajectoryStatus.ABORTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlan:
    """What one member of a group is asked to do."""

    group: GroupId
    """Its group."""
    member: int
    """Its place in the group."""
    occurrence: Occurrence
    """The use of the task."""
    attempt: int
    """Attempt at the occurrence."""
    task: Task
    """The task."""
    prompt_ids: np.ndarray
    """int32 [P]: the rendered prompt. Empty: an agent asks."""
    sampling: SamplingParams
    """The distribution."""
    max_new_tokens: int
    """Sampled tokens at most."""
    seed: int
    """Fixes its random numbers."""
    priority: int
    """Smaller is served first."""
    purpose: Purpose
    """Rollout or evaluation."""
    pinned: PolicyVersion | None
    """Evaluate by exactly this version. None: whichever serves."""
    barrier: Barrier | None
    """Start together with others. None: at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedEpisode:
    """An episode that was played."""

    trajectory: Trajectory
    """Its record."""
    messages: tuple[Message, ...]
    """The answer to the task's messages; of an agent, the conversation that ended last. Empty: nothing was said."""


@final
class EpisodeRunner:
    """Runs episodes. A bad episode is data: nothing an engine or a grader does raises out of `run`."""

    def __init__(
        self,
        *,
        router: Router,
        decode: Decode,
        grade: Grade,
        stop_ids: tuple[int, ...],
        stop_strings: tuple[str, ...] = (),
        tokenizer: TokenizerIdentity,
        record_routes: bool,
    ) -> None:
        """Play on `router`. `record_routes`: rollouts (not evaluations) come with complete expert routes, or fail."""
        self._router = router
        self._decode = decode
        self._grade = grade
        self._stop_ids = stop_ids
        self._stop_strings = stop_strings
        self._tokenizer = tokenizer
        self._record_routes = record_routes

    async def run(self, plan: EpisodePlan) -> Trajectory:
        """Generate, check, grade. Only cancellation comes out as an exception."""
        return (await self.play(plan)).trajectory

    async def play(self, plan: EpisodePlan) -> EndedEpisode:
        """As `run`; says besides what was said."""
        started_s = time.time()
        try:
            chunks = await self._generate(plan)
            payload = assemble(plan.prompt_ids, chunks, plan.sampling, routes=self._wants_routes(plan))
        except (EngineError, RecordError) as error:
            cause = "refused" if isinstance(error, RecordError) else "engine_error"
            return EndedEpisode(trajectory=self._failed(plan, started_s, cause, str(error)), messages=())
        reason = payload.branches[0].turns[0].finish_reason
        status = _STATUS[reason]
        answer = self._answer(payload)
        reward = await self._judge(plan, answer, status)
        cause = "" if status is TrajectoryStatus.COMPLETED else reason.value
        header = self._header(plan, started_s, status, cause, reward)
        return EndedEpisode(trajectory=Trajectory(header=header, payload=payload), messages=_said(answer))

    async def _generate(self, plan: EpisodePlan) -> list[GenerateChunk]:
        name = trajectory_id(plan.group, plan.member)
        request = GenerateRequest(
            request_id=f"{name}/t0",
            prompt_ids=plan.prompt_ids,
            sampling=plan.sampling,
            seed=plan.seed,
            max_new_tokens=plan.max_new_tokens,
            stop_ids=self._stop_ids,
            stop_strings=self._stop_strings,
            priority=plan.priority,
            session_key=name,
            purpose=plan.purpose,
            pinned=plan.pinned,
            barrier=plan.barrier,
            want_routes=self._wants_routes(plan),
        )
        try:
            return [chunk async for chunk in self._router.generate(request)]
        finally:
            self._router.forget(name)

    def _wants_routes(self, plan: EpisodePlan) -> bool:
        return self._record_routes and plan.purpose is Purpose.ROLLOUT

    async def _judge(self, plan: EpisodePlan, answer: str, status: TrajectoryStatus) -> Reward:
        if status is TrajectoryStatus.ABORTED:
            return Ungraded(cause="aborted", detail="the generation was ended from outside")
        return await self._grade(plan.task, answer)

    def _answer(self, payload: TokenPayload) -> str:
        """The text of what was sampled, without what stopped it."""
        branch = payload.branches[0]
        answer = branch.token_ids[branch.sampled].tolist()
        if answer and answer[-1] in self._stop_ids:
            answer = answer[:-1]
        text = self._decode(answer)
        end = first_stop(text, self._stop_strings)
        return text if end is None else text[: end[0]]

    def _failed(self, plan: EpisodePlan, started_s: float, cause: str, detail: str) -> Trajectory:
        prompt_only = assemble(plan.prompt_ids, [], plan.sampling, routes=False)
        reward = Ungraded(cause=cause, detail=detail)
        return Trajectory(
            header=self._header(plan, started_s, TrajectoryStatus.FAILED, f"{cause}: {detail}", reward),
            payload=prompt_only,
        )

    def _header(
        self, plan: EpisodePlan, started_s: float, status: TrajectoryStatus, cause: str, reward: Reward
    ) -> TrajectoryHeader:
        return TrajectoryHeader(
            id=trajectory_id(plan.group, plan.member),
            group=plan.group,
            member=plan.member,
            occurrence=plan.occurrence,
            attempt=plan.attempt,
            task=plan.task.id,
            status=status,
            cause=cause,
            reward=reward,
            tokenizer=self._tokenizer,
            adapter=None,
            started_s=started_s,
            ended_s=time.time(),
        )


def _said(answer: str) -> tuple[Message, ...]:
    return (Message(role=Role.ASSISTANT, content=answer),)


def assemble(
    prompt_ids: np.ndarray, chunks: list[GenerateChunk], sampling: SamplingParams, *, routes: bool
) -> TokenPayload:
    """The token payload of one generation, checked against what was sent. No chunks: the prompt alone.

    `routes`: with the expert routes of all tokens but the last, if any token was sampled.

    Raises:
        RecordError: the engine's answer contradicts itself, or it executed another prompt.
    """
    tree = TokenTree()
    prompt = tree.add_prompt(None, prompt_ids, ())
    if chunks:
        tree.add_turn(prompt, sampled_from(prompt_ids, chunks, sampling, routes=routes), None)
    return tree.payload()

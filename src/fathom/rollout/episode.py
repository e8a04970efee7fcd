"""One single-turn episode: a task becomes a graded trajectory, or a failed one with its cause."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from blake3 import blake3

from fathom.core.errors import EngineError, RecordError
from fathom.core.ids import GroupId, Occurrence, PolicyVersion, trajectory_id
from fathom.core.ports.engine import Barrier, GenerateChunk, GenerateEnd, GenerateRequest
from fathom.core.ports.environment import Task
from fathom.core.records.sampling import FinishReason, Purpose, SamplingParams
from fathom.core.records.trajectory import (
    KeptSets,
    Reward,
    TokenBranch,
    TokenizerIdentity,
    TokenPayload,
    Trajectory,
    TrajectoryHeader,
    TrajectoryStatus,
    Turn,
    Ungraded,
)
from fathom.rollout.engines.stop_strings import first_stop
from fathom.rollout.router.router import Router

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
    """int32 [P]: the rendered prompt."""
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
        started_s = time.time()
        try:
            chunks = await self._generate(plan)
            payload = assemble(plan.prompt_ids, chunks, plan.sampling, routes=self._wants_routes(plan))
        except (EngineError, RecordError) as error:
            cause = "refused" if isinstance(error, RecordError) else "engine_error"
            return self._failed(plan, started_s, cause, str(error))
        end = _end(chunks)
        status = _STATUS[end.finish_reason]
        reward = await self._judge(plan, payload, status)
        cause = "" if status is TrajectoryStatus.COMPLETED else end.finish_reason.value
        return Trajectory(header=self._header(plan, started_s, status, cause, reward), payload=payload)

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

    async def _judge(self, plan: EpisodePlan, payload: TokenPayload, status: TrajectoryStatus) -> Reward:
        if status is TrajectoryStatus.ABORTED:
            return Ungraded(cause="aborted", detail="the generation was ended from outside")
        branch = payload.branches[0]
        answer = branch.token_ids[branch.sampled].tolist()
        if answer and answer[-1] in self._stop_ids:
            answer = answer[:-1]
        text = self._decode(answer)
        end = first_stop(text, self._stop_strings)
        return await self._grade(plan.task, text if end is None else text[: end[0]])

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


def assemble(
    prompt_ids: np.ndarray, chunks: list[GenerateChunk], sampling: SamplingParams, *, routes: bool
) -> TokenPayload:
    """The token payload of one generation, checked against what was sent. No chunks: the prompt alone.

    `routes`: with the expert routes of all tokens but the last, if any token was sampled.

    Raises:
        RecordError: the engine's answer contradicts itself, or it executed another prompt.
    """
    sampled_ids = _join([chunk.token_ids for chunk in chunks], np.int32)
    sampled = np.concatenate([np.zeros(len(prompt_ids), bool), np.ones(len(sampled_ids), bool)])
    turns = (_turn(prompt_ids, len(sampled_ids), _end(chunks), sampling),) if chunks else ()
    branch = TokenBranch(
        parent=None,
        shared_prefix=0,
        token_ids=np.concatenate([prompt_ids, sampled_ids]).astype(np.int32),
        sampled=sampled,
        loss_mask=sampled.copy(),
        logprobs=_join([chunk.logprobs for chunk in chunks], np.float32),
        policy_version=_join([chunk.policy_version for chunk in chunks], np.int32),
        kv_version=_join([chunk.kv_version for chunk in chunks], np.int32),
        turns=turns,
        kept=_join_kept(chunks) if sampling.truncates and chunks else None,
        routes=_join_routes(chunks, len(sampled) - 1) if routes and len(sampled_ids) else None,
    )
    versions = {version.number: version for chunk in chunks for version in chunk.versions}
    if any(versions[version.number] != version for chunk in chunks for version in chunk.versions):
        raise RecordError("one version number with two digests or incarnations")
    return TokenPayload(versions=tuple(versions[number] for number in sorted(versions)), branches=(branch,))


def prompt_hash(prompt_ids: np.ndarray) -> str:
    """Identity of a prompt as sent: BLAKE3 (hex) of its int32 ids."""
    return blake3(np.ascontiguousarray(prompt_ids, dtype=np.int32).tobytes()).hexdigest()


def _turn(prompt_ids: np.ndarray, num_sampled: int, end: GenerateEnd, sampling: SamplingParams) -> Turn:
    if end.prompt_hash != prompt_hash(prompt_ids):
        raise RecordError("the engine executed another prompt than it was sent")
    return Turn(
        start=len(prompt_ids),
        end=len(prompt_ids) + num_sampled,
        engine=end.engine,
        dtype=end.dtype,
        kernels=end.kernels,
        sampling=sampling,
        finish_reason=end.finish_reason,
        prompt_hash=end.prompt_hash,
        cached_tokens=end.cached_tokens,
        drafted_tokens=end.drafted_tokens,
        accepted_tokens=end.accepted_tokens,
        queue_s=end.queue_s,
        generate_s=end.generate_s,
    )


def _end(chunks: list[GenerateChunk]) -> GenerateEnd:
    ends = [chunk.end for chunk in chunks if chunk.end is not None]
    if len(ends) != 1 or chunks[-1].end is None:
        raise RecordError(f"a generation must end exactly once, in its last chunk; got {len(ends)} ends")
    return ends[0]


def _join(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    for part in parts:
        if part.dtype != np.dtype(dtype):
            raise RecordError(f"the engine sent {part.dtype} where {np.dtype(dtype)} is due")
    return np.concatenate([*parts, np.empty(0, dtype)])


def _join_routes(chunks: list[GenerateChunk], expected: int) -> np.ndarray:
    """[expected, L, E]: the routes of all inputs, each delivered once and in order."""
    parts = [chunk.routes for chunk in chunks if chunk.routes is not None and len(chunk.routes)]
    if not parts or len({(part.dtype, part.shape[1:]) for part in parts}) != 1 or parts[0].ndim != 3:
        raise RecordError("the engine sent no expert routes, or routes of several shapes")
    if (total := sum(map(len, parts))) != expected:
        raise RecordError(f"the engine sent expert routes of {total} inputs of {expected}: coverage must be complete")
    return np.concatenate(parts)


def _join_kept(chunks: list[GenerateChunk]) -> KeptSets:
    kept: list[KeptSets] = []
    for chunk in chunks:
        if chunk.kept is None and len(chunk.token_ids):
            raise RecordError("the engine sent no kept sets for a truncating distribution")
        if chunk.kept is not None:
            kept.append(chunk.kept)
    lengths = [np.diff(part.offsets) for part in kept]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([*lengths, np.empty(0, np.int64)]))]).astype(np.int64)
    return KeptSets(offsets=offsets, ids=_join([part.ids for part in kept], np.int32))

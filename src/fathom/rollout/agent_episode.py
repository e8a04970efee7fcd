"""One episode of an agent: a session is opened, the agent plays with it, and what the session leaves is the trajectory.

open session ──> play(task, endpoint) ──> acting has ended: close the session ──> grade ──> trajectory
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from fathom.core.errors import BudgetError, RecordError
from fathom.core.ids import trajectory_id
from fathom.core.ports.agent import Acting, Endpoint, Play, Played, Transcript
from fathom.core.records.sampling import FinishReason, Purpose
from fathom.core.records.trajectory import (
    Reward,
    SessionFacts,
    TokenizerIdentity,
    TokenPayload,
    Trajectory,
    TrajectoryHeader,
    TrajectoryStatus,
    Ungraded,
)
from fathom.rollout.episode import EndedEpisode, EpisodePlan
from fathom.rollout.session.call import CallRefusedError
from fathom.rollout.session.plan import Closed, SessionPlan
from fathom.rollout.session.sessions import Sessions

_NOTHING = TokenPayload(versions=(), branches=())


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """What every session of a run may use, beside what the plan of an episode says."""

    max_context_tokens: int
    """Tokens of a context at most, the answer included."""
    max_turns: int
    """Turns at most."""
    max_sampled_tokens: int | None
    """Sampled tokens of all turns at most. None: no bound of its own."""
    stop_ids: tuple[int, ...]
    """Ids that end a turn."""
    record_routes: bool
    """Rollouts (not evaluations) come with complete expert routes, or fail."""


@final
class AgentEpisodeRunner:
    """Runs episodes of agents. A bad episode is data: nothing an engine, agent or grader does raises out of `run`."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        endpoint: Callable[[str], Endpoint],
        play: Play,
        terms: SessionTerms,
        tokenizer: TokenizerIdentity,
        forget: Callable[[str], None],
    ) -> None:
        """Episodes are played by `play`.

        Args:
            sessions: where they are opened.
            endpoint: where the session of a key is served.
            play: plays an episode in a process of its own.
            terms: what their sessions may use.
            tokenizer: what ids mean.
            forget: told the name of a session that has ended.
        """
        self._sessions = sessions
        self._endpoint = endpoint
        self._play = play
        self._terms = terms
        self._tokenizer = tokenizer
        self._forget = forget

    async def run(self, plan: EpisodePlan) -> Trajectory:
        """Open, play, close. `plan.max_new_tokens` bounds one turn; its prompt is not used: the agent asks.

        Raises:
            GraderDeadError: the process that keeps the environment is gone.
        """
        return (await self.play(plan)).trajectory

    async def play(self, plan: EpisodePlan) -> EndedEpisode:
        """As `run`; says besides what was said."""
        started_s = time.time()
        name = trajectory_id(plan.group, plan.member)
        try:
            key = self._sessions.open(self._session(plan, name))
        except BudgetError as error:
            played = Played(reward=Ungraded(cause="no_session", detail=str(error)), acting=None, detail="", fault="")
            return self._episode(plan, started_s, played, _Ended.before(played.reward))
        open_session = _OpenSession(self._sessions, key)
        try:
            played = await self._play(plan.task, self._endpoint(key), open_session.tell)
            ended = await open_session.ended(played)
        finally:
            await open_session.abandon()
            self._forget(name)
        return self._episode(plan, started_s, played, ended)

    def _session(self, plan: EpisodePlan, name: str) -> SessionPlan:
        terms = self._terms
        return SessionPlan(
            name=name,
            sampling=plan.sampling,
            max_new_tokens=plan.max_new_tokens,
            max_context_tokens=terms.max_context_tokens,
            max_turns=terms.max_turns,
            max_sampled_tokens=terms.max_sampled_tokens,
            stop_ids=terms.stop_ids,
            seed=plan.seed,
            priority=plan.priority,
            purpose=plan.purpose,
            pinned=plan.pinned,
            want_routes=terms.record_routes and plan.purpose is Purpose.ROLLOUT,
        )

    def _episode(self, plan: EpisodePlan, started_s: float, played: Played, ended: _Ended) -> EndedEpisode:
        header = TrajectoryHeader(
            id=trajectory_id(plan.group, plan.member),
            group=plan.group,
            member=plan.member,
            occurrence=plan.occurrence,
            attempt=plan.attempt,
            task=plan.task.id,
            status=ended.status,
            cause=ended.cause,
            reward=played.reward,
            tokenizer=self._tokenizer,
            adapter=None,
            started_s=started_s,
            ended_s=time.time(),
            session=ended.facts(played),
        )
        trajectory = Trajectory(header=header, payload=ended.closed.payload or _NOTHING)
        return EndedEpisode(trajectory=trajectory, messages=ended.closed.messages)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """How an episode ended, as its header says it."""

    status: TrajectoryStatus
    cause: str
    closed: Closed

    @classmethod
    def before(cls, reward: Reward) -> _Ended:
        """It failed before anything could be asked."""
        cause = f"{reward.cause}: {reward.detail}" if isinstance(reward, Ungraded) else "nothing was played"
        return cls(status=TrajectoryStatus.FAILED, cause=cause, closed=_empty(TrajectoryStatus.FAILED, cause))

    @classmethod
    def of(cls, closed: Closed, acting: Acting, detail: str) -> _Ended:
        """By the finish reason of the last turn; an agent that did not end by itself was cut."""
        status, cause = closed.status, closed.cause
        aborted = closed.finish_reasons[-1:] == (FinishReason.ABORTED,)
        if status is not TrajectoryStatus.FAILED and not aborted:
            if not closed.finish_reasons:  # cut while it waited for its first answer: nothing is there to be graded
                status, cause = TrajectoryStatus.FAILED, f"no_turns: agent_{acting.value} before any answer: {detail}"
            elif acting is not Acting.ENDED:
                status, cause = TrajectoryStatus.TRUNCATED, f"agent_{acting.value}: {detail}"
            elif status is TrajectoryStatus.ABORTED:  # the agent left while the model answered
                status = TrajectoryStatus.TRUNCATED
        return cls(status=status, cause=cause, closed=closed)

    def facts(self, played: Played) -> SessionFacts:
        return SessionFacts(
            turns=len(self.closed.finish_reasons),
            matched={strictness.value: count for strictness, count in self.closed.matched.items()},
            rendered_whole=self.closed.rendered_whole,
            acting=played.acting.value if played.acting else "",
            detail=played.detail,
            fault=played.fault,
        )


@final
class _OpenSession:
    """The session of one episode, until it is closed, once."""

    def __init__(self, sessions: Sessions, key: str) -> None:
        self._sessions = sessions
        self._key = key
        self._ended: _Ended | None = None

    async def tell(self, acting: Acting, detail: str) -> Transcript | Ungraded:
        """Acting is over: no turn is sampled from now on. See `Tell`."""
        self._ended = ended = _Ended.of(await self._close(), acting, detail)
        if ended.status in (TrajectoryStatus.FAILED, TrajectoryStatus.ABORTED):
            cause, _, why = ended.cause.partition(": ")
            word = cause if why else ("aborted" if ended.status is TrajectoryStatus.ABORTED else "no_turns")
            return Ungraded(cause=word, detail=why or ended.cause)
        return Transcript(
            messages=ended.closed.messages,
            finish_reasons=ended.closed.finish_reasons,
            acting=acting,
            detail=detail,
        )

    async def ended(self, played: Played) -> _Ended:
        """How it ended, after it was played."""
        if self._ended is None:  # it did not come to acting
            await self._close()
            self._ended = _Ended.before(played.reward)
        return self._ended

    async def abandon(self) -> None:
        """Close it, if it was not closed."""
        if self._ended is None:
            await self._close()

    async def _close(self) -> Closed:
        try:
            return await self._sessions.close(self._key)
        except RecordError as error:
            return _empty(TrajectoryStatus.FAILED, f"refused: {error}")
        except CallRefusedError:
            return _empty(TrajectoryStatus.FAILED, "no_session: it was closed before")


def _empty(status: TrajectoryStatus, cause: str) -> Closed:
    return Closed(payload=None, status=status, cause=cause, matched={}, rendered_whole=0, messages=())

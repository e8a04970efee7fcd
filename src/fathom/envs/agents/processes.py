"""Episodes behind deadlines: whatever an agent or its environment does, `play` returns in time, and nothing is left."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self, final

from fathom.config.agent import LimitsConfig
from fathom.core.errors import GraderDeadError, RecordError
from fathom.core.ports.agent import Acting, AgentEnvironment, Endpoint, Played, Tell
from fathom.core.ports.environment import GroupGrade, GroupMember, Task
from fathom.core.records.trajectory import Graded, Reward, Ungraded
from fathom.core.wire import FrameReader, frame
from fathom.envs.agents.http import load_http
from fathom.envs.agents.phases import Act, Boot, Close, Compare, Grade, Phase, PhaseEnded, PhaseTime
from fathom.envs.agents.worker import serve
from fathom.envs.nursery import Nursery

_READ_BYTES = 1 << 16


@final
class AgentProcesses:
    """One process for each episode, forked from a warm one and killed at the end, with all that was started in it.

    boot ──> act ──> (the run tells what was said) ──> grade ──> close ──> killed

        async with AgentProcesses(environment, limits) as processes:
            played = await processes.play(task, endpoint, tell)
    """

    def __init__(
        self,
        environment: AgentEnvironment,
        limits: LimitsConfig,
        *,
        memory_bytes: int = 8 << 30,
        start_timeout_s: float = 60.0,
    ) -> None:
        """Nothing starts yet.

        Args:
            environment: must be picklable.
            limits: seconds of each phase.
            memory_bytes: private memory that a process of an episode may have.
            start_timeout_s: deadline of `start`.
        """
        self._nursery = Nursery(
            environment, serve, memory_bytes=memory_bytes, start_timeout_s=start_timeout_s, warm=load_http
        )
        self._limits = limits

    async def __aenter__(self) -> Self:
        """Start; a failed start leaves nothing behind."""
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start, and wait until the environment is warm. Call it before torch loads.

        Raises:
            ConfigError: the environment cannot be sent to another process, or cannot be loaded there.
        """
        await self._nursery.start()

    async def close(self) -> None:
        """End all episodes, and wait until they are gone. Safe to call twice."""
        await self._nursery.close()

    async def play(self, task: Task, endpoint: Endpoint, tell: Tell) -> Played:
        """Play one episode; when it returns, its processes are gone.

        Args:
            task: what to do.
            endpoint: the model.
            tell: called once, after acting; what it raises comes out of here.

        Raises:
            GraderDeadError: the process that keeps the environment is gone.
        """
        number, line = self._nursery.begin()
        with line:
            try:
                return await self._play(_Process(line), task, endpoint, tell)
            finally:
                with suppress(GraderDeadError):  # then they are gone; the next episode says so
                    await self._nursery.ended(number)

    async def grade_group(self, task: Task, members: Sequence[GroupMember]) -> GroupGrade | Ungraded:
        """Compare the graded members of a group in a process of its own, within the time of grading.

        Returns:
            What is added to each; or Ungraded for all of them with cause `group_timeout`, `group_error` or
            `group_died`, or the cause that the environment named.

        Raises:
            GraderDeadError: the process that keeps the environment is gone.
        """
        number, line = self._nursery.begin()
        with line:
            try:
                time = self._time(self._limits.grade_s)
                compared = await _Process(line).do(Compare(time=time, task=task, members=tuple(members)))
            finally:
                with suppress(GraderDeadError):
                    await self._nursery.ended(number)
        if (cause := _cause(compared, "group")) is not None:
            return cause
        if compared is None or not isinstance(compared.given, GroupGrade):
            return Ungraded(cause="group_error", detail="nothing was compared")
        return compared.given

    async def _play(self, process: _Process, task: Task, endpoint: Endpoint, tell: Tell) -> Played:
        limits = self._limits
        booted = await process.do(Boot(time=self._time(limits.boot_s), task=task))
        if (cause := _cause(booted, "boot")) is not None:
            return await self._close(process, cause, None, "")
        acted = await process.do(Act(time=self._time(limits.agent_s), endpoint=endpoint))
        if acted is None:
            await tell(Acting.FAILED, "the process of the episode ended")
            ungraded = Ungraded(cause="agent_died", detail="the process of the episode ended, or had to be killed")
            return Played(reward=ungraded, acting=Acting.FAILED, detail=ungraded.detail, fault="")
        told = await tell(acted.how, acted.detail)
        if isinstance(told, Ungraded):
            return await self._close(process, told, acted.how, acted.detail)
        graded = await process.do(Grade(time=self._time(limits.grade_s), transcript=told))
        reward = _cause(graded, "grader") or (graded.given if graded else None)
        if not isinstance(reward, Graded | Ungraded):
            reward = Ungraded(cause="grader_error", detail="nothing was booted")
        return await self._close(process, reward, acted.how, acted.detail)

    def _time(self, limit_s: float) -> PhaseTime:
        return PhaseTime(limit_s=limit_s, grace_s=self._limits.grace_s)

    async def _close(self, process: _Process, reward: Reward, acting: Acting | None, detail: str) -> Played:
        closed = await process.do(Close(time=self._time(self._limits.close_s)))
        fault = "its process ended" if closed is None else closed.detail
        return Played(reward=reward, acting=acting, detail=detail, fault=fault)


@dataclass(slots=True)
class _Process:
    """Our end of an episode."""

    line: socket.socket
    overdue: bool = False

    async def do(self, phase: Phase) -> PhaseEnded | None:
        """Have a phase done. None: the process has ended, or hangs."""
        if self.overdue:
            return None
        try:
            async with asyncio.timeout(phase.time.killed_s):
                return await self._ask(frame(phase))
        except UnicodeEncodeError as error:
            return PhaseEnded(how=Acting.FAILED, detail=f"this is not valid text: {error}", given=None)
        except (TimeoutError, EOFError, OSError, RecordError) as error:
            self.overdue = isinstance(error, TimeoutError)
            return None

    async def _ask(self, request: bytes) -> PhaseEnded:
        loop, answers = asyncio.get_running_loop(), FrameReader(PhaseEnded)
        await loop.sock_sendall(self.line, request)
        while data := await loop.sock_recv(self.line, _READ_BYTES):
            if done := answers.feed(data):
                return done[0]
        raise EOFError


def _cause(ended: PhaseEnded | None, phase: str) -> Ungraded | None:
    """Why there is no reward. None: the phase ended well."""
    if ended is None:
        return Ungraded(cause=f"{phase}_died", detail="the process of the episode ended, or had to be killed")
    match ended.how:
        case Acting.ENDED:
            return None
        case Acting.TIMEOUT:
            return Ungraded(cause=f"{phase}_timeout", detail=ended.detail)
        case Acting.FAILED:
            return Ungraded(cause=ended.cause or f"{phase}_error", detail=ended.detail)

"""The process of one episode: phases in, how each ended out; then it waits to be killed.

A phase whose time is over is cancelled. Code that blocks the event loop cannot be cancelled, so a timer of the kernel's
interrupts it. What resists that too is killed from outside.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, final

from fathom.core.errors import CutShortError, UngradedError
from fathom.core.ports.agent import Acting, AgentEnvironment, AgentEpisode
from fathom.core.wire import FrameReader, frame
from fathom.envs.agents.phases import Act, Boot, Close, Compare, Given, Grade, Phase, PhaseEnded
from fathom.envs.grading.worker import compare, sound
from fathom.envs.nursery.keeper import describe

_READ_BYTES = 1 << 16


def serve(environment: AgentEnvironment, line: socket.socket) -> None:
    """Run the phases that are asked for on `line`, and never return: what the episode started stays below it."""
    for request_to_stop in (signal.SIGINT, signal.SIGTERM):  # ignored until here, and so by all that it would start
        signal.signal(request_to_stop, signal.SIG_DFL)
    line.setblocking(False)
    asyncio.run(_Worker(environment, line).run())
    while True:
        signal.pause()


class _OverdueError(BaseException):
    """Raised wherever a phase blocks, long after its time."""


@final
class _Worker:
    def __init__(self, environment: AgentEnvironment, line: socket.socket) -> None:
        self._environment = environment
        self._line = line
        self._episode: AgentEpisode | None = None

    async def run(self) -> None:
        """Until the line is closed, or the run has died."""
        loop, phases = asyncio.get_running_loop(), FrameReader(Phase)
        with suppress(ConnectionError):
            while data := await loop.sock_recv(self._line, _READ_BYTES):
                for phase in phases.feed(data):
                    ended = frame(await self._within(phase))
                    await loop.sock_sendall(self._line, ended)

    async def _within(self, phase: Phase) -> PhaseEnded:
        """A phase under its limit."""
        limit_s, grace_s = phase.time.limit_s, phase.time.grace_s
        work = asyncio.create_task(_guarded(self._do(phase)))
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, limit_s + 2 * grace_s, grace_s / 4)
        try:
            done, _ = await asyncio.wait({work}, timeout=limit_s)
            if not done:
                work.cancel()
                await asyncio.wait({work}, timeout=grace_s)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        given = work.result() if done else _late(phase)
        if isinstance(given, _OverdueError):
            given = _late(phase)
        if isinstance(given, BaseException):
            return _ended_badly(given)
        return PhaseEnded(how=Acting.ENDED, detail="", given=given)

    async def _do(self, phase: Phase) -> Given | None:
        if isinstance(phase, Compare):
            return await compare(self._environment, phase.task, phase.members)
        if isinstance(phase, Boot):
            self._episode = self._environment.episode(phase.task)
        episode = self._episode
        if episode is None:  # it could not be made: nothing to close
            return None
        match phase:
            case Boot():
                await episode.boot()
            case Act():
                await episode.act(phase.endpoint)
            case Grade():
                return sound(await episode.grade(phase.transcript))
            case Close():
                await episode.close()
        return None


class _LateError(Exception):
    """A phase was not over in time."""


def _late(phase: Phase) -> _LateError:
    return _LateError(f"not over within {phase.time.limit_s:g} s")


def _ended_badly(error: BaseException) -> PhaseEnded:
    match error:
        case _LateError() | CutShortError():
            return PhaseEnded(how=Acting.TIMEOUT, detail=str(error), given=None)
        case UngradedError():
            return PhaseEnded(how=Acting.FAILED, detail=error.detail, given=None, cause=error.cause)
        case _:
            return PhaseEnded(how=Acting.FAILED, detail=describe(error), given=None)


async def _guarded(work: Coroutine[Any, Any, Given | None]) -> Given | BaseException | None:
    """Whatever user code raises is a result: even SystemExit ends a phase, and not the process."""
    try:
        return await work
    except BaseException as error:  # noqa: BLE001  # the boundary to user code
        return error


def _interrupt(_number: int, _frame: object) -> None:
    raise _OverdueError

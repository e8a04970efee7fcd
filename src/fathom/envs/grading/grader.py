"""Graders behind a deadline: whatever a grader does, `grade` returns in time and the next answer is graded."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, final

from fathom.core.errors import ConfigError, GraderDeadError, RecordError
from fathom.core.ports.environment import Environment, GroupGrade, GroupMember, Task
from fathom.core.records.trajectory import Graded, Reward, Ungraded
from fathom.core.wire import FrameReader, frame
from fathom.envs.grading.worker import CompareRequest, GradeRequest, serve
from fathom.envs.nursery import Nursery

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """Our end of one worker."""

    number: int
    line: socket.socket
    rewards: FrameReader = field(default_factory=lambda: FrameReader(Graded | GroupGrade | Ungraded))

    async def ask(self, request: bytes) -> Any:
        """Send one framed request and wait for the answer. Raises EOFError or OSError when the worker has ended."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.line, request)
        while data := await loop.sock_recv(self.line, _READ_BYTES):
            if done := self.rewards.feed(data):
                return done[0]
        raise EOFError


@final
class Grader:
    """A constant number of worker processes that grade under a deadline.

    The environment is sent once, at `start`; workers are forked from a warm process that never loads torch (see
    `nursery`). A worker that is late, dies, or whose caller gave up is killed with all it started and replaced at once.

        async with Grader(environment, workers=2, timeout_s=10.0) as grader:
            reward = await grader.grade(task, "42")
    """

    def __init__(
        self,
        environment: Environment,
        *,
        workers: int,
        timeout_s: float,
        memory_bytes: int = 8 << 30,
        start_timeout_s: float = 60.0,
    ) -> None:
        """Nothing starts yet.

        Args:
            environment: what grades; must be picklable.
            workers: processes, 1 to 256.
            timeout_s: deadline of one grading, waiting for a free worker excluded.
            memory_bytes: private memory a worker may have; more is a MemoryError in the grader, so *ungraded*.
            start_timeout_s: deadline of `start`.
        """
        if not 1 <= workers <= 256:
            raise ConfigError(f"task.grader_workers must be from 1 to 256, got {workers}")
        self._nursery = Nursery(environment, serve, memory_bytes=memory_bytes, start_timeout_s=start_timeout_s)
        self._workers = workers
        self._timeout_s = timeout_s
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()

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
        """Start, and wait until the environment is warm; workers are forked from there. Call it before torch loads.

        Raises:
            ConfigError: the environment cannot be sent to another process, or cannot be loaded there.
        """
        await self._nursery.start()
        for _ in range(self._workers):
            self._put_fresh_worker()

    async def grade(self, task: Task, answer: str) -> Reward:
        """Grade one answer, between `start` and `close`. Answers wait for a free worker in order of arrival.

        Returns:
            The grader's reward; or Ungraded with cause `grader_timeout`, `grader_error` (it raised, or returned
            something that is not a finite reward) or `grader_died` (its process ended).

        Raises:
            GraderDeadError: the process that keeps the workers is gone.
        """
        return await self._ask(GradeRequest(task=task, answer=answer), "grader", f"task {task.id}")

    async def grade_group(self, task: Task, members: Sequence[GroupMember]) -> GroupGrade | Ungraded:
        """Compare the graded members of a group, as `grade` does it and under the same deadline.

        Returns:
            What is added to each; or Ungraded for all of them with cause `group_timeout`, `group_error` or
            `group_died`, or the cause that the grader named.

        Raises:
            GraderDeadError: the process that keeps the workers is gone.
        """
        request = CompareRequest(task=task, members=tuple(members))
        return await self._ask(request, "group", f"a group of task {task.id}")

    async def _ask(self, asked: GradeRequest | CompareRequest, whose: str, what: str) -> Any:
        """The worker's answer, or why there is none: `<whose>_timeout`, ... ."""
        try:
            request = frame(asked)
        except UnicodeEncodeError as error:
            return Ungraded(cause=f"{whose}_error", detail=f"{what} or its answer is not valid text: {error}")
        worker = await self._idle.get()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await worker.ask(request)
        except TimeoutError:
            self._replace(worker)
            return Ungraded(cause=f"{whose}_timeout", detail=f"no reward for {what} in {self._timeout_s:g} s")
        except (EOFError, OSError, RecordError):
            self._replace(worker)
            return Ungraded(cause=f"{whose}_died", detail=f"the worker process ended while it graded {what}")
        except BaseException:
            with suppress(GraderDeadError):  # the next grade says so; this caller is giving up
                self._replace(worker)
            raise
        self._idle.put_nowait(worker)
        return answer

    async def close(self) -> None:
        """End all workers, busy or not, and wait until they are gone. Safe to call twice."""
        await self._nursery.close()
        for _ in range(self._idle.qsize()):  # kept, so that a late caller gets an answer instead of waiting
            worker = self._idle.get_nowait()
            worker.line.close()
            self._idle.put_nowait(worker)

    def _replace(self, worker: _Worker) -> None:
        worker.line.close()
        if not self._nursery.is_open:
            self._idle.put_nowait(worker)
            return
        try:
            self._nursery.end(worker.number)
            self._put_fresh_worker()
        except GraderDeadError:
            self._idle.put_nowait(worker)  # whoever asks it learns the same
            raise

    def _put_fresh_worker(self) -> None:
        """It can be asked at once: requests wait in its socket until it is there."""
        number, line = self._nursery.begin()
        self._idle.put_nowait(_Worker(number=number, line=line))

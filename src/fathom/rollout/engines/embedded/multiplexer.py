"""Many requests in one HTTP call: what a call costs is paid once for all that start at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import final

import httpx

from fathom.core.errors import EngineError, RecordError
from fathom.core.ports.engine import GenerateChunk, GenerateRequest, ScoreRequest, ScoreResult
from fathom.core.wire import FrameReader, frame
from fathom.rollout.engines.embedded.messages import (
    FRAMES,
    Failure,
    RequestFailure,
    Scored,
    Streamed,
    StreamFrame,
    SubmitCall,
)

_GATHER_S = 0.001
"""How long the first request of a call waits for others."""

Part = GenerateChunk | ScoreResult | Failure
"""What is heard of a request."""
Abort = Callable[[tuple[str, ...]], Awaitable[None]]
"""Ends generations of these request ids early."""


@final
class Reply:
    """The answer to one request, as its reader sees it."""

    def __init__(self, request: GenerateRequest | ScoreRequest, call: _Call) -> None:
        self.request = request
        self.call = call
        self._parts: asyncio.Queue[Part | Exception] = asyncio.Queue()

    async def next(self) -> Part:
        """The next part, or why there is none. Raises what broke the call. Waits for ever: callers have a deadline."""
        part = await self._parts.get()
        if isinstance(part, Exception):
            raise part
        return part

    def put(self, part: Part | Exception) -> None:
        """Hand the next part to the reader."""
        self._parts.put_nowait(part)


@final
class Multiplexer:
    """Sends requests of the same moment in one call, and hands each its own answer.

    Requests of a call share its fate only where the call itself breaks: then all that have not ended fail. There
    is no limit to how many share one, nor to the number of calls.
    """

    def __init__(self, http: httpx.AsyncClient, abort: Abort) -> None:
        self._http = http
        self._abort = abort
        self._gathering: _Call | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: GenerateRequest | ScoreRequest) -> Reply:
        """Put a request into the call that is about to leave. `leave` must follow."""
        call = self._gathering
        if call is None or request.request_id in call.open:  # sent twice: let the engine refuse it
            call = self._gathering = _Call()
            call.task = self._spawn(self._carry(call))
        reply = Reply(request, call)
        call.open[request.request_id] = reply
        return reply

    def leave(self, reply: Reply) -> None:
        """Nobody reads it any more. Ends it early if it has not ended."""
        call, name = reply.call, reply.request.request_id
        if call.open.get(name) is not reply:
            return
        del call.open[name]
        if call.sent and not call.open:
            call.task.cancel()  # the engine ends what runs when its reader goes away
        elif call.sent:
            call.left.append(name)
            if call.answered and len(call.left) == 1:
                self._spawn(self._end_early(call))

    async def close(self) -> None:
        """Fail what has not ended."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, call: _Call) -> None:
        """One call from its first request to its last chunk."""
        reason: Exception = RecordError("the stream broke off before its end")
        try:
            await asyncio.sleep(_GATHER_S)
            if self._gathering is call:
                self._gathering = None
            if call.open:
                await self._exchange(call)
        except Exception as error:  # noqa: BLE001 - raised again by every reader it concerns, who types it
            reason = error
        finally:
            for reply in call.open.values():
                reply.put(reason)
            call.open.clear()

    async def _exchange(self, call: _Call) -> None:
        requests = tuple(reply.request for reply in call.open.values())
        reader = FrameReader(StreamFrame | Failure)
        call.sent = True
        async with self._http.stream("POST", "/submit", content=frame(SubmitCall(requests=requests))) as response:
            require_frames(response)
            call.answered = True
            if call.left:
                self._spawn(self._end_early(call))
            async for data in response.aiter_raw():
                for record in reader.feed(data):
                    if isinstance(record, Failure):
                        call.fail(record)
                    else:
                        for part in record.parts:
                            call.hand_out(part)

    async def _end_early(self, call: _Call) -> None:
        """Abort what was left in this turn of the event loop."""
        await asyncio.sleep(0)
        names, call.left = tuple(call.left), []
        with suppress(EngineError):  # an engine that does not answer is found by those who wait for it
            await self._abort(names)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def require_frames(response: httpx.Response) -> None:
    """Raise `RecordError` for an error that is not told in a record: something else answers, or half of the engine."""
    if response.is_error and response.headers.get("content-type") != FRAMES:
        raise RecordError(f"answered HTTP {response.status_code} without a record")


@final
class _Call:
    """Generations that travel together."""

    task: asyncio.Task[None]
    """Carries it."""

    def __init__(self) -> None:
        self.open: dict[str, Reply] = {}
        """Those that have not ended and that somebody reads, by request id."""
        self.left: list[str] = []
        """Those that must be ended early, and that the engine was not told about."""
        self.sent = False
        """Its requests are on their way: no other can join."""
        self.answered = False
        """The engine has them all."""

    def hand_out(self, part: Streamed) -> None:
        """To its reader, if there still is one."""
        ended = not isinstance(part, GenerateChunk) or part.end is not None
        reply = self.open.pop(part.request_id, None) if ended else self.open.get(part.request_id)
        if reply is None:
            return
        match part:
            case GenerateChunk():
                reply.put(part)
            case Scored():
                reply.put(part.result)
            case RequestFailure():
                reply.put(part.failure)

    def fail(self, failure: Failure) -> None:
        """The engine answers none of them."""
        for reply in self.open.values():
            reply.put(failure)
        self.open.clear()

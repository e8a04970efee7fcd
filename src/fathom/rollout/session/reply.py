"""One reply: from a call that was read to the last byte of its answer.

An answer counts as heard when all of it was sent and the client was still there. Until then it waits for the client to
come back: official clients send the same call again, with a header that says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fathom.core.errors import EngineError, EngineRefusedError, RecordError
from fathom.core.records.sampling import FinishReason
from fathom.rollout.session.call import CallRefusedError, Heard, Refusal, TurnBegan, TurnEnded
from fathom.rollout.session.dialects.dialect import RETRIED, STATUS, Asked, Dialect, Writer
from fathom.rollout.session.session import Session

JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"
_DECIDE_S = 1.0
"""How long a stream waits for the first word before it begins: a failure until then has a status of its own."""
_WAIT_S = 10.0
"""After so long without a word something is sent that clients ignore, lest they give up."""


def refused(dialect: Dialect, error: CallRefusedError) -> Response:
    """The reply that says no."""
    headers = {"x-should-retry": "true" if error.kind in RETRIED else "false"}
    return Response(dialect.refusal(error), STATUS[error.kind], headers, JSON)


@final
class Reply:
    """Answers one request, whole or as a stream."""

    def __init__(self, dialect: Dialect, asked: Asked, session: Session, headers: Mapping[str, str]) -> None:
        """`headers`: the request's, which may say that it was sent before."""
        call = replace(
            asked.call,
            retry=headers.get("idempotency-key", ""),
            resent=headers.get("x-stainless-retry-count", "0") not in ("", "0"),
        )
        self._dialect = dialect
        self._stream = asked.stream
        self._writer: Writer = asked.writer
        self._answer: AsyncIterator[Heard] = session.answer(call)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI response."""
        line = _Line(receive, send)
        try:
            await self._send(line)
        except CallRefusedError as error:  # before anything was sent
            await refused(self._dialect, error)(scope, receive, send)
        except _GoneError:
            return  # the answer waits for it
        finally:
            line.close()

    async def _send(self, line: _Line) -> None:
        try:
            async with aclosing(self._answer):  # type: ignore[type-var]
                await (self._send_stream(line) if self._stream else self._send_whole(line))
        except CallRefusedError as error:
            if not line.began:
                raise
            await line.last(self._writer.fail(error))

    async def _send_whole(self, line: _Line) -> None:
        while (heard := await self._next(line, None)) is not None:
            if isinstance(heard, TurnEnded):
                body = self._writer.whole(heard)
                await line.start(200, {"content-type": JSON, "content-length": str(len(body))})
                await line.last(body)

    async def _send_stream(self, line: _Line) -> None:
        waiting = b""
        while (heard := await self._next(line, waiting)) is not None:
            match heard:
                case TurnBegan():
                    waiting = self._writer.begin(heard)
                    continue
                case TurnEnded():
                    sent = self._writer.end(heard)
                case _:
                    sent = self._writer.delta(heard)
            if not line.began:
                await self._begin(line)
                sent = waiting + sent
            await (line.last(sent) if isinstance(heard, TurnEnded) else line.body(sent))

    async def _begin(self, line: _Line) -> None:
        await line.start(200, {"content-type": _EVENTS, "cache-control": "no-cache"})

    async def _next(self, line: _Line, waiting: bytes | None) -> Heard | None:
        """What is heard next. None: all was heard. `waiting`: what a stream begins with; None: it is no stream."""
        coming = asyncio.ensure_future(_next_of(self._answer))
        try:
            while not await line.wait_for(coming, _DECIDE_S if waiting and not line.began else _WAIT_S):
                if not waiting:
                    continue
                if not line.began:
                    await self._begin(line)
                    await line.body(waiting)
                else:
                    await line.body(self._writer.wait())
            return await coming
        except EngineRefusedError as error:
            raise CallRefusedError(Refusal.INVALID, f"the engine refuses the call: {error.reason}") from error
        except (EngineError, RecordError) as error:
            raise CallRefusedError(Refusal.ENGINE_FAILED, f"{error}; the call may be sent again") from error
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)  # until then the answer cannot be closed


async def _next_of(answer: AsyncIterator[Heard]) -> Heard | None:
    heard = await anext(answer, None)
    if isinstance(heard, TurnEnded) and heard.finish_reason is FinishReason.ABORTED:
        raise CallRefusedError(Refusal.ENGINE_FAILED, "the engine gave the answer up; the call may be sent again")
    return heard


class _GoneError(Exception):
    """The client has gone."""


@final
class _Line:
    """The connection to the client."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._send = send
        self._gone = asyncio.create_task(_until_gone(receive))
        self.began = False

    async def wait_for(self, coming: asyncio.Future[Heard | None], seconds: float) -> bool:
        """Whether something came within that time. Raises _GoneError when the client went away before."""
        await asyncio.wait({coming, self._gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self._check()
        return coming.done()

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head."""
        self.began = True
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def body(self, part: bytes) -> None:
        """Send a part. Raises _GoneError when the client is not there any more."""
        if part:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
        self._check()

    async def last(self, part: bytes) -> None:
        """Send the last part. Raises _GoneError when the client went away before all of it was handed over."""
        await self.body(part)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        """Nothing more is sent."""
        self._gone.cancel()

    def _check(self) -> None:
        if self._gone.done():
            raise _GoneError


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

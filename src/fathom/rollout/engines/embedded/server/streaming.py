"""The answer to a call with many requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import final

from starlette.types import Receive, Scope, Send

from fathom.core.ports.engine import GenerateChunk
from fathom.core.wire import frame
from fathom.rollout.engines.embedded.messages import FRAMES, Streamed, StreamFrame
from fathom.rollout.engines.embedded.server.job import Stream


@final
class Streaming:
    """Sends chunks as they come: all that a decode step made for this call leave in one write."""

    def __init__(self, stream: Stream, requests: int, abandon: Callable[[], object]) -> None:
        """Over when all `requests` have ended; `abandon` is called when the client goes away before."""
        self._stream = stream
        self._running = requests
        self._abandon = abandon

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI response."""
        gone = asyncio.create_task(self._watch(receive))
        try:
            headers = [(b"content-type", FRAMES.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while self._running and (parts := await self._ready()):
                self._running -= sum(map(_is_last, parts))
                body = frame(StreamFrame(parts=parts))
                await send({"type": "http.response.body", "body": body, "more_body": self._running > 0})
        finally:
            gone.cancel()
            if self._running:
                self._abandon()

    async def _ready(self) -> tuple[Streamed, ...]:
        """What is there, at least one part. Empty: the client has gone."""
        parts = [await self._stream.get()]
        while not self._stream.empty():
            parts.append(self._stream.get_nowait())
        there = tuple(part for part in parts if part is not None)
        return there if len(there) == len(parts) else ()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stream.put_nowait(None)


def _is_last(part: Streamed) -> bool:
    return not isinstance(part, GenerateChunk) or part.end is not None

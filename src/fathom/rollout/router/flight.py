"""One generation on its way through one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import final

from fathom.core.errors import EngineError
from fathom.core.ids import EngineId
from fathom.core.ports.engine import GenerateChunk, GenerateRequest


@final
class Flight:
    """Can be cut: then its reader gets the cause at once, whatever the engine does or does not do."""

    def __init__(self, engine: EngineId, request: GenerateRequest) -> None:
        self.engine = engine
        """Who generates."""
        self.tokens = cost(request)
        """Tokens it may still cost: its prompt, and those not yet sampled of its budget."""
        self._cut = ""
        self._waiting: asyncio.Timeout | None = None

    @property
    def is_cut(self) -> bool:
        """True when it was discarded."""
        return bool(self._cut)

    async def next(self, stream: AsyncIterator[GenerateChunk], trusted: Callable[[], Awaitable[None]]) -> GenerateChunk:
        """The next chunk of its stream, once its engine is `trusted`.

        Raises:
            EngineError: it was cut, or the engine failed.
            StopAsyncIteration: the stream is over.
        """
        self._require_whole()
        try:
            async with asyncio.timeout(None) as self._waiting:
                chunk = await anext(stream)
                await trusted()
                return chunk
        except TimeoutError:
            self._require_whole()
            raise
        finally:
            self._waiting = None

    def cut(self, reason: str) -> None:
        """Discard it. Only the first reason counts."""
        if not self._cut:
            self._cut = reason
            if self._waiting is not None:
                self._waiting.reschedule(0.0)  # a moment that has passed: the wait ends now

    def _require_whole(self) -> None:
        if self._cut:
            raise EngineError(self.engine, f"the generation was discarded: {self._cut}")


def cost(request: GenerateRequest) -> int:
    """Tokens that a request may cost."""
    return len(request.prompt_ids) + request.max_new_tokens

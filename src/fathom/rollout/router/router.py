"""Which engine serves a request: the least loaded of those that serve, the same one for a session."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import final

from fathom.core.errors import EngineError
from fathom.core.ids import EngineId
from fathom.core.ports.engine import Engine, GenerateChunk, GenerateRequest


@final
class Router:
    """Spreads generations over engines. `serving` is asked at every request: a fenced engine gets none."""

    def __init__(self, serving: Callable[[], Sequence[Engine]]) -> None:
        self._serving = serving
        self._load: Counter[EngineId] = Counter()
        self._homes: dict[str, EngineId] = {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Stream one generation from one engine. Never repeats it: a generation that may have started is not retried.

        Raises:
            EngineError: no engine serves, or the chosen one failed.
        """
        engine = self._pick(request.session_key)
        self._load[engine.id] += 1
        self._homes[request.session_key] = engine.id
        try:
            async for chunk in engine.generate(request):
                yield chunk
        finally:
            self._load[engine.id] -= 1

    def forget(self, session_key: str) -> None:
        """The session has ended; its engine is no longer remembered."""
        self._homes.pop(session_key, None)

    def _pick(self, session_key: str) -> Engine:
        engines = self._serving()
        if not engines:
            raise EngineError("fleet", "no engine serves; see the faults in `fathom show`")
        home = self._homes.get(session_key)
        for engine in engines:
            if engine.id == home:
                return engine
        return min(engines, key=lambda engine: self._load[engine.id])

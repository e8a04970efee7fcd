"""Time that passes when a test says so."""

from __future__ import annotations

import asyncio
import heapq
from typing import final

_SETTLE_TURNS = 20


@final
class ScriptedClock:
    """Hand `clock.sleep` to whatever would sleep; then `advance`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    async def sleep(self, seconds: float) -> None:
        """Return when the clock has been advanced by `seconds`."""
        waking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self.now_s + seconds, self._count, waking))
        await waking

    async def advance(self, seconds: float) -> None:
        """Let time pass: sleepers wake in order, each with the time to act before the next one wakes."""
        until_s = self.now_s + seconds
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= until_s:
            self.now_s, _, waking = heapq.heappop(self._sleepers)
            if not waking.done():
                waking.set_result(None)
            await _settle()
        self.now_s = until_s


async def _settle() -> None:
    for _ in range(_SETTLE_TURNS):
        await asyncio.sleep(0)

"""Who may send to the server, and when nobody may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import final


@final
class Gate:
    """Shut during a commit. Short calls that are inside hold a commit up; generations only where it drains."""

    def __init__(self) -> None:
        self._open = True
        self._generations = 0
        self._short_calls = 0
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def generations(self) -> int:
        """Those inside."""
        return self._generations

    async def enter(self) -> None:
        """Go in for a generation, as soon as it is open. `leave` must follow."""
        await self._until(lambda: self._open)
        self._generations += 1

    def leave(self) -> None:
        """Go out."""
        self._generations -= 1
        self._tell()

    async def enter_briefly(self) -> None:
        """Go in for a call during which no commit may happen. `leave_briefly` must follow."""
        await self._until(lambda: self._open)
        self._short_calls += 1

    def leave_briefly(self) -> None:
        """Go out."""
        self._short_calls -= 1
        self._tell()

    def shut(self) -> None:
        """Nobody enters any more. Who is inside may stay."""
        self._open = False

    def reopen(self) -> None:
        """Everybody may enter."""
        self._open = True
        self._tell()

    async def until_quiet(self, *, drained: bool) -> None:
        """Wait until no short call is inside, and with `drained` no generation either."""
        await self._until(lambda: not self._short_calls and not (drained and self._generations))

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            changed = asyncio.get_running_loop().create_future()
            self._waiting.add(changed)
            try:
                await changed
            finally:
                self._waiting.discard(changed)

    def _tell(self) -> None:
        for changed in self._waiting:
            if not changed.done():
                changed.set_result(None)

"""Named places where a test may make things fail.

Production code calls `reach`; without an injector nothing happens.
"""

from __future__ import annotations

from typing import Protocol, final


class Faults(Protocol):
    """Decides what happens at a named place."""

    async def reach(self, place: str) -> None:
        """Return, wait, or raise."""
        ...


@final
class NoFaults:
    """Nothing ever fails on purpose."""

    async def reach(self, place: str) -> None:
        """Return at once."""

"""What an episode of a Harbor task needs of the world in which it happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fathom.envs.sandbox import PlacedFile, Ran


class Place(Protocol):
    """The world of one attempt at one task. Each call has a deadline; SandboxError: the world is gone or refuses."""

    async def open(self) -> None:
        """Make it, with all that the task puts there for an agent: neither tests nor solution."""
        ...

    async def run(self, command: str, timeout_s: float) -> Ran:
        """Run a command of the shell where the task starts."""
        ...

    async def begin_tests(self) -> None:
        """The agent has stopped. Commands from now on are the tests'."""
        ...

    async def empty(self, folder: str) -> None:
        """Make a folder that holds nothing, whatever was there."""
        ...

    async def put(self, files: Sequence[PlacedFile]) -> None:
        """Put files there."""
        ...

    async def get(self, path: str) -> bytes | None:
        """A plain file's content. None: there is none."""
        ...

    async def close(self) -> None:
        """End it, whatever came before. Safe to call twice, and when it was never opened."""
        ...

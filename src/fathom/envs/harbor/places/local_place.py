"""A task in the local sandbox. The host's programs stand in for its image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from fathom.envs.harbor.folder import LOGS, HarborTask, Room
from fathom.envs.sandbox import PlacedFile, Ran, Sandbox

_OPEN_VARIABLES = (("PYTHONNOUSERSITE", "1"),)


@final
class LocalPlace:
    """A `Place`."""

    def __init__(self, task: HarborTask, room: Room) -> None:
        """Nothing starts yet. `room`: what the task may use."""
        self._task = task
        self._spec = task.spec(room)
        self._sandbox = Sandbox(self._spec)

    async def open(self) -> None:
        """Make the sandbox, and put there what COPY names."""
        await self._sandbox.open()
        for folder in (*self._task.folders(), f"{LOGS}/agent"):
            await self._sandbox.empty(folder)
        await self._sandbox.put(self._task.environment_files())

    async def run(self, command: str, timeout_s: float) -> Ran:
        """In one shell for all commands."""
        return await self._sandbox.run(command, timeout_s)

    async def begin_tests(self) -> None:
        """End every process, and give the tests limits and variables of their own."""
        table = self._task.file.verifier
        limits = replace(self._spec.limits, cpu_s=max(1, math.ceil(table.timeout_sec)))
        await self._sandbox.begin_phase(limits, (*_OPEN_VARIABLES, *table.env.items()))

    async def empty(self, folder: str) -> None:
        """See `Sandbox.empty`."""
        await self._sandbox.empty(folder)

    async def put(self, files: Sequence[PlacedFile]) -> None:
        """See `Sandbox.put`."""
        await self._sandbox.put(files)

    async def get(self, path: str) -> bytes | None:
        """See `Sandbox.get`."""
        return await self._sandbox.get(path)

    async def close(self) -> None:
        """End the sandbox."""
        await self._sandbox.close()

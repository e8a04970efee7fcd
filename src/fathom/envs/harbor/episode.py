"""One attempt at a Harbor task: a sandbox is made, somebody acts in it, the tests judge what is left."""

from __future__ import annotations

import asyncio
from typing import final

from fathom.core.ports.agent import Endpoint, Transcript
from fathom.core.records.trajectory import Graded
from fathom.envs.harbor.actors import Actor
from fathom.envs.harbor.folder import LOGS, HarborTask, Room
from fathom.envs.harbor.verifier import verify
from fathom.envs.sandbox import Sandbox


@final
class HarborEpisode:
    """An `AgentEpisode`."""

    def __init__(self, task: HarborTask, room: Room, actor: Actor) -> None:
        """Nothing starts yet.

        Args:
            task: the task.
            room: what it may use.
            actor: who acts.
        """
        self._task = task
        self._spec = task.spec(room)
        self._actor = actor
        self._sandbox = Sandbox(self._spec)

    async def boot(self) -> None:
        """Make the sandbox and put the task's files there; tests and solution are not among them."""
        await self._sandbox.open()
        for folder in (*self._task.layout.folders, f"{LOGS}/agent"):
            await self._sandbox.empty(folder)
        await self._sandbox.put(self._task.environment_files())

    async def act(self, endpoint: Endpoint) -> None:
        """Let the actor work, at most for the task's own time."""
        async with asyncio.timeout(self._task.file.agent.timeout_sec):
            await self._actor(self._task, self._sandbox, endpoint)

    async def grade(self, transcript: Transcript) -> Graded:
        """Judge what is left, however acting ended.

        Raises:
            VerifierError, SandboxError: there is no reward.
        """
        return await verify(self._task, self._sandbox, self._spec)

    async def close(self) -> None:
        """End the sandbox."""
        await self._sandbox.close()

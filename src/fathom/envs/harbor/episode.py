"""One attempt at a Harbor task: a place is opened, somebody acts in it, the tests judge what is left."""

from __future__ import annotations

import asyncio
from typing import final

from fathom.core.errors import CutShortError
from fathom.core.ports.agent import Endpoint, Transcript
from fathom.core.records.trajectory import Graded
from fathom.envs.harbor.actors import Actor
from fathom.envs.harbor.folder import HarborTask
from fathom.envs.harbor.places import Place
from fathom.envs.harbor.verifier import verify


@final
class HarborEpisode:
    """An `AgentEpisode`."""

    def __init__(self, task: HarborTask, place: Place, actor: Actor) -> None:
        """Nothing starts yet.

        Args:
            task: the task.
            place: where it happens; not yet open.
            actor: who acts.
        """
        self._task = task
        self._place = place
        self._actor = actor

    async def boot(self) -> None:
        """Open the place, with the task's files; tests and solution are not among them."""
        await self._place.open()

    async def act(self, endpoint: Endpoint) -> None:
        """Let the actor work, at most for the task's own time. Raises CutShortError: it was over."""
        limit_s = self._task.file.agent.timeout_sec
        time = asyncio.timeout(limit_s)
        try:
            async with time:
                await self._actor(self._task, self._place, endpoint)
        except TimeoutError as error:
            if not time.expired():
                raise
            raise CutShortError(f"not over within {limit_s:g} s ([agent] timeout_sec of task.toml)") from error

    async def grade(self, transcript: Transcript) -> Graded:
        """Judge what is left, however acting ended.

        Raises:
            VerifierError, SandboxError: there is no reward.
        """
        return await verify(self._task, self._place)

    async def close(self) -> None:
        """End the place."""
        await self._place.close()

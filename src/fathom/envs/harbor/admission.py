"""Whether a task may be trained on: its own solution must get 1, and doing nothing must get 0."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fathom.core.errors import FathomError
from fathom.core.ports.agent import Acting, Endpoint, Transcript
from fathom.envs.harbor.actors import Actor, nobody, oracle
from fathom.envs.harbor.episode import HarborEpisode
from fathom.envs.harbor.folder import HarborTask, Room, read_task
from fathom.envs.harbor.places import LocalPlace
from fathom.envs.harbor.places.provider import Provider
from fathom.envs.harbor.places.provider_place import ProviderPlace
from fathom.envs.harbor.verifier import VerifierError
from fathom.envs.sandbox.view import require_tools

ROOM = Room(memory_mb=512, storage_mb=64, num_processes=64, output_bytes=4096)
"""What tasks are checked with; the same as the environment's defaults."""

_NO_MODEL = Endpoint(base_url="http://127.0.0.1:9", key="none", model="none")
_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What the check of one folder found."""

    name: str
    """The folder's name."""
    oracle: float | None
    """Reward of the task's own solution. None: there was none; `reason` says why."""
    no_op: float | None
    """Reward of doing nothing. None: there was none."""
    reason: str
    """Why it is not admitted. Empty: it is."""

    @property
    def admitted(self) -> bool:
        """It may be trained on."""
        return not self.reason


async def check_folders(folders: Sequence[Path], provider: Provider | None = None) -> list[Admission]:
    """Check task folders, a few at a time; the answers are in the order of `folders`.

    Args:
        folders: the folders.
        provider: of Harbor's, where they are tried. None: in the local sandbox.

    Raises:
        ConfigError: a program that sandboxes need is missing.
    """
    if provider is None:
        require_tools()
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(folder: Path) -> Admission:
        async with places:
            return await _check(folder, provider)

    return await asyncio.gather(*(one(folder) for folder in folders))


async def reward_of(task: HarborTask, actor: Actor, provider: Provider | None = None) -> float:
    """The reward that `actor` gets, in the local sandbox or where a provider of Harbor's makes one.

    Raises:
        VerifierError, SandboxError: there is none.
    """
    place = LocalPlace(task, ROOM) if provider is None else ProviderPlace(task, provider.box, ROOM.output_bytes)
    episode = HarborEpisode(task, place, actor)
    try:
        await episode.boot()
        await episode.act(_NO_MODEL)
        ended = Transcript(messages=(), finish_reasons=(), acting=Acting.ENDED, detail="")
        return (await episode.grade(ended)).total
    finally:
        await episode.close()


async def _check(folder: Path, provider: Provider | None) -> Admission:
    try:
        task = read_task(folder, local=provider is None)
    except FathomError as error:
        return Admission(name=folder.name, oracle=None, no_op=None, reason=str(error))
    solved, why_solved = await _try(task, oracle, provider)
    idle, why_idle = await _try(task, nobody, provider)
    reason = why_solved or why_idle
    if not reason and solved != 1.0:
        reason = f"its own solution gets {solved:g}, not 1"
    if not reason and idle != 0.0:
        reason = f"doing nothing gets {idle:g}, not 0"
    return Admission(name=folder.name, oracle=solved, no_op=idle, reason=reason)


async def _try(task: HarborTask, actor: Actor, provider: Provider | None) -> tuple[float | None, str]:
    try:
        return await reward_of(task, actor, provider), ""
    except (FathomError, VerifierError, TimeoutError) as error:
        return None, str(error) or "its time was over"

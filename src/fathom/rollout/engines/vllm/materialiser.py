"""Whole versions made on the host, from sources that hold only what changed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import final

from torch import Tensor

from fathom.core.adapter import AdapterIdentity
from fathom.core.ids import EngineId
from fathom.core.manifest import Manifest, SharedMemorySource, WeightSource
from fathom.sync.held import Held
from fathom.sync.transports.inbox import Inbox
from fathom.sync.transports.shared import SharedTransport


@final
class Materialiser:
    """Makes versions in shared memory, for a server that can read nothing but whole ones.

    The version made last stays: the next one is made from it, beside it, so two files are used in turn. Everything
    happens in threads, while the server goes on generating.
    """

    def __init__(self, engine: EngineId, run_folder: Path, adapter: AdapterIdentity | None = None) -> None:
        """Files lie in shared memory, or in `run_folder` where the host has none. `adapter`: what versions are of."""
        self._inbox = Inbox(engine, adapter=adapter)
        self._files = SharedTransport(run_folder)
        self._made: Held | None = None

    async def make(self, manifest: Manifest, source: WeightSource) -> tuple[SharedMemorySource, int]:
        """Make a version; returns where it lies until the next is made, and the bytes read for it.

        Raises:
            PayloadError: the source does not hold what the manifest says. What was made before is as it was.
            DeliveryError: there is no room.
        """
        version = manifest.version
        if self._made is not None and self._made.version == version:
            return self._files.offer(version, ()), 0
        try:
            room = await self._room(manifest)
            moved_bytes = await self._inbox.receive(manifest, source, room, self._made)
        except BaseException:
            self._files.release(version)
            raise
        self.forget()
        self._made = Held(version=version, tensors=room)
        return self._files.offer(version, ()), moved_bytes

    def forget(self) -> None:
        """Make the next version from nothing that was made before."""
        if self._made is not None:
            self._files.release(self._made.version)
        self._made = None

    def close(self) -> None:
        """Remove the files. Idempotent."""
        self._made = None
        self._inbox.close()
        self._files.close()

    async def _room(self, manifest: Manifest) -> dict[str, Tensor]:
        """In a thread: memory that is touched for the first time takes long."""
        preparing = asyncio.create_task(asyncio.to_thread(self._files.room, manifest))
        try:
            return await asyncio.shield(preparing)
        except asyncio.CancelledError:
            await asyncio.wait([preparing])
            raise

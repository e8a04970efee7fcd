"""What the reference puller serves: each version is a Hugging Face folder, and `current` points to the newest."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import final

from torch import Tensor

from fathom.core.adapter import AdapterIdentity
from fathom.core.errors import ConfigError, DeliveryError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import Capabilities, CommitReport, ScoreRequest, ScoreResult, StageReport, VerifyReport
from fathom.core.records.sampling import InFlightMode
from fathom.sync.follow.version_folder import UNFINISHED, blank, version_in, write_version
from fathom.sync.memory_receiver import MemoryReceiver

CURRENT = "current"
"""Name of the link to the version that serves."""
_LOCK = ".lock"


@final
class FolderReceiver:
    """See `Receiver`. A commit writes `root/<version>`, proves it, and turns `root/current` to it in one step.

    Two copies of the weights are in memory, so that only what changed has to be read. Whoever reads `current` resolves
    it once and has a whole version: the last `keep` stay. One process at a time has the folder.
    """

    def __init__(self, name: EngineId, root: Path, files: Mapping[str, bytes], keep: int = 2) -> None:
        """Take the folder and remove what a killed process left half-done. `files` are the model's: `model_files`.

        Raises:
            ConfigError: it cannot be had, another process has it, or `current` is something else.
        """
        if (root / CURRENT).exists() and not (root / CURRENT).is_symlink():
            raise ConfigError(f"{root / CURRENT} is not a link that a follower made; name another folder")
        self._lock: int | None = _locked(root)
        _remove_unfinished(root)
        self._root = root
        self._files = files
        self._keep = keep
        self._form: list[tuple[str, str, tuple[int, ...]]] = []
        self._adapter: AdapterIdentity | None = None
        self._memory = MemoryReceiver(name, {})

    @property
    def id(self) -> EngineId:
        """Its name."""
        return self._memory.id

    @property
    def capabilities(self) -> Capabilities:
        """Those of the memory behind it."""
        return self._memory.capabilities

    @property
    def version(self) -> PolicyVersion | None:
        """What `current` points to. None: nothing yet."""
        return version_in(self._root / CURRENT)

    async def stage(self, manifest: Manifest, source: WeightSource) -> StageReport:
        """Receive into memory, on top of the version before it where that is in memory."""
        form = [(entry.name, entry.dtype, entry.shape) for entry in manifest.tensors]
        if form != self._form or manifest.adapter != self._adapter:
            self._memory.close()
            self._memory = MemoryReceiver(self.id, blank(manifest), adapter=manifest.adapter)
            self._form, self._adapter = form, manifest.adapter
        return await self._memory.stage(manifest, source)

    async def verify(self) -> VerifyReport:
        """Digest what is staged."""
        return await self._memory.verify()

    async def commit(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        """Write the folder, prove it, turn `current` to it, and remove versions beyond those kept.

        Raises:
            DeliveryError | PayloadError: it could not be written or proven. `current` is as it was.
        """
        report = await self._memory.commit(version, mode)
        try:
            await asyncio.to_thread(self._switch, version, self._memory.weights)
        except BaseException:
            self._forget()  # what is in memory does not serve: begin again from an anchor
            raise
        return report

    async def rollback(self) -> None:
        """Forget what is staged."""
        await self._memory.rollback()

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Refused: see `MemoryReceiver.score`."""
        return await self._memory.score(request)

    def close(self) -> None:
        """Let go of memory and folder; the versions stay. Idempotent."""
        self._forget()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _forget(self) -> None:
        self._memory.close()
        self._memory, self._form = MemoryReceiver(self.id, {}), []

    def _switch(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> None:
        folder = self._root / version.name
        found = version_in(folder)
        if found is None:
            write_version(self._files, version, weights, folder, self._adapter)
        elif found != version:
            raise ConfigError(
                f"{folder} holds another {version.name}, with the digest {found.digest}: it is of another run; follow "
                "each run into a folder of its own"
            )
        link = self._root / f".{CURRENT}-{secrets.token_hex(4)}"
        try:
            link.symlink_to(version.name)
            os.replace(link, self._root / CURRENT)
        except OSError as error:
            link.unlink(missing_ok=True)
            raise DeliveryError(f"cannot turn {self._root / CURRENT} to {version.name}: {error}") from error
        self._remove_old(version)

    def _remove_old(self, serving: PolicyVersion) -> None:
        """Folders that are not ours are left alone."""
        held = {path: version for path in self._root.glob("v*@*") if (version := version_in(path)) is not None}
        others = sorted((path for path in held if held[path] != serving), key=lambda path: held[path].order)
        for path in others[: max(0, len(others) - (self._keep - 1))]:
            shutil.rmtree(path, ignore_errors=True)  # tried again after the next version


def _locked(root: Path) -> int:
    """A descriptor that holds `root` for this process; the kernel lets go when the process ends, however it ends."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{root} cannot be written ({error}); name another folder") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"another process follows a chain into {root}; end it, or name another folder") from None
    return handle


def _remove_unfinished(root: Path) -> None:
    for path in (*root.glob(f"{UNFINISHED}v*"), *root.glob(f".{CURRENT}-*")):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)

"""Weights in shared memory, for engines on the same host."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from fathom.core.errors import DeliveryError, PayloadError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, SharedMemorySource
from fathom.sync.digest import copy_bytes, shaped
from fathom.sync.transports.reception import Reception

MEMORY_FOLDER = Path("/dev/shm")
_PREFIX = "fathom-weights-"


@final
class SharedTransport:
    """Versions lie in memory-mapped files that are reused: the first touch of a page is far dearer than a copy.

    With one version serving and the next on its way there are two files, used in turn. A file is private to the user
    (mode 0600), has an unguessable name, and is locked for as long as its owner lives, so that the files of a
    killed process are recognised and removed by the next transport that opens in the same folder.
    """

    def __init__(self, run_folder: Path, memory_folder: Path = MEMORY_FOLDER) -> None:
        """Lay the files in `memory_folder`, or in `run_folder` where the host has no such folder."""
        self._folder = memory_folder if memory_folder.is_dir() else run_folder
        self._buffers: list[_Buffer] = []
        _remove_orphans(self._folder)

    def hold(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors into a free file, in the manifest's layout."""
        memory = self._memory(manifest)
        for entry in manifest.tensors:
            place = memory[entry.offset : entry.offset + entry.size_bytes]
            copy_bytes(tensors[entry.name].contiguous(), place)

    def room(self, manifest: Manifest) -> dict[str, Tensor]:
        """Hold a version whose bytes are not here yet: tensors in a free file, for the caller to overwrite."""
        memory = self._memory(manifest)
        return {
            entry.name: shaped(memory[entry.offset : entry.offset + entry.size_bytes], entry)
            for entry in manifest.tensors
        }

    def offer(self, version: PolicyVersion, engines: Sequence[EngineId]) -> SharedMemorySource:
        """The file."""
        for buffer in self._buffers:
            if buffer.version == version:
                return SharedMemorySource(path=str(buffer.path))
        raise DeliveryError(f"{version.name} is not held; publish it again")

    def release(self, version: PolicyVersion) -> None:
        """Keep the file, for a later version to be written into."""
        for buffer in self._buffers:
            if buffer.version == version:
                buffer.version = None

    def close(self) -> None:
        """Remove the files. A reader that has one open can finish."""
        while self._buffers:
            self._buffers.pop().close()

    def _memory(self, manifest: Manifest) -> Tensor:
        """uint8 [size of the layout]: a free file, which holds the version from now on."""
        last = manifest.tensors[-1]
        buffer = self._free_buffer(last.offset + last.size_bytes)
        buffer.version = manifest.version
        return torch.frombuffer(buffer.memory, dtype=torch.uint8)

    def _free_buffer(self, size_bytes: int) -> _Buffer:
        free = [buffer for buffer in self._buffers if buffer.version is None]
        for buffer in free:
            if len(buffer.memory) == size_bytes:
                return buffer
            self._buffers.remove(buffer)
            buffer.close()
        self._buffers.append(_create(self._folder, size_bytes))
        return self._buffers[-1]


def read_shared(source: SharedMemorySource, reception: Reception) -> int:
    """Copy the version out of the file; returns the bytes read. Raises `PayloadError` when it is too short."""
    manifest = reception.manifest
    try:
        memory = _map(source.path, manifest)
    except OSError as error:
        raise PayloadError(f"{manifest.version.name} cannot be read from {source.path}: {error}") from error
    for entry in manifest.tensors:
        if reception.given_up.is_set():
            break
        copy_bytes(memory[entry.offset : entry.offset + entry.size_bytes], reception.into[entry.name])
    return manifest.size_bytes


def _map(path: str, manifest: Manifest) -> Tensor:
    """uint8 [size of the layout], private to this process."""
    last = manifest.tensors[-1]
    size_bytes = last.offset + last.size_bytes
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_size < size_bytes:
            raise PayloadError(f"{path} is shorter than {manifest.version.name}; publish it again")
        return torch.frombuffer(mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(descriptor)


@dataclass(slots=True, kw_only=True)
class _Buffer:
    """One mapped file. `version` is what it holds; None: it is free."""

    path: Path
    descriptor: int
    memory: mmap.mmap
    version: PolicyVersion | None = None

    def close(self) -> None:
        """Remove the file. The mapping itself ends with the last tensor that looks at it."""
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


def _create(folder: Path, size_bytes: int) -> _Buffer:
    path, descriptor = _locked_file(folder)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)  # a full medium must raise here, not kill the process at a write
        return _Buffer(path=path, descriptor=descriptor, memory=mmap.mmap(descriptor, size_bytes))
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise DeliveryError(
            f"no {size_bytes / 1e6:.0f} MB for a version in {folder} ({error}); make room there, "
            "or set sync.transport = 'disk'"
        ) from error


def _locked_file(folder: Path) -> tuple[Path, int]:
    while True:
        path = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(16)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # else taken for an orphan in the moment before it was locked
            return path, descriptor
        os.close(descriptor)


def _remove_orphans(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone meanwhile
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:  # its owner lives
            continue
        finally:
            os.close(descriptor)

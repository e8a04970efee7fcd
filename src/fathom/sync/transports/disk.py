"""Weights in safetensors files, for engines that see the same file system."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fathom.core.errors import DeliveryError, PayloadError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import DiskSource, Manifest
from fathom.sync.digest import byte_view, copy_bytes, dtype_name
from fathom.sync.transports.reception import Reception

_SUFFIX = ".safetensors"
_UNFINISHED = ".unfinished"


@final
class DiskTransport:
    """One file per version below `run_folder/weights`. A file that has its name is whole and on the medium.

    Versions are not checkpoints: what an earlier process left there is removed at the start, and all at the end.
    """

    def __init__(self, run_folder: Path, keep: int = 2) -> None:
        """Keep the last `keep` released versions for people to look at."""
        self._folder = run_folder / "weights"
        self._keep = keep
        self._held: list[Path] = []
        self._released: list[Path] = []
        self._folder.mkdir(parents=True, exist_ok=True)
        for pattern in (f"*{_SUFFIX}", f"*{_UNFINISHED}"):
            for path in self._folder.glob(pattern):
                path.unlink(missing_ok=True)

    def hold(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Write the file beside its place, flush it to the medium, then give it its name."""
        path = self._path(manifest.version)
        unfinished = path.with_suffix(_UNFINISHED)
        metadata = {"version": manifest.version.name, "digest": manifest.version.digest}
        try:
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, unfinished, metadata)
            _flush(unfinished)
            unfinished.rename(path)
            _flush(self._folder)
        except Exception as error:  # safetensors raises its own error types for a full medium
            unfinished.unlink(missing_ok=True)
            raise DeliveryError(
                f"cannot write {manifest.version.name} to {self._folder} ({error}); make room there, "
                "or set sync.transport = 'shared'"
            ) from error
        self._released = [old for old in self._released if old != path]
        self._held.append(path)

    def offer(self, version: PolicyVersion, engines: Sequence[EngineId]) -> DiskSource:
        """The file."""
        path = self._path(version)
        if path not in self._held:
            raise DeliveryError(f"{version.name} is not held; publish it again")
        return DiskSource(path=str(path))

    def release(self, version: PolicyVersion) -> None:
        """Remove the oldest of the released files beyond those kept."""
        path = self._path(version)
        if path in self._held:
            self._held.remove(path)
            self._released.append(path)
        while len(self._released) > self._keep:
            self._released.pop(0).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all files."""
        for path in (*self._held, *self._released):
            path.unlink(missing_ok=True)
        self._held.clear()
        self._released.clear()

    def _path(self, version: PolicyVersion) -> Path:
        return self._folder / f"{version.name}{_SUFFIX}"


def read_disk(source: DiskSource, reception: Reception) -> int:
    """Copy the version out of the file; returns the bytes read. Raises `PayloadError` when it is another one."""
    manifest = reception.manifest
    try:
        with safe_open(source.path, framework="pt") as file:
            for entry in manifest.tensors:
                if reception.given_up.is_set():
                    break
                tensor = file.get_tensor(entry.name)
                if (dtype_name(entry.name, tensor), tuple(tensor.shape)) != (entry.dtype, entry.shape):
                    raise PayloadError(
                        f"tensor {entry.name!r} in {source.path} is not of the form its manifest says; publish it again"
                    )
                copy_bytes(byte_view(tensor), reception.into[entry.name])
    except (OSError, SafetensorError) as error:
        raise PayloadError(f"{manifest.version.name} cannot be read from {source.path}: {error}") from error
    return manifest.size_bytes


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Objects as files in a folder of this host, or of a network file system."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

from fathom.sync.chain.media.medium import Chunk, Stat

_UNFINISHED = ".unfinished-"


@final
class LocalMedium:
    """A file that has its name is whole and on the disk: written beside its place, flushed, then renamed."""

    def __init__(self, root: Path) -> None:
        """Nothing is created before the first object."""
        self._root = root.absolute()

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return str(self._root)

    def put(self, name: str, chunks: Iterable[Chunk]) -> None:
        """See `Medium.put`."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}")
        try:
            with unfinished.open("xb", buffering=0) as file:
                for chunk in chunks:
                    _write_all(file.fileno(), chunk)
                os.fsync(file.fileno())
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        _flush(path.parent)

    def read(self, name: str, start: int, stop: int | None) -> bytes:
        """See `Medium.read`."""
        with (self._root / name).open("rb", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            end = size_bytes if stop is None else min(stop, size_bytes)
            parts: list[bytes] = []
            while start < end:
                part = os.pread(file.fileno(), end - start, start)
                if not part:
                    break
                parts.append(part)
                start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def list(self, folder: str) -> Mapping[str, Stat]:
        """See `Medium.list`."""
        found: dict[str, Stat] = {}
        try:
            entries = list(os.scandir(self._root / folder))
        except FileNotFoundError:
            return found
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:  # removed since it was listed
                continue
            stamp = f"{status.st_ino}-{status.st_mtime_ns}"
            found[f"{folder}/{entry.name}"] = Stat(size_bytes=status.st_size, stamp=stamp)
        return found

    def delete(self, name: str) -> None:
        """See `Medium.delete`."""
        (self._root / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """See `Medium.sweep`."""
        for path in self._root.glob(f"*/{_UNFINISHED}*"):
            path.unlink(missing_ok=True)


def _write_all(descriptor: int, chunk: Chunk) -> None:
    rest = memoryview(chunk).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

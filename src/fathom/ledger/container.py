"""Binary segments beside the database: records are appended, named by a span, and never touched again.

A span's bytes are `core.wire.pack(record)`: the skeleton, then the safetensors of its arrays. Every opening of the
writer starts a segment of its own, so a tail torn by a kill is bytes that no span names.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar, final

import msgspec
from blake3 import blake3

from fathom.core.errors import LedgerError, RecordError
from fathom.core.wire import pack, unpack

T = TypeVar("T", bound=msgspec.Struct)
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where a record lies."""

    segment: int
    """Number of the segment, from 1."""
    offset: int
    """Its first byte."""
    skeleton_bytes: int
    """Bytes of the skeleton."""
    array_bytes: int
    """Bytes of the arrays, right behind the skeleton."""
    checksum: bytes
    """BLAKE3 (32 bytes) of skeleton and arrays: the record's content hash."""


@final
class ContainerWriter:
    """Appends records to segments in `folder`, a new one for this opening and after every `segment_bytes`."""

    def __init__(self, folder: Path, *, segment_bytes: int, fsync: bool) -> None:
        """With `fsync`, `flush` waits for the disk."""
        self._folder = folder
        self._fsync = fsync
        self._segment_bytes = segment_bytes
        self._segment = max((_number(path) for path in folder.glob("arrays-*.bin")), default=0)
        self._file: BinaryIO | None = None
        self._offset = 0

    def append(self, record: msgspec.Struct) -> Span:
        """Write `record`; it may lie in a buffer until `flush`."""
        skeleton, arrays = pack(record)
        if self._file is None or self._offset >= self._segment_bytes:
            self._file = self._next_segment()
        self._file.write(skeleton)
        self._file.write(arrays)
        span = Span(
            segment=self._segment,
            offset=self._offset,
            skeleton_bytes=len(skeleton),
            array_bytes=len(arrays),
            checksum=blake3(skeleton).update(arrays).digest(),
        )
        self._offset += len(skeleton) + len(arrays)
        return span

    def flush(self) -> None:
        """Hand everything appended to the operating system; with `fsync`, to the disk."""
        if self._file is not None:
            self._file.flush()
            if self._fsync:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_segment(self) -> BinaryIO:
        if self._file is not None:
            self.flush()
            self._file.close()
        self._segment += 1
        self._offset = 0
        path = _path(self._folder, self._segment)
        path.touch(exist_ok=False)
        if self._fsync:
            _sync_folder(self._folder)  # the segment's name must last as well as its bytes
        return open(path, "wb", buffering=_BUFFER_BYTES)


@final
class ContainerReader:
    """Reads spans and checks them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handles: dict[int, int] = {}

    def read(self, kind: type[T], span: Span) -> T:
        """The record at `span`.

        Raises:
            LedgerError: the bytes are missing or are not those that were written.
        """
        where = f"{_path(self._folder, span.segment)} at byte {span.offset}"
        size = span.skeleton_bytes + span.array_bytes
        try:
            data = os.pread(self._open(span.segment), size, span.offset)
        except OSError as error:
            raise LedgerError(f"cannot read {where}: {error}") from error
        if len(data) < size:
            raise LedgerError(f"{where}: {size} bytes expected, {len(data)} found; the file was cut (power loss?)")
        if blake3(data).digest() != span.checksum:
            raise LedgerError(f"{where}: checksum differs; the file was damaged after it was written")
        try:
            return unpack(kind, data[: span.skeleton_bytes], data[span.skeleton_bytes :])
        except RecordError as error:
            raise LedgerError(f"{where}: {error}") from error

    def close(self) -> None:
        """Close the segments."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def _open(self, segment: int) -> int:
        if segment not in self._handles:
            self._handles[segment] = os.open(_path(self._folder, segment), os.O_RDONLY)
        return self._handles[segment]


def _path(folder: Path, segment: int) -> Path:
    return folder / f"arrays-{segment:05d}.bin"


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("arrays-"))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

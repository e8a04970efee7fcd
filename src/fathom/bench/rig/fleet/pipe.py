"""Frames over a pipe, one at a time."""

from __future__ import annotations

import os
from typing import Any, final

import msgspec

from fathom.core.errors import RecordError
from fathom.core.wire import FrameReader, frame

_CHUNK_BYTES = 1 << 16


@final
class FramePipe:
    """Two file descriptors: one to write frames to, one to read those of type `kind` from. Both block."""

    def __init__(self, read_from: int, write_to: int, kind: Any) -> None:
        self._read_from = read_from
        self._write_to = write_to
        self._frames = FrameReader(kind)

    def write(self, record: msgspec.Struct) -> None:
        """Raises BrokenPipeError when nobody is there."""
        data = memoryview(frame(record))
        while data:
            data = data[os.write(self._write_to, data) :]

    def read(self) -> Any:
        """The next record. None: the other end has closed.

        Raises:
            RecordError: it is none of `kind`, or more than one came at once.
        """
        while data := os.read(self._read_from, _CHUNK_BYTES):
            records = self._frames.feed(data)
            if len(records) > 1:
                raise RecordError(f"{len(records)} frames at once: calls are made one at a time")
            if records:
                return records[0]
        return None

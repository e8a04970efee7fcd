"""A link's data object, read from front to back in large parts."""

from __future__ import annotations

from typing import final

from fathom.sync.chain.codec import CodecError
from fathom.sync.chain.links import Link, Piece
from fathom.sync.chain.store import Store

_PART_BYTES = 8 << 20


@final
class DataReader:
    """Gives the bytes of one tensor after the other."""

    def __init__(self, store: Store, link: Link) -> None:
        self.link = link
        """What is read."""
        self.read_bytes = 0
        """Bytes that came out of the store so far."""
        self._store = store
        self._size_bytes = link.size_bytes
        self._part = memoryview(b"")
        self._start = 0
        self._next = 0
        self._end = 0

    def open(self, piece: Piece) -> None:
        """Go to the bytes of `piece`."""
        self._next, self._end = piece.offset, piece.offset + piece.size_bytes

    def take(self, size_bytes: int) -> memoryview:
        """See `codec.Bytes`. Raises `PayloadError` when the object is missing, cut short or cannot be read."""
        stop = self._next + size_bytes
        if stop > self._end:
            raise CodecError("its bytes end too early")
        if not self._start <= self._next <= stop <= self._start + len(self._part):
            last = max(stop, min(self._next + _PART_BYTES, self._size_bytes))
            self._part = memoryview(self._store.read(self.link.name.data, self._next, last))
            self._start = self._next
            self.read_bytes += len(self._part)
        begin = self._next - self._start
        self._next = stop
        return self._part[begin : begin + size_bytes]

    def require_end(self) -> None:
        """Raises `CodecError` when bytes of the tensor are left."""
        if self._next != self._end:
            raise CodecError("it has bytes too many")

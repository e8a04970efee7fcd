"""How a version is cut for the wire. A function of manifest and bucket size alone, so that both ends agree unasked.

The manifest's flat layout is sent in ascending order, as byte ranges called buckets. The rule, in the manifest's order
of tensors, those without a byte left out:

- A tensor of at least `min(DIRECT_BYTES, bucket_bytes)` bytes has buckets of its own: from its first byte on,
  `bucket_bytes` each, the last one what is left. A receiver can take them where they belong, without a copy.
- Smaller neighbours share a bucket: it reaches from the first byte of the first to the last byte of the last, with the
  padding between them, and ends before a tensor that has its own, or before one with which it would be longer than
  `bucket_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fathom.core.manifest import Manifest, TensorEntry

DIRECT_BYTES = 4 << 20
"""From this size on a tensor has buckets of its own: a copy of it would cost more than one more broadcast does."""
UNDER_WAY = 2
"""Buckets under way at once, at either end: while one is copied to its place, or fetched, another travels."""
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive bytes of one tensor."""

    entry: TensorEntry
    """The tensor."""
    start: int
    """First byte within the tensor."""
    stop: int
    """The byte after the last one."""

    @property
    def size_bytes(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A range of the flat layout that travels in one broadcast."""

    start: int
    """First byte in the flat layout."""
    stop: int
    """The byte after the last one."""
    pieces: tuple[Piece, ...]
    """What lies in it, ascending."""

    @property
    def size_bytes(self) -> int:
        """Bytes that travel, padding included."""
        return self.stop - self.start

    def place(self, piece: Piece) -> slice:
        """Where a piece lies within the bucket."""
        first = piece.entry.offset + piece.start - self.start
        return slice(first, first + piece.size_bytes)


def plan_buckets(manifest: Manifest, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Every byte of every tensor once, in order. `bucket_bytes` is a multiple of 64, so that no element is cut."""
    if bucket_bytes <= 0 or bucket_bytes % _ALIGNMENT_BYTES:
        raise ValueError(f"a bucket of {bucket_bytes} bytes cuts elements; use a multiple of {_ALIGNMENT_BYTES}")
    return tuple(_cut(manifest.tensors, bucket_bytes))


def _cut(entries: Iterable[TensorEntry], bucket_bytes: int) -> Iterator[Bucket]:
    small: list[TensorEntry] = []
    for entry in entries:
        if not entry.size_bytes:
            continue
        alone = entry.size_bytes >= min(DIRECT_BYTES, bucket_bytes)
        if small and (alone or entry.offset + entry.size_bytes - small[0].offset > bucket_bytes):
            yield _shared(small)
            small = []
        if not alone:
            small.append(entry)
            continue
        for start in range(0, entry.size_bytes, bucket_bytes):
            piece = Piece(entry=entry, start=start, stop=min(start + bucket_bytes, entry.size_bytes))
            yield Bucket(start=entry.offset + piece.start, stop=entry.offset + piece.stop, pieces=(piece,))
    if small:
        yield _shared(small)


def _shared(entries: list[TensorEntry]) -> Bucket:
    pieces = tuple(Piece(entry=entry, start=0, stop=entry.size_bytes) for entry in entries)
    return Bucket(start=entries[0].offset, stop=entries[-1].offset + entries[-1].size_bytes, pieces=pieces)

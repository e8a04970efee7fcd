"""Tensors as bytes of a link: only what changed, in the cheapest of four encodings.

A tensor is cut into blocks of elements, so that nothing large is ever made beside it. A block is

    index   u32 changed elements | their gaps, packed | their steps, packed
    xor     new ^ old, packed
    full    new, packed

An array of unsigned integers is packed by planes: all lowest bytes, all second bytes, ... up to the highest that is
not zero everywhere. Each plane is zstd, or raw where that does not help. A *step* is `new - old` of an element's bits
as an unsigned integer, wrapped, with its sign in the lowest bit: in bfloat16 nearly all are +1 or -1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Protocol, final

import numpy as np
import zstandard

from fathom.sync.chain.links import Encoding

BLOCK_ELEMENTS = 1 << 20

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_INDEX_BELOW = 0.25
"""Share of changed elements below which naming them is smaller than all of them XORed, and not slower."""
_FULL_ABOVE = 0.5
"""Share of changed highest bytes above which the new ones compress better than their XOR."""
_FULL_BYTES_ABOVE = 0.97
"""The same for elements of one byte, which are near each other long after nearly all have changed."""
_SAMPLE_ELEMENTS = 1 << 14
"""So many are looked at for that."""
_COUNT = struct.Struct("<I")
_RAW = 1 << 31
"""Set in the length of a plane that is not compressed."""
_SAMPLE_BYTES = 1 << 14
_WORTH = 0.97
"""A plane whose beginning does not shrink below this share stays raw."""


class CodecError(ValueError):
    """These bytes are no tensor in that encoding."""


class Bytes(Protocol):
    """Encoded bytes, read from front to back."""

    def take(self, size_bytes: int) -> memoryview:
        """The next ones. Raises `CodecError` when the tensor's bytes end before."""
        ...


def elements(data: np.ndarray, element_bytes: int) -> np.ndarray:
    """The bits of a tensor as unsigned integers [n], shared with its bytes `data` (uint8 [size_bytes])."""
    return data.view(_UNSIGNED[element_bytes])


def count_changed(old: np.ndarray, new: np.ndarray) -> int:
    """How many elements differ. Both unsigned [n]."""
    return sum(int(np.count_nonzero(o != n)) for o, n in _blocks(old, new))


def choose(old: np.ndarray, new: np.ndarray, changed: int) -> Encoding:
    """The encoding for `changed` of the elements: by density, without trying any."""
    if changed == 0:
        return Encoding.SAME
    if changed < _INDEX_BELOW * len(new):
        return Encoding.INDEX
    stride = -(-len(new) // _SAMPLE_ELEMENTS)
    sample = (old[::stride] ^ new[::stride]) >> new.dtype.type(8 * (new.dtype.itemsize - 1))
    above = _FULL_BYTES_ABOVE if new.dtype.itemsize == 1 else _FULL_ABOVE
    return Encoding.FULL if np.count_nonzero(sample) > above * len(sample) else Encoding.XOR


@final
class Encoder:
    """Makes encoded bytes. Not for two threads at once."""

    def __init__(self, level: int) -> None:
        """`level` of zstd."""
        self._zstd = zstandard.ZstdCompressor(level=level)

    def encode(self, encoding: Encoding, old: np.ndarray | None, new: np.ndarray) -> Iterator[bytes]:
        """`new` (unsigned [n]), block by block; `old` is needed for all but `full`."""
        match encoding:
            case Encoding.SAME:
                return
            case Encoding.FULL:
                for (block,) in _blocks(new):
                    yield self._packed(block)
            case Encoding.XOR:
                for before, after in _blocks(_given(old), new):
                    yield self._packed(before ^ after)
            case Encoding.INDEX:
                for before, after in _blocks(_given(old), new):
                    yield self._indexed(before, after)

    def _indexed(self, old: np.ndarray, new: np.ndarray) -> bytes:
        positions = np.flatnonzero(old != new)
        gaps = (np.diff(positions, prepend=-1) - 1).astype(np.uint32)
        steps = new[positions] - old[positions]
        signs = np.negative(steps >> steps.dtype.type(8 * steps.dtype.itemsize - 1))
        return _COUNT.pack(len(positions)) + self._packed(gaps) + self._packed((steps << steps.dtype.type(1)) ^ signs)

    def _packed(self, values: np.ndarray) -> bytes:
        kind = values.dtype.type
        planes = -(-int(values.max(initial=0)).bit_length() // 8)
        parts = [bytes([planes])]
        for plane in range(planes):
            raw = (values >> kind(8 * plane)).astype(np.uint8).tobytes()
            squeezed = self._squeezed(raw)
            parts += [_COUNT.pack(len(raw) | _RAW), raw] if squeezed is None else [_COUNT.pack(len(squeezed)), squeezed]
        return b"".join(parts)

    def _squeezed(self, raw: bytes) -> bytes | None:
        """None: it is not worth it. The beginning tells, for what is long."""
        if len(raw) > 4 * _SAMPLE_BYTES and len(self._zstd.compress(raw[:_SAMPLE_BYTES])) > _WORTH * _SAMPLE_BYTES:
            return None
        squeezed = self._zstd.compress(raw)
        return squeezed if len(squeezed) < len(raw) else None


@final
class Decoder:
    """Applies encoded bytes. Not for two threads at once."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()

    def apply(self, encoding: Encoding, source: Bytes, into: np.ndarray) -> None:
        """Make the new bits out of the parent's in `into` (unsigned [n]), once.

        Raises:
            CodecError: the bytes are none of that encoding. `into` may hold anything.
        """
        try:
            for (block,) in _blocks(into):
                match encoding:
                    case Encoding.SAME:
                        return
                    case Encoding.FULL:
                        block[:] = self._unpacked(source, len(block), block.dtype.itemsize)
                    case Encoding.XOR:
                        block ^= self._unpacked(source, len(block), block.dtype.itemsize)
                    case Encoding.INDEX:
                        self._apply_index(source, block)
        except zstandard.ZstdError as error:
            raise CodecError(str(error)) from error

    def _apply_index(self, source: Bytes, block: np.ndarray) -> None:
        count = _COUNT.unpack(source.take(_COUNT.size))[0]
        if count > len(block):
            raise CodecError("more elements are named than there are")
        positions = np.cumsum(self._unpacked(source, count, 4).astype(np.int64) + 1) - 1
        if count and positions[-1] >= len(block):
            raise CodecError("an element is named that does not exist")
        folded = self._unpacked(source, count, block.dtype.itemsize)
        one = block.dtype.type(1)
        block[positions] += (folded >> one) ^ np.negative(folded & one)

    def _unpacked(self, source: Bytes, count: int, width: int) -> np.ndarray:
        """Unsigned [count] of `width` bytes each."""
        planes = source.take(1)[0]
        if planes > width:
            raise CodecError("an element has more bytes than its type")
        kind = _UNSIGNED[width]
        values = np.zeros(count, kind)
        for plane in range(planes):
            values |= np.frombuffer(self._plane(source, count), np.uint8).astype(kind) << kind(8 * plane)
        return values

    def _plane(self, source: Bytes, count: int) -> bytes | memoryview:
        length = _COUNT.unpack(source.take(_COUNT.size))[0]
        plane = source.take(length & ~_RAW)
        raw = plane if length & _RAW else self._inflated(plane, count)
        if len(raw) != count:
            raise CodecError("a plane is too short or too long")
        return raw

    def _inflated(self, plane: memoryview, count: int) -> bytes:
        if zstandard.frame_content_size(plane) != count:  # said before memory is taken for it
            raise CodecError("a plane is too short or too long")
        return self._zstd.decompress(plane, max_output_size=count)


def _blocks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    for start in range(0, len(arrays[0]), BLOCK_ELEMENTS):
        yield tuple(array[start : start + BLOCK_ELEMENTS] for array in arrays)


def _given(old: np.ndarray | None) -> np.ndarray:
    assert old is not None, "only a full tensor has no parent"
    return old

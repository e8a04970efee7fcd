"""How a record crosses a process or a disk: a msgpack skeleton beside a safetensors container of its arrays.

No pickle: the skeleton is decoded into the stated type, the arrays by their declared dtype and shape.
"""

from __future__ import annotations

from typing import Any, TypeVar, get_origin

import msgspec
import numpy as np
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from fathom.core.errors import RecordError

T = TypeVar("T", bound=msgspec.Struct)
_LENGTH_BYTES = 4


def pack(record: msgspec.Struct) -> tuple[bytes, bytes]:
    """Split `record` into (skeleton, arrays). `arrays` is empty when the record holds none."""
    columns: dict[str, np.ndarray] = {}

    def place(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = str(len(columns))
            columns[name] = np.ascontiguousarray(value)
            return name
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot cross a process or a disk")

    skeleton = msgspec.msgpack.encode(record, enc_hook=place)
    return skeleton, save_arrays(columns) if columns else b""


def unpack(kind: type[T], skeleton: bytes, arrays: bytes) -> T:
    """Rebuild a record of type (or tagged union) `kind`.

    Raises:
        RecordError: the bytes do not describe such a record.
    """
    try:
        columns = load_arrays(bytes(arrays)) if arrays else {}

        def fetch(expected: type, value: Any) -> Any:
            if expected is np.ndarray or get_origin(expected) is np.ndarray:
                return columns[value]
            raise TypeError(f"cannot decode {expected}")

        return msgspec.msgpack.decode(skeleton, type=kind, dec_hook=fetch)
    except RecordError:
        raise
    except Exception as error:  # any malformed input is one kind of fault: the bytes are not such a record
        raise RecordError(f"bytes are not a {kind}: {error}") from error


def frame(record: msgspec.Struct) -> bytes:
    """One self-delimiting message: lengths, skeleton, arrays. For streams."""
    skeleton, arrays = pack(record)
    head = len(skeleton).to_bytes(_LENGTH_BYTES, "big") + len(arrays).to_bytes(_LENGTH_BYTES, "big")
    return head + skeleton + arrays


class FrameReader:
    """Cuts a byte stream into the records that `frame` wrote, whatever the chunking of the stream."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add bytes; return the records completed by them, in order."""
        self._pending += data
        done: list[Any] = []
        while len(self._pending) >= 2 * _LENGTH_BYTES:
            skeleton_bytes = int.from_bytes(self._pending[:_LENGTH_BYTES], "big")
            array_bytes = int.from_bytes(self._pending[_LENGTH_BYTES : 2 * _LENGTH_BYTES], "big")
            start = 2 * _LENGTH_BYTES
            end = start + skeleton_bytes + array_bytes
            if len(self._pending) < end:
                break
            body = bytes(self._pending[start:end])
            done.append(unpack(self._kind, body[:skeleton_bytes], body[skeleton_bytes:]))
            del self._pending[:end]
        return done

    @property
    def incomplete(self) -> bool:
        """True while a part of a record is waiting for its rest."""
        return bool(self._pending)

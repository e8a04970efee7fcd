"""The port of a medium: named objects, written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

Chunk = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """What a listing says of an object."""

    size_bytes: int
    """Its size."""
    stamp: str
    """Differs when the object was written anew."""


class Medium(Protocol):
    """Holds objects by name, `folder/file`. Names are checked before. Calls block; several threads may make them.

    What goes wrong is an `OSError`, or whatever the library beneath raises; an object that is not there is a
    `FileNotFoundError`.
    """

    @property
    def url(self) -> str:
        """Where it is, so that another process can open it."""
        ...

    def put(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Write an object, or replace it. Durable when this returns; under its name it is whole at any moment."""
        ...

    def read(self, name: str, start: int, stop: int | None) -> bytes:
        """Bytes `start` to `stop` (exclusive) of an object; fewer where it ends earlier. None: to the end."""
        ...

    def list(self, folder: str) -> Mapping[str, Stat]:
        """The objects in a folder, by full name. A folder that was never written to is empty."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object. One that is not there is ignored."""
        ...

    def sweep(self) -> None:
        """Remove what writers that died half-way left. Only for the chain's single writer."""
        ...

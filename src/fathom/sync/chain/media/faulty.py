"""A medium that fails on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import final

from fathom.sync.chain.media.medium import Chunk, Medium, Stat


class MediumFault(StrEnum):
    """What happens at an operation."""

    RAISE = "raise"
    """It is not done, and an error says so."""
    TEAR = "tear"
    """An object is left with its first half under its name, as after a loss of power, and an error is raised. What does
    not write is as with `raise`."""
    LOSE = "lose"
    """It is done, and yet an error is raised: the answer was lost."""


class InjectedMediumError(OSError):
    """Raised on purpose by `FaultyMedium`."""


@final
class FaultyMedium:
    """Hands everything on to another medium, but for the operations that go wrong.

    >>> from fathom.sync.chain.media.objects import ObjectMedium
    >>> medium = FaultyMedium(ObjectMedium("memory://faulty"), {0: MediumFault.RAISE})
    >>> medium.put("data/a.bin", [b"x"])
    Traceback (most recent call last):
    fathom.sync.chain.media.faulty.InjectedMediumError: operation 0: put data/a.bin
    """

    def __init__(self, inner: Medium, script: Mapping[int, MediumFault], *, from_then_on: bool = False) -> None:
        """`script`: what happens at which operation, counted from 0 over all kinds. `from_then_on`: after the first of
        them nothing works any more, as for a process that was killed or a disk that is full."""
        self._inner = inner
        self._script = dict(script)
        self._from_then_on = from_then_on
        self._lock = threading.Lock()
        self._dead = False
        self.operations: list[str] = []
        """What was asked for, in order."""

    @property
    def url(self) -> str:
        """That of the other medium."""
        return self._inner.url

    def put(self, name: str, chunks: Iterable[Chunk]) -> None:
        """See `Medium.put`."""
        match self._next(f"put {name}"):
            case None:
                self._inner.put(name, chunks)
                return
            case MediumFault.RAISE:
                pass
            case MediumFault.TEAR:
                content = b"".join(bytes(chunk) for chunk in chunks)
                self._inner.put(name, [content[: len(content) // 2]])
            case MediumFault.LOSE:
                self._inner.put(name, chunks)
        raise self._error()

    def read(self, name: str, start: int, stop: int | None) -> bytes:
        """See `Medium.read`."""
        if self._next(f"read {name}") is not None:
            raise self._error()
        return self._inner.read(name, start, stop)

    def list(self, folder: str) -> Mapping[str, Stat]:
        """See `Medium.list`."""
        if self._next(f"list {folder}") is not None:
            raise self._error()
        return self._inner.list(folder)

    def delete(self, name: str) -> None:
        """See `Medium.delete`."""
        fault = self._next(f"delete {name}")
        if fault in (None, MediumFault.LOSE):
            self._inner.delete(name)
        if fault is not None:
            raise self._error()

    def sweep(self) -> None:
        """See `Medium.sweep`."""
        if self._next("sweep") is not None:
            raise self._error()
        self._inner.sweep()

    def _next(self, operation: str) -> MediumFault | None:
        with self._lock:
            fault = MediumFault.RAISE if self._dead else self._script.get(len(self.operations))
            self.operations.append(operation)
            self._dead = self._dead or (self._from_then_on and fault is not None)
            return fault

    def _error(self) -> InjectedMediumError:
        return InjectedMediumError(f"operation {len(self.operations) - 1}: {self.operations[-1]}")

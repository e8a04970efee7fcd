"""A transport that does wrong on demand."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from torch import Tensor

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.sync.digest import byte_view
from fathom.sync.transports.transport import Transport


class Mishap(StrEnum):
    """What a transport does wrong in a call."""

    FULL = "full"
    """The medium has no room: an `OSError`."""
    RAISED = "raised"
    """An error of its own kind."""
    CANCELLED = "cancelled"
    """Its error is one of cancellation."""
    FLIPPED = "flipped"
    """`hold`: one bit of the first tensor by name is another one."""
    SWAPPED = "swapped"
    """`hold`: the first two tensors of one size, by name, have each other's bytes."""
    OUTDATED = "outdated"
    """`offer`: it offers the version held before, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MishapAt:
    """One thing done wrong in one call."""

    what: Mishap
    """What."""
    call: str
    """`hold` or `offer`."""
    visit: int = 0
    """In which of these calls, from 0."""


@final
class FaultyTransport:
    """Passes every call on to a transport, and plays a script of mishaps."""

    def __init__(self, inner: Transport, *script: MishapAt) -> None:
        self._inner = inner
        self._script = {(each.call, each.visit): each.what for each in script}
        self._visits = {"hold": 0, "offer": 0}
        self._held: list[PolicyVersion] = []

    def hold(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """See `Transport.hold`."""
        mishap = self._next("hold")
        if mishap is Mishap.FLIPPED or mishap is Mishap.SWAPPED:
            tensors = _spoilt(tensors, mishap)
        self._inner.hold(manifest, tensors)
        self._held.append(manifest.version)

    def offer(self, version: PolicyVersion, engines: Sequence[EngineId]) -> WeightSource:
        """See `Transport.offer`."""
        others = [held for held in self._held if held != version]
        if self._next("offer") is Mishap.OUTDATED and others:
            version = others[-1]
        return self._inner.offer(version, engines)

    def release(self, version: PolicyVersion) -> None:
        """See `Transport.release`."""
        self._held = [held for held in self._held if held != version]
        self._inner.release(version)

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()

    def _next(self, call: str) -> Mishap | None:
        mishap = self._script.get((call, self._visits[call]))
        self._visits[call] += 1
        match mishap:
            case Mishap.FULL:
                raise OSError(errno.ENOSPC, "it was told to be full")
            case Mishap.RAISED:
                raise ArithmeticError("it was told to fail")
            case Mishap.CANCELLED:
                raise CancelledError
            case _:
                return mishap


def _spoilt(tensors: Mapping[str, Tensor], mishap: Mishap) -> dict[str, Tensor]:
    """A copy with other bytes."""
    copies = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    names = sorted(name for name in copies if copies[name].numel())
    first = byte_view(copies[names[0]])
    if mishap is Mishap.FLIPPED:
        first[0] ^= 1
        return copies
    for name in names[1:]:
        second = byte_view(copies[name])
        if len(second) == len(first):
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)
            break
    return copies

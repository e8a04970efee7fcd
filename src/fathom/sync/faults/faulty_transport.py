"""A transport that does wrong on demand."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from torch import Tensor

from fathom.core.errors import PayloadError
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
    REFUSED = "refused"
    """It says that the version is wrong in itself."""
    CANCELLED = "cancelled"
    """Its error is one of cancellation."""
    FLIPPED = "flipped"
    """`hold`: one bit of the first tensor by name is another one."""
    SWAPPED = "swapped"
    """`hold`: the first two tensors of one size, by name, have each other's bytes."""
    SPOILT = "spoilt"
    """`hold`: what the transport was given as `spoil` is done to a copy of the tensors."""
    OUTDATED = "outdated"
    """`offer`: it offers the version held before, if there is one."""


Spoil = Callable[[dict[str, Tensor]], None]
"""Changes contiguous tensors in place, keeping names, shapes and element types."""


def _unspoilt(tensors: dict[str, Tensor]) -> None:
    """Nothing to spoil was given."""


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

    def __init__(self, inner: Transport, *script: MishapAt, spoil: Spoil = _unspoilt) -> None:
        """`spoil` changes tensors in place, which are described already: nothing but digests can find it."""
        self._inner = inner
        self._spoils: dict[Mishap | None, Spoil] = {Mishap.FLIPPED: _flip, Mishap.SWAPPED: _swap, Mishap.SPOILT: spoil}
        self._script = {(each.call, each.visit): each.what for each in script}
        self._visits = {"hold": 0, "offer": 0}
        self._held: list[PolicyVersion] = []

    def hold(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """See `Transport.hold`."""
        spoil = self._spoils.get(self._next("hold"))
        if spoil is not None:
            tensors = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
            spoil(tensors)
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
            case Mishap.REFUSED:
                raise PayloadError("it was told to refuse")
            case Mishap.CANCELLED:
                raise CancelledError
            case _:
                return mishap


def _flip(tensors: dict[str, Tensor]) -> None:
    first = min(name for name in tensors if tensors[name].numel())
    byte_view(tensors[first])[0] ^= 1


def _swap(tensors: dict[str, Tensor]) -> None:
    memory = [byte_view(tensors[name]) for name in sorted(tensors) if tensors[name].numel()]
    for second in memory[1:]:
        if len(second) == len(memory[0]):
            kept = memory[0].clone()
            memory[0].copy_(second)
            second.copy_(kept)
            break

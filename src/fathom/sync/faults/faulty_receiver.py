"""A receiver that does wrong on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import final

import msgspec
from torch import Tensor

from fathom.core.errors import EngineDeadError, EngineRefusedError, TransferInterruptedError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import (
    Capabilities,
    CommitReport,
    DigestKind,
    ScoreRequest,
    ScoreResult,
    StageReport,
    VerifyReport,
)
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import byte_view
from fathom.sync.memory_receiver import MemoryReceiver


class Wrong(StrEnum):
    """What a receiver does wrong with a version."""

    FLIPPED = "flipped"
    """One bit of a tensor is another one when it has arrived."""
    SWAPPED = "swapped"
    """Two tensors of one size have each other's bytes."""
    STALE = "stale"
    """A tensor has the bytes that it had before."""
    LOST = "lost"
    """The engine is gone when it has staged: every later call fails."""
    MISCOUNTED = "miscounted"
    """It says that it received another number of bytes."""
    MISDIGESTED = "misdigested"
    """It says that it holds another digest than it does."""
    MISNAMED = "misnamed"
    """It says that it committed another version than it did."""
    BEHAVIOURAL = "behavioural"
    """It can only digest what it received."""
    REFUSED = "refused"
    """It says that it cannot take the version."""
    INTERRUPTED = "interrupted"
    """It says that the transfer broke elsewhere."""
    FULL = "full"
    """It has no memory for the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misdeed:
    """One thing done wrong with one version."""

    what: Wrong
    """What."""
    tensors: tuple[str, ...] = ()
    """With which tensors, where it is about tensors: one, or two for `SWAPPED`. Empty: the first ones by name."""
    stage: int = 0
    """With the version of which call of `stage`, from 0."""


@final
class FaultyReceiver:
    """Passes every call on to a `MemoryReceiver`, and plays a script of misdeeds.

    >>> engine = FaultyReceiver(MemoryReceiver(EngineId("a"), {}), Misdeed(what=Wrong.LOST, stage=2))
    """

    def __init__(self, inner: MemoryReceiver, *script: Misdeed) -> None:
        self._inner = inner
        self._script = list(script)
        self._calls: list[str] = []
        self._lost = False

    @property
    def id(self) -> EngineId:
        """Its name in records."""
        return self._inner.id

    @property
    def capabilities(self) -> Capabilities:
        """Those of the receiver within."""
        return self._inner.capabilities

    @property
    def inner(self) -> MemoryReceiver:
        """What it holds in truth."""
        return self._inner

    @property
    def calls(self) -> tuple[str, ...]:
        """The calls it got, in order, `score` left out."""
        return tuple(self._calls)

    @property
    def lost(self) -> bool:
        """Whether it is gone for good."""
        return self._lost

    def plan(self, what: Wrong, *tensors: str) -> None:
        """Do it with the version of the next call of `stage`."""
        self._script.append(Misdeed(what=what, tensors=tensors, stage=self._calls.count("stage")))

    async def stage(self, manifest: Manifest, source: WeightSource) -> StageReport:
        """Receive, then spoil what the script says."""
        self._begin("stage")
        if self._does(Wrong.REFUSED):
            raise EngineRefusedError(self.id, "it was told to refuse")
        if self._does(Wrong.INTERRUPTED):
            raise TransferInterruptedError(self.id, "it was told to say so")
        if self._does(Wrong.FULL):
            raise MemoryError("it was told to have no room")
        before = {name: tensor.clone() for name, tensor in self._inner.staging.items()}
        report = await self._inner.stage(manifest, source)
        for misdeed in self._now():
            _spoil(misdeed, self._inner.staging, before)
        self._lost = self._lost or self._does(Wrong.LOST)
        if self._does(Wrong.MISCOUNTED):
            return msgspec.structs.replace(report, size_bytes=report.size_bytes - 1)
        return report

    async def verify(self) -> VerifyReport:
        """Digest, and report it or another one."""
        self._begin("verify")
        report = await self._inner.verify()
        if self._does(Wrong.MISDIGESTED):
            report = msgspec.structs.replace(report, digest="0" * len(report.digest))
        if self._does(Wrong.BEHAVIOURAL):
            report = msgspec.structs.replace(report, kind=DigestKind.RECEIVED)
        return report

    async def commit(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        """Swap, and report it or another version."""
        self._begin("commit")
        report = await self._inner.commit(version, mode)
        if not self._does(Wrong.MISNAMED):
            return report
        other = msgspec.structs.replace(version, number=version.number + 1)
        return msgspec.structs.replace(report, version=other)

    async def rollback(self) -> None:
        """Forget what is staged."""
        self._begin("rollback")
        await self._inner.rollback()

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """See `MemoryReceiver.score`."""
        return await self._inner.score(request)

    def _begin(self, call: str) -> None:
        self._calls.append(call)
        if self._lost:
            raise EngineDeadError(self.id, "it was told to be lost", "")

    def _now(self) -> list[Misdeed]:
        return [misdeed for misdeed in self._script if misdeed.stage == self._calls.count("stage") - 1]

    def _does(self, what: Wrong) -> bool:
        return any(misdeed.what is what for misdeed in self._now())


def _spoil(misdeed: Misdeed, held: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Change bytes that have arrived."""
    names = misdeed.tensors or tuple(sorted(name for name in held if held[name].numel()))
    memory = {name: byte_view(held[name]).numpy() for name in names[:2]}
    match misdeed.what:
        case Wrong.FLIPPED:
            memory[names[0]][-1] ^= 1
        case Wrong.SWAPPED:
            kept = memory[names[0]].copy()
            memory[names[0]][:] = memory[names[1]]
            memory[names[1]][:] = kept
        case Wrong.STALE:
            memory[names[0]][:] = byte_view(before[names[0]]).numpy()
        case _:
            pass

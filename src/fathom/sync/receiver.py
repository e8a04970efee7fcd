"""The weight half of the engine port: all that a publication needs of an engine."""

from __future__ import annotations

from typing import Protocol

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import Capabilities, CommitReport, ScoreRequest, ScoreResult, StageReport, VerifyReport
from fathom.core.records.sampling import InFlightMode


class Receiver(Protocol):
    """Takes versions. Every `core.ports.engine.Engine` is one; the contracts of the calls are stated there.

    `stage` raises `PayloadError` or `EngineRefusedError` when the version does not fit the engine's model,
    `TransferInterruptedError` when the transfer broke elsewhere, and any other error when the engine failed. A `stage`
    after another one replaces what was staged, and begins only when nothing of the earlier one still writes.
    """

    @property
    def id(self) -> EngineId:
        """Its name in records."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; of interest here is where a version is received."""
        ...

    async def stage(self, manifest: Manifest, source: WeightSource) -> StageReport:
        """Receive a version: beside the serving one, or over it after a pause."""
        ...

    async def verify(self) -> VerifyReport:
        """Digest what is staged."""
        ...

    async def commit(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        """Serve the staged version from the next token boundary on. Atomic."""
        ...

    async def rollback(self) -> None:
        """Forget what is staged."""
        ...

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Log-probabilities under the version that serves: how one without a digest of its memory is probed."""
        ...

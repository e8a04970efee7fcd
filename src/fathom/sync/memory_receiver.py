"""The weight half of a double-buffered engine, in this process. For tests, and as the plain form of the real ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from fathom.core.errors import EngineError, EngineRefusedError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import CommitReport, DigestKind, ScoreRequest, ScoreResult, StageReport, VerifyReport
from fathom.core.ports.faults import Faults, NoFaults
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import digest, wrong_tensors
from fathom.sync.transports.receive import receive

_NO_FAULTS = NoFaults()


@final
class MemoryReceiver:
    """Receives into one set of tensors while the other serves, and swaps the two at a commit."""

    def __init__(self, engine_id: EngineId, template: Mapping[str, Tensor], faults: Faults = _NO_FAULTS) -> None:
        """Hold tensors of the template's names, shapes and element types; nothing serves yet."""
        self._id = engine_id
        self._faults = faults
        self._serving = {name: torch.zeros_like(tensor) for name, tensor in template.items()}
        self._staging = {name: torch.zeros_like(tensor) for name, tensor in template.items()}
        self._version: PolicyVersion | None = None
        self._staged: Manifest | None = None

    @property
    def id(self) -> EngineId:
        """Its name in records."""
        return self._id

    @property
    def version(self) -> PolicyVersion | None:
        """What serves. None: no weights yet."""
        return self._version

    @property
    def staged(self) -> PolicyVersion | None:
        """What is staged. None: nothing."""
        return self._staged.version if self._staged else None

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors that serve."""
        return self._serving

    async def stage(self, manifest: Manifest, source: WeightSource) -> StageReport:
        """Receive into the tensors that do not serve. Raises `PayloadError` when they do not fit."""
        started = time.perf_counter()
        self._staged = None
        await receive(source, manifest, self._staging, self._faults)
        self._staged = manifest
        return StageReport(size_bytes=manifest.size_bytes, receive_s=time.perf_counter() - started)

    async def verify(self) -> VerifyReport:
        """Digest the staged tensors; name those that differ from the manifest."""
        started = time.perf_counter()
        manifest = self._require_staged()
        found = digest(self._staging)
        wrong = () if found == manifest.version.digest else wrong_tensors(manifest, self._staging)
        return VerifyReport(digest=found, kind=DigestKind.MEMORY, verify_s=time.perf_counter() - started, wrong=wrong)

    async def commit(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        """Swap. Nothing generates here, so every mode is the same. Raises `EngineError` on another version."""
        if self._require_staged().version != version:
            raise EngineError(self._id, f"asked to commit {version.name}, but {self.staged} is staged; stage it first")
        self._serving, self._staging = self._staging, self._serving
        self._version, self._staged = version, None
        return CommitReport(version=version, pause_s=0.0, running=0)

    async def rollback(self) -> None:
        """Forget what is staged."""
        self._staged = None

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Refused: it holds tensors, not a model."""
        raise EngineRefusedError(self._id, "it has no model to score with")

    def _require_staged(self) -> Manifest:
        if self._staged is None:
            raise EngineError(self._id, "nothing is staged; call stage first")
        return self._staged

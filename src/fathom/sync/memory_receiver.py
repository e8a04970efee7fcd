"""The weight half of a double-buffered engine, in this process. For tests, and as the plain form of the real ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import final

from torch import Tensor

from fathom.config.families import TransportKind
from fathom.core.adapter import AdapterIdentity
from fathom.core.errors import EngineError, EngineRefusedError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, TensorFormat, WeightSource
from fathom.core.ports.engine import (
    Capabilities,
    CommitReport,
    DigestKind,
    ReceivesInto,
    ScoreRequest,
    ScoreResult,
    StageReport,
    VerifyReport,
)
from fathom.core.ports.faults import Faults, NoFaults
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import digest, wrong_tensors
from fathom.sync.held import Held, room_like
from fathom.sync.transports.inbox import Inbox

_NO_FAULTS = NoFaults()
_PLAIN: Mapping[str, TensorFormat] = {}


@final
class MemoryReceiver:
    """Receives into one set of tensors while the other serves, and swaps the two at a commit.

    One that receives into its live memory has a single set: it is paused from the beginning of a stage to the commit.
    """

    def __init__(
        self,
        engine_id: EngineId,
        template: Mapping[str, Tensor],
        faults: Faults = _NO_FAULTS,
        receives_into: ReceivesInto = ReceivesInto.STAGING,
        formats: Mapping[str, TensorFormat] = _PLAIN,
        adapter: AdapterIdentity | None = None,
    ) -> None:
        """Hold tensors of the template's names, shapes and element types, by `formats` and of `adapter`. Nothing
        serves yet."""
        self._id = engine_id
        self._formats = formats
        self._inbox = Inbox(engine_id, faults, formats, adapter)
        self._serving = room_like(template)
        self._live = receives_into is ReceivesInto.LIVE
        self._staging = self._serving if self._live else room_like(template)
        self._version: PolicyVersion | None = None
        self._staged: Manifest | None = None
        self._receiving = asyncio.Lock()
        self._paused_at_s: float | None = None

    @property
    def id(self) -> EngineId:
        """Its name in records."""
        return self._id

    @property
    def capabilities(self) -> Capabilities:
        """It generates nothing."""
        return Capabilities(
            kept_sets=False,
            routes=False,
            kv_versions=False,
            raw_logprobs=False,
            barriers=False,
            pinned_versions=False,
            double_buffered=not self._live,
            receives_into=ReceivesInto.LIVE if self._live else ReceivesInto.STAGING,
            in_flight=frozenset(InFlightMode),
            transports=frozenset(TransportKind),
            digest=DigestKind.MEMORY,
            max_context_tokens=0,
            adapters=True,
            formats=frozenset(each.name for each in self._formats.values()),
        )

    @property
    def version(self) -> PolicyVersion | None:
        """What serves. None: no weights yet, or it is paused while it receives over them."""
        return self._version

    @property
    def staged(self) -> PolicyVersion | None:
        """What is staged. None: nothing."""
        return self._staged.version if self._staged else None

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The tensors that serve."""
        return self._serving

    @property
    def staging(self) -> Mapping[str, Tensor]:
        """The tensors that a version is received into: those that serve, where it receives into its live memory."""
        return self._staging

    async def stage(self, manifest: Manifest, source: WeightSource) -> StageReport:
        """Receive into the tensors that do not serve. Raises `PayloadError` when they do not fit."""
        started = time.perf_counter()
        async with self._receiving:
            self._staged = None
            if self._live and self._version is not None:
                self._version, self._paused_at_s = None, time.perf_counter()
            serving = Held(version=self._version, tensors=self._serving) if self._version else None
            moved_bytes = await self._inbox.receive(manifest, source, self._staging, serving)
            self._staged = manifest
        return StageReport(
            size_bytes=manifest.size_bytes, moved_bytes=moved_bytes, receive_s=time.perf_counter() - started
        )

    async def verify(self) -> VerifyReport:
        """Digest the staged tensors; name those that differ from the manifest."""
        started = time.perf_counter()
        manifest = self._require_staged()
        found = digest(self._staging, formats=self._formats)
        right = found == manifest.version.digest
        wrong = () if right else wrong_tensors(manifest, self._staging, formats=self._formats)
        return VerifyReport(digest=found, kind=DigestKind.MEMORY, verify_s=time.perf_counter() - started, wrong=wrong)

    async def commit(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        """Swap. Nothing generates here, so every mode is the same. Raises `EngineError` on another version."""
        if self._require_staged().version != version:
            raise EngineError(self._id, f"asked to commit {version.name}, but {self.staged} is staged; stage it first")
        self._serving, self._staging = self._staging, self._serving
        self._version, self._staged = version, None
        pause_s = 0.0 if self._paused_at_s is None else time.perf_counter() - self._paused_at_s
        self._paused_at_s = None
        return CommitReport(version=version, pause_s=pause_s, running=0)

    async def rollback(self) -> None:
        """Forget what is staged."""
        self._staged = None

    def close(self) -> None:
        """Let go of what its inbox keeps. Idempotent."""
        self._inbox.close()

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Refused: it holds tensors, not a model."""
        raise EngineRefusedError(self._id, "it has no model to score with")

    def _require_staged(self) -> Manifest:
        if self._staged is None:
            raise EngineError(self._id, "nothing is staged; call stage first")
        return self._staged

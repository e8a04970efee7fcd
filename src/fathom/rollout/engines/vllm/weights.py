"""Versions on their way into a vLLM server: staged beside what serves, then put in its place while it is paused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import final

from fathom.core.adapter import AdapterIdentity, why_another
from fathom.core.errors import EngineError, EngineRefusedError, PayloadError, TransferInterruptedError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import (
    BroadcastSource,
    DeltaSource,
    DiskSource,
    Manifest,
    PeerSource,
    SharedMemorySource,
    WeightSource,
)
from fathom.core.ports.engine import CommitReport, DigestKind, StageReport, VerifyReport
from fathom.core.records.sampling import InFlightMode
from fathom.rollout.engines.vllm.expected import Form, check_fit
from fathom.rollout.engines.vllm.gate import Gate
from fathom.rollout.engines.vllm.generation import Generation
from fathom.rollout.engines.vllm.materialiser import Materialiser
from fathom.rollout.engines.vllm.server import VllmServer
from fathom.rollout.engines.vllm.spec import VllmSpec
from fathom.rollout.engines.vllm.wire import StagedFacts, StageOrder
from fathom.sync.held import check_adapter
from fathom.sync.transports.broadcast.buckets import plan_buckets

_POLL_S = 0.005


@final
class Weights:
    """What serves, what is staged, and the one way from the second to the first."""

    def __init__(
        self,
        spec: VllmSpec,
        server: VllmServer,
        gate: Gate,
        expected: dict[str, Form],
        adapter: AdapterIdentity | None,
    ) -> None:
        """`adapter`: what versions must be of. None: whole models."""
        self._spec = spec
        self._server = server
        self._gate = gate
        self._expected = expected
        self._adapter = adapter
        self._materialiser = Materialiser(spec.engine, spec.log_path.parent, adapter)
        self._version: PolicyVersion | None = None
        self._staged: Manifest | None = None
        self._received: StagedFacts | None = None
        self._committing: asyncio.Task[CommitReport] | None = None
        self._switching = False
        self._broken = ""

    @property
    def version(self) -> PolicyVersion | None:
        """What serves. None: nothing yet."""
        return self._version

    @property
    def staged(self) -> PolicyVersion | None:
        """What is staged. None: nothing."""
        return self._staged.version if self._staged else None

    @property
    def serving(self) -> PolicyVersion:
        """What serves. Raises `EngineError` when nothing whole does."""
        self.require_whole()
        if self._version is None:
            raise EngineRefusedError(self._spec.engine, "it holds no version yet; publish one first")
        return self._version

    def require_whole(self) -> None:
        """Raise `EngineError` when an update ended half-way: the server stays paused and must be replaced."""
        if self._broken:
            raise EngineError(self._spec.engine, f"an update ended half-way, replace it: {self._broken}")

    async def stage(self, manifest: Manifest, source: WeightSource) -> StageReport:
        """See `Engine.stage`."""
        self.require_whole()
        self._staged = self._received = None
        check_adapter(manifest, self._adapter)
        check_fit(manifest, self._expected)
        started = time.perf_counter()
        async with self._server.boundary("stage", self._spec.weights_timeout_s):
            await self._server.forget()
            readable, read_bytes = await self._readable(manifest, source)
            await self._until_received()
            await self._server.stage(_order(self._spec.engine, manifest, readable))
            received = await self._until_received()
        if received.interrupted:
            raise TransferInterruptedError(self._spec.engine, received.failure)
        if received.failure or not received.digest:
            reason = received.failure or "another call gave it up"
            raise PayloadError(f"{manifest.version.name} cannot be received from {source}: {reason}")
        self._staged, self._received = manifest, received
        return StageReport(
            size_bytes=manifest.size_bytes,
            moved_bytes=received.moved_bytes if read_bytes is None else read_bytes,
            receive_s=time.perf_counter() - started - received.verify_s,
        )

    async def verify(self) -> VerifyReport:
        """See `Engine.verify`."""
        manifest, received = self._require_staged()
        wrong = tuple(each.name for each in manifest.tensors if received.checksums[each.name] != each.checksum)
        if wrong:
            self._materialiser.forget()
        return VerifyReport(digest=received.digest, kind=DigestKind.RECEIVED, verify_s=received.verify_s, wrong=wrong)

    async def commit(
        self, version: PolicyVersion, mode: InFlightMode, running: Mapping[str, Generation]
    ) -> CommitReport:
        """See `Engine.commit`. A caller that goes away withdraws it, unless the weights are being replaced already."""
        self.require_whole()
        manifest, received = self._require_staged()
        if manifest.version != version:
            raise EngineRefusedError(
                self._spec.engine, f"asked to commit {version.name}, but {manifest.version.name} is staged"
            )
        if why := why_another(self._adapter, manifest.adapter):
            raise EngineRefusedError(self._spec.engine, f"{version.name} is not for this engine: {why}")
        if received.digest != version.digest:
            raise EngineRefusedError(
                self._spec.engine, f"the digest of what was received is not that of {version.name}; stage it again"
            )
        if self._committing is not None and not self._committing.done():
            raise EngineRefusedError(self._spec.engine, "another commit is under way")
        self._committing = task = asyncio.create_task(self._commit(version, mode, running))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise EngineError(self._spec.engine, f"the commit of {version.name} was withdrawn") from None
            if not self._switching:
                task.cancel()
            raise

    async def rollback(self) -> None:
        """See `Engine.rollback`. Withdraws a commit that still waits; one that replaces weights is waited for."""
        task = self._committing
        if task is not None and not task.done():
            if not self._switching:
                task.cancel()
            await asyncio.wait([task])
        async with self._server.boundary("rollback", self._spec.weights_timeout_s):
            await self._server.forget()
        self._staged = self._received = None

    def close(self) -> None:
        """Remove what was kept here for later versions. Idempotent."""
        self._materialiser.close()

    async def _readable(self, manifest: Manifest, source: WeightSource) -> tuple[WeightSource, int | None]:
        """What the worker can read, and the bytes that were read here to make it. None: it reads the source itself."""
        match source:
            case SharedMemorySource() | DiskSource() | BroadcastSource():
                return source, None
            case DeltaSource():
                return await self._materialiser.make(manifest, source)
            case PeerSource():
                reason = "nothing writes into its memory from outside; set sync.transport = 'broadcast'"
                raise EngineRefusedError(self._spec.engine, reason)

    async def _commit(
        self, version: PolicyVersion, mode: InFlightMode, running: Mapping[str, Generation]
    ) -> CommitReport:
        self._gate.shut()
        try:
            drained = mode is InFlightMode.DRAIN
            async with self._server.boundary("commit", self._spec.weights_timeout_s):
                in_flight = self._gate.generations
                await self._gate.until_quiet(drained=drained)
            self._switching = True
            started = time.perf_counter()
            for generation in running.values():
                generation.committed(version, mode)
            await self._switch(version, mode)
            self._version, self._staged, self._received = version, None, None
            pause_s = time.perf_counter() - started
            return CommitReport(version=version, pause_s=pause_s, running=in_flight)
        finally:
            self._switching = False
            self._gate.reopen()

    async def _switch(self, version: PolicyVersion, mode: InFlightMode) -> None:
        """Pause, replace, forget old prefixes, go on. After a failure it stays paused, and nothing is sent any more."""
        try:
            async with self._server.boundary("commit", self._spec.weights_timeout_s):
                await self._server.pause()
                await self._server.load_staged(version.digest, version.name)
                await self._server.reset_prefix_cache(running=mode is InFlightMode.RECOMPUTE)
                await self._server.resume()
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    async def _until_received(self) -> StagedFacts:
        """Wait until nothing is being received any more."""
        while (received := await self._server.staged()).busy:
            await asyncio.sleep(_POLL_S)
        return received

    def _require_staged(self) -> tuple[Manifest, StagedFacts]:
        if self._staged is None or self._received is None:
            raise EngineRefusedError(self._spec.engine, "nothing is staged; call stage first")
        return self._staged, self._received


def _order(engine: EngineId, manifest: Manifest, source: WeightSource) -> StageOrder:
    entries = tuple((each.name, each.dtype, each.shape, each.offset, each.size_bytes) for each in manifest.tensors)
    buckets = plan_buckets(manifest, source.bucket_bytes) if isinstance(source, BroadcastSource) else ()
    spans = tuple((bucket.start, bucket.stop) for bucket in buckets)
    return StageOrder(engine=engine, source=source, entries=entries, buckets=spans)

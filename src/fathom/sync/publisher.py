"""Delivers versions to engines: stage, verify, commit at a token boundary; or roll back.

            write        stage          verify             commit
    trainer ----> source ----> engine 1 ----> digest right ------> serves the new version
                         ----> engine 2 ----> fails or hangs ....> fenced: no requests until restored
                         ----> engine 3 ----> digest wrong ......> fenced; or, when no engine has it right,
                                                                   rolled back: the parent goes on serving

Whatever fails and wherever, each engine ends with the old or the new version, whole, or is fenced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

from torch import Tensor

from fathom.config.rollout import SyncConfig
from fathom.core.errors import DeliveryError, EngineError, PayloadError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import CommitReport, DigestKind, StageReport, VerifyReport
from fathom.core.ports.faults import Faults, NoFaults
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import build_manifest, few
from fathom.sync.listener import Deaf, Listener
from fathom.sync.phase import Phase
from fathom.sync.probe import Probe
from fathom.sync.publication import Publication
from fathom.sync.receiver import Receiver
from fathom.sync.transports.transport import Transport

_NO_FAULTS = NoFaults()
_RESTORING = "it is being restored"

_DEAF = Deaf()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """A version that can be read somewhere."""

    manifest: Manifest
    source: WeightSource
    mode: InFlightMode
    probe: Probe | None

    @property
    def version(self) -> PolicyVersion:
        return self.manifest.version


@final
class Publisher:
    """Owns what the engines serve. One publication or restoration runs at a time.

    An engine takes requests iff it is in `serving`; whoever routes must look there, and discard what a fenced engine
    had not finished.
    """

    def __init__(
        self,
        engines: Sequence[Receiver],
        transport: Transport,
        config: SyncConfig,
        faults: Faults = _NO_FAULTS,
        listener: Listener = _DEAF,
    ) -> None:
        """`faults` reaches `write.before`, `write.after`, and those of the phases stage, verify, commit, rollback."""
        self._engines = {engine.id: engine for engine in engines}
        self._transport = transport
        self._config = config
        self._faults = faults
        self._listener = listener
        self._fenced: dict[EngineId, str] = {}
        self._by_behaviour: set[EngineId] = set()
        self._delivered: _Offer | None = None
        self._turn = asyncio.Lock()
        self._transport_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transport")

    @property
    def delivered(self) -> PolicyVersion | None:
        """The version delivered last. None: none yet."""
        return self._delivered.version if self._delivered else None

    @property
    def serving(self) -> tuple[EngineId, ...]:
        """Engines that may get requests: proven to hold `delivered` or, during a commit, its successor."""
        return self._trusted() if self._delivered else ()

    @property
    def fenced(self) -> Mapping[EngineId, str]:
        """Engines that get no requests, and why."""
        return dict(self._fenced)

    def fence(self, engine: EngineId, reason: str) -> None:
        """Send an engine no requests until it is restored. One that left is not heard of again."""
        if engine not in self._engines:
            return
        news = engine not in self._fenced
        self._fenced[engine] = reason
        if news:
            self._listener.fenced(engine, reason)

    @property
    def holders(self) -> tuple[EngineId, ...]:
        """Engines that are not fenced: they take part in the next publication."""
        return self._trusted()

    async def publish(
        self,
        tensors: Mapping[str, Tensor],
        number: int,
        incarnation: int,
        mode: InFlightMode,
        written: asyncio.Event | None = None,
        probe: Probe | None = None,
    ) -> Publication:
        """Deliver `tensors` (the served cast) as version `number` of `incarnation`.

        The tensors must not change until `written` is set, if given, or else until this returns: engines read what the
        transport wrote.

        `probe` is of this version. Engines that digest only what they received must pass it; without one they are
        fenced.

        Raises:
            PayloadError: the version is wrong in itself, or its number was used. The parent goes on serving.
            DeliveryError: it could not be written, or fewer than `min_engines` took it. `delivered` and `serving`
                say who serves what; restore engines before going on.
        """
        async with self._turn:
            before = self.delivered
            parent = self._parent(number, incarnation)
            self._require_engines()
            started = time.perf_counter()
            manifest = await asyncio.to_thread(build_manifest, number, incarnation, parent, tensors)
            try:
                source = await self._write(manifest, tensors)
                write_s = time.perf_counter() - started
                if written is not None:
                    written.set()
                return await self._deliver(_Offer(manifest=manifest, source=source, mode=mode, probe=probe), write_s)
            finally:
                for version in (before, manifest.version):
                    if version is not None and version != self.delivered:
                        self._transport_thread.submit(self._transport.release, version)

    async def restore(self, engine: Receiver) -> None:
        """Let an engine serve (again): a fenced one, its replacement, or a new one, by a full verified reload.

        Before the first delivery there is nothing to reload: it takes part in the next publication.

        Raises:
            EngineError: it failed again and stays fenced.
        """
        async with self._turn:
            self._engines[engine.id] = engine
            self._fenced[engine.id] = _RESTORING
            if self._delivered is not None:
                stage, verify = await self._prepare(self._delivered, [engine.id])
                self._fence_all(stage.refused | verify.refused)
                await self._commit(self._delivered, verify.answers)
            if self._fenced[engine.id] != _RESTORING:
                raise EngineError(engine.id, f"cannot be restored, replace it; {self._fenced[engine.id]}")
            del self._fenced[engine.id]

    async def remove(self, engine: EngineId) -> None:
        """An engine takes part no longer, once the publication on its way has ended."""
        async with self._turn:
            self._engines.pop(engine, None)
            self._fenced.pop(engine, None)

    async def close(self) -> None:
        """Close the transport. Engines go on serving what they hold; nothing more is published. Idempotent.

        Raises:
            DeliveryError: a write is stuck; its bytes were not removed.
        """
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await asyncio.to_thread(self._transport_thread.shutdown)
        except TimeoutError as error:
            raise DeliveryError("a write of weights is stuck: look at the medium, then end the process") from error
        self._transport.close()

    async def _deliver(self, offer: _Offer, write_s: float) -> Publication:
        """The protocol, from a readable version to one that serves."""
        fenced_before, parent = set(self._fenced), self.delivered
        stage, verify = await self._prepare(offer, self._trusted())
        refused = stage.refused | verify.refused
        if refused and not verify.answers:
            await self._roll_back(refused)
            raise PayloadError(f"{offer.version.name} is cancelled, no engine could take it: {_listed(refused)}")
        self._fence_all(refused)
        if len(self._trusted()) < self._config.min_engines:
            await self._roll_back(self._trusted())
        self._require_engines()
        commit = await self._commit(offer, self._trusted())
        self._require_engines()
        return Publication(
            version=offer.version,
            parent=parent,
            size_bytes=offer.manifest.size_bytes,
            write_s=write_s,
            stage_s=stage.slowest_s,
            verify_s=verify.slowest_s,
            commit_s=commit.slowest_s,
            pause_s=max(report.pause_s for report in commit.answers.values()),
            committed=self._trusted(),
            fenced={engine: reason for engine, reason in self._fenced.items() if engine not in fenced_before},
        )

    async def _write(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> WeightSource:
        """One thread serves the transport, so what outlives its deadline is finished before anything else begins."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._faults.reach("write.before")
                loop = asyncio.get_running_loop()
                source = await loop.run_in_executor(self._transport_thread, self._transport.publish, manifest, tensors)
                await self._faults.reach("write.after")
                return source
        except TimeoutError as error:
            raise DeliveryError(
                f"{manifest.version.name} was not written within {self._config.timeout_s:g} s; "
                "look at the medium, or raise sync.timeout_s"
            ) from error

    async def _prepare(
        self, offer: _Offer, engines: Iterable[EngineId]
    ) -> tuple[Phase[StageReport], Phase[VerifyReport]]:
        """Stage and verify. Engines that fail are fenced; those that refuse are left to the caller."""

        async def prove(engine: Receiver) -> VerifyReport:
            report = await engine.verify()
            if report.kind is not DigestKind.MEMORY:
                if offer.probe is None:
                    reason = "digests only what it received: without a probe nothing proves what it holds"
                    raise EngineError(engine.id, reason)
                self._by_behaviour.add(engine.id)
            if report.digest != offer.version.digest:
                wrong = few(report.wrong)
                raise PayloadError(f"digest {report.digest}, published {offer.version.digest}; wrong tensors: {wrong}")
            return report

        stage = Phase[StageReport]("stage", self._config.timeout_s, self._faults)
        await stage.run(self._named(engines), lambda engine: engine.stage(offer.manifest, offer.source))
        self._fence_all(stage.failed)
        verify = Phase[VerifyReport]("verify", self._config.timeout_s, self._faults)
        await verify.run(self._named(stage.answers), prove)
        self._fence_all(verify.failed)
        return stage, verify

    async def _commit(self, offer: _Offer, engines: Iterable[EngineId]) -> Phase[CommitReport]:
        """Whoever confirms serves the version; whoever does not is fenced, also when this is cancelled half-way."""

        async def switch(engine: Receiver) -> CommitReport:
            probe = offer.probe if engine.id in self._by_behaviour else None
            if probe is not None:
                self._listener.doubts(engine.id)
            report = await engine.commit(offer.version, offer.mode)
            if report.version != offer.version:
                raise EngineError(engine.id, f"committed {report.version.name} instead of {offer.version.name}")
            if probe is not None:
                await probe.check(engine, offer.version)
            self._listener.serves(engine.id, report.version)
            return report

        commit = Phase[CommitReport]("commit", self._config.timeout_s, self._faults)
        try:
            await commit.run(self._named(engines), switch)
        finally:
            self._fence_all({engine: commit.reason(engine) for engine in engines if engine not in commit.answers})
            if commit.answers:
                self._delivered = offer
        return commit

    async def _roll_back(self, engines: Iterable[EngineId]) -> None:
        """Make engines forget what is staged; one that does not confirm is fenced."""
        rollback = Phase[None]("rollback", self._config.timeout_s, self._faults)
        await rollback.run(self._named(engines), lambda engine: engine.rollback())
        self._fence_all(rollback.refused | rollback.failed)

    def _fence_all(self, reasons: Mapping[EngineId, str]) -> None:
        for engine, reason in reasons.items():
            self.fence(engine, reason)

    def _trusted(self) -> tuple[EngineId, ...]:
        return tuple(engine for engine in self._engines if engine not in self._fenced)

    def _named(self, engines: Iterable[EngineId]) -> list[Receiver]:
        return [self._engines[engine] for engine in engines]

    def _parent(self, number: int, incarnation: int) -> PolicyVersion | None:
        """The version before this one in its incarnation. Refuses a number that does not go on."""
        last = self.delivered
        if last is None or incarnation > last.incarnation:
            return None
        if (incarnation, number) <= (last.incarnation, last.number):
            raise PayloadError(
                f"v{number}@{incarnation} cannot follow {last.name}, which was delivered: numbers never restart; "
                "publish a later number, or open a new incarnation"
            )
        return last

    def _require_engines(self) -> None:
        ready = len(self._trusted())
        if ready < self._config.min_engines:
            raise DeliveryError(
                f"{ready} engines can take a version, {self._config.min_engines} are required; restore those fenced: "
                f"{_listed(self._fenced)}"
            )


def _listed(reasons: Mapping[EngineId, str]) -> str:
    return "; ".join(f"{engine}: {reason}" for engine, reason in reasons.items()) or "none"

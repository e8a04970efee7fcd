"""Delivers versions to engines: stage, verify, commit at a token boundary; or roll back.

             hold          offer, stage     verify             commit
    trainer ----> transport ----> engine 1 ----> digest right ------> serves the new version
                            ----> engine 2 ----> fails or hangs ....> fenced: no requests until restored
                            ----> engine 3 ----> digest wrong ......> fenced; or, when no engine has it right,
                                                                      rolled back: the parent goes on serving

Whatever fails and wherever, each engine ends with the old or the new version, whole, or is fenced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from fathom.config.sync import SyncConfig
from fathom.core.adapter import AdapterIdentity
from fathom.core.errors import DeliveryError, EngineError, PayloadError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, TensorEntry, WeightSource
from fathom.core.ports.engine import CommitReport, DigestKind, ReceivesInto, StageReport, VerifyReport
from fathom.core.ports.faults import Faults, NoFaults
from fathom.core.records.sampling import InFlightMode
from fathom.sync.chain.keeper import Keeper
from fathom.sync.digest import few
from fathom.sync.listener import Deaf, Listener
from fathom.sync.phase import Phase, asked_to_stop
from fathom.sync.probe import Probe
from fathom.sync.publication import Publication
from fathom.sync.quantise.describe import describe
from fathom.sync.quantise.quantiser import Quantiser
from fathom.sync.receiver import Receiver
from fathom.sync.transport_thread import TransportThread
from fathom.sync.transports.transport import Transport

_NO_FAULTS = NoFaults()
_MAX_BREAKS = 2
"""So often a transfer may break with no engine to blame."""
_RESTORING = "it is being restored"
_OVERWRITTEN = "a version that it did not commit was written over what it served; restore it"

_DEAF = Deaf()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A version that the transport holds."""

    manifest: Manifest
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
        quantiser: Quantiser | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        """`faults` reaches `hold` and `offer`, each `.before` and `.after`, and the phases stage, verify, commit and
        rollback, by engine. `quantiser` codes every version on its way; None: it goes out as the trainer cast it.
        `keeper` gets a copy of every version that is held; None: nobody does."""
        self._engines = {engine.id: engine for engine in engines}
        if len(self._engines) < len(engines):
            raise ValueError(f"two engines have the same name: {[engine.id for engine in engines]}")
        self._transport = TransportThread(transport, config.timeout_s, faults)
        self._config = config
        self._faults = faults
        self._listener = listener
        self._quantiser = quantiser
        self._keeper = keeper
        self._fenced: dict[EngineId, str] = {}
        self._by_behaviour: set[EngineId] = set()
        self._overwritten: set[EngineId] = set()
        self._heard_of: set[EngineId] = set()  # those that the listener believes to serve, or to be about to
        self._delivered: _Held | None = None
        self._turn = asyncio.Lock()

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
        news = engine not in self._fenced or engine in self._heard_of
        if engine not in self._fenced or self._fenced[engine] == _RESTORING:
            self._fenced[engine] = reason
        self._heard_of.discard(engine)
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
        adapter: AdapterIdentity | None = None,
        entries: Sequence[TensorEntry] | None = None,
    ) -> Publication:
        """Deliver `tensors` (the served cast) as version `number` of `incarnation`.

        The tensors must not change until `written` is set, if given, or else until this returns: engines get what the
        transport holds.

        `adapter`: whose tensors they are; None: a whole model's. Engines refuse what they do not compute with.

        `entries`: the `layout` of `tensors`, where it is known; it is made here otherwise. Engines refuse a version
        whose tensors are not as they say.

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
            described = partial(
                describe, number, incarnation, parent, tensors, self._quantiser, adapter=adapter, entries=entries
            )
            manifest, published = await asyncio.to_thread(described, threads=torch.get_num_threads())
            try:
                await self._transport.hold(manifest, published)
                if self._keeper is not None:
                    await asyncio.to_thread(self._keeper.keep, manifest, published)
                write_s = time.perf_counter() - started
                if written is not None:
                    written.set()
                return await self._deliver(_Held(manifest=manifest, mode=mode, probe=probe), write_s)
            finally:
                self._fence_overwritten()
                for version in (before, manifest.version):
                    if version is not None and version != self.delivered:
                        self._transport.release(version)

    async def restore(self, engine: Receiver) -> None:
        """Let an engine serve (again): a fenced one, its replacement, or a new one, by a full verified reload.

        Before the first delivery there is nothing to reload: it takes part in the next publication.

        Raises:
            EngineError: it failed again and stays fenced.
        """
        async with self._turn:
            self.fence(engine.id, _RESTORING)  # heard where it, or its predecessor, still served
            self._engines[engine.id] = engine
            self._fenced[engine.id] = _RESTORING
            self._by_behaviour.discard(engine.id)
            if self._delivered is not None:
                await self._reload(self._delivered, [engine.id])
            if self._fenced[engine.id] != _RESTORING:
                raise EngineError(engine.id, f"cannot be restored, replace it; {self._fenced[engine.id]}")
            del self._fenced[engine.id]

    async def remove(self, engine: EngineId) -> None:
        """An engine takes part no longer, once the publication on its way has ended."""
        async with self._turn:
            self._engines.pop(engine, None)
            self._fenced.pop(engine, None)
            self._by_behaviour.discard(engine)

    async def close(self) -> None:
        """Close the transport. Engines go on serving what they hold; nothing more is published. Idempotent.

        Raises:
            DeliveryError: a write is stuck; its bytes were not removed.
        """
        await self._transport.close()

    async def _deliver(self, held: _Held, write_s: float) -> Publication:
        """The protocol, from a readable version to one that serves."""
        fenced_before, parent = set(self._fenced), self.delivered
        try:
            stage, verify = await self._prepare(held, self._trusted())
        except (DeliveryError, PayloadError):
            await self._roll_back(self._trusted())
            raise
        refused = stage.refused | verify.refused
        if refused and not verify.answers:
            await self._roll_back(refused)
            raise PayloadError(f"{held.version.name} is cancelled, no engine could take it: {_listed(refused)}")
        self._fence_all(refused)
        if len(self._trusted()) < self._config.min_engines:
            await self._roll_back(self._trusted())
        self._require_engines()
        commit = await self._commit(held, [engine for engine in self._trusted() if engine in verify.answers])
        self._require_engines()
        return Publication(
            version=held.version,
            parent=parent,
            cast_digest=held.manifest.cast_digest,
            size_bytes=held.manifest.size_bytes,
            moved_bytes=sum(stage.answers[engine].moved_bytes for engine in self._trusted()),
            write_s=write_s,
            stage_s=stage.slowest_s,
            verify_s=verify.slowest_s,
            commit_s=commit.slowest_s,
            pause_s=max(report.pause_s for report in commit.answers.values()),
            committed=self._trusted(),
            fenced={engine: reason for engine, reason in self._fenced.items() if engine not in fenced_before},
        )

    async def _stage(self, held: _Held, engines: Sequence[EngineId]) -> Phase[StageReport]:
        """In rounds: an engine that breaks a transfer shared with others is left out of the next one.

        Raises `DeliveryError` when it broke twice, no engine failed, and none has got it: the medium is at fault.
        """

        async def receive(source: WeightSource, engine: Receiver) -> StageReport:
            if engine.capabilities.receives_into is ReceivesInto.LIVE:
                self._overwritten.add(engine.id)
            report = await engine.stage(held.manifest, source)
            if report.size_bytes != held.manifest.size_bytes or report.moved_bytes < 0:
                counted = f"says it received {report.size_bytes} bytes by moving {report.moved_bytes}"
                raise EngineError(engine.id, f"{counted}; {held.version.name} has {held.manifest.size_bytes}")
            return report

        stage = Phase[StageReport]("stage", self._config.timeout_s, self._faults)
        blameless = 0
        while engines:
            source = await self._transport.offer(held.version, engines)
            await stage.run(self._named(engines), partial(receive, source))
            self._fence_all(stage.failed)
            blameless += len(stage.interrupted) == len(engines)
            if blameless == _MAX_BREAKS:
                if stage.answers:
                    self._fence_all(stage.interrupted)
                    break
                raise DeliveryError(f"the transfer of {held.version.name} broke twice: {_listed(stage.interrupted)}")
            engines = tuple(stage.interrupted)
        return stage

    async def _prepare(
        self, held: _Held, engines: Iterable[EngineId]
    ) -> tuple[Phase[StageReport], Phase[VerifyReport]]:
        """Stage and verify. Engines that fail are fenced; those that refuse are left to the caller."""

        async def prove(engine: Receiver) -> VerifyReport:
            report = await engine.verify()
            if report.kind is DigestKind.MEMORY:
                self._by_behaviour.discard(engine.id)
            else:
                if held.probe is None:
                    reason = "digests only what it received: without a probe nothing proves what it holds"
                    raise EngineError(engine.id, reason)
                self._by_behaviour.add(engine.id)
            if report.digest != held.version.digest:
                wrong = few(report.wrong)
                raise PayloadError(f"digest {report.digest}, published {held.version.digest}; wrong tensors: {wrong}")
            return report

        stage = await self._stage(held, tuple(engines))
        verify = Phase[VerifyReport]("verify", self._config.timeout_s, self._faults)
        await verify.run(self._named(stage.answers), prove)
        self._fence_all(verify.failed | verify.interrupted)
        return stage, verify

    async def _commit(self, held: _Held, engines: Iterable[EngineId]) -> Phase[CommitReport]:
        """Whoever confirms serves the version; whoever does not is fenced, also when this is cancelled half-way."""

        async def switch(engine: Receiver) -> CommitReport:
            probe = held.probe if engine.id in self._by_behaviour else None
            if probe is not None:
                self._heard_of.add(engine.id)
                self._listener.doubts(engine.id)
            report = await engine.commit(held.version, held.mode)
            if report.version != held.version:
                raise EngineError(engine.id, f"committed {report.version.name} instead of {held.version.name}")
            if probe is not None:
                await probe.check(engine, held.version)
            if asked_to_stop() or self._fenced.get(engine.id, _RESTORING) != _RESTORING:
                raise EngineError(engine.id, f"it committed {held.version.name} when nobody waited for it any more")
            self._overwritten.discard(engine.id)
            self._heard_of.add(engine.id)
            self._listener.serves(engine.id, report.version)
            return report

        commit = Phase[CommitReport]("commit", self._config.timeout_s, self._faults)
        try:
            await commit.run(self._named(engines), switch)
        finally:
            self._fence_all({engine: commit.reason(engine) for engine in engines if engine not in commit.answers})
            if commit.answers:
                self._delivered = held
        return commit

    async def _roll_back(self, engines: Iterable[EngineId]) -> None:
        """Make engines forget what is staged; one that does not confirm is fenced.

        Where it was received over what served, the version that serves elsewhere is loaded again.
        """
        rollback = Phase[None]("rollback", self._config.timeout_s, self._faults)
        await rollback.run(self._named(engines), lambda engine: engine.rollback())
        self._fence_all(rollback.unanswered)
        overwritten = [engine for engine in rollback.answers if engine in self._overwritten]
        if overwritten and self._delivered is not None:
            await self._reload(self._delivered, overwritten)

    async def _reload(self, held: _Held, engines: Sequence[EngineId]) -> None:
        """A full verified load of what serves elsewhere; an engine that does not take it is fenced."""
        try:
            stage, verify = await self._prepare(held, engines)
        except (DeliveryError, PayloadError) as error:
            self._fence_all({engine: str(error) for engine in engines})
            return
        self._fence_all(stage.refused | verify.refused)
        await self._commit(held, verify.answers)

    def _fence_overwritten(self) -> None:
        """Whatever ended a publication, cancellation included: nobody is left with half a version over its own."""
        if self._delivered is not None:
            self._fence_all({engine: _OVERWRITTEN for engine in self._overwritten})
        self._overwritten.clear()

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

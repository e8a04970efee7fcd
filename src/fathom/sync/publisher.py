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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, final

from torch import Tensor

from fathom.config.sync import SyncConfig
from fathom.core.errors import DeliveryError, EngineError, PayloadError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.core.ports.engine import CommitReport, DigestKind, ReceivesInto, StageReport, VerifyReport
from fathom.core.ports.faults import Faults, NoFaults
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import build_manifest, few
from fathom.sync.listener import Deaf, Listener
from fathom.sync.phase import Phase
from fathom.sync.probe import Probe
from fathom.sync.publication import Publication
from fathom.sync.receiver import Receiver
from fathom.sync.transports.transport import Transport

T = TypeVar("T")

_NO_FAULTS = NoFaults()
_MAX_BREAKS = 2
"""So often a transfer may break with no engine to blame."""
_RESTORING = "it is being restored"

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
    ) -> None:
        """`faults` reaches `hold` and `offer`, each `.before` and `.after`, and the phases stage, verify, commit and
        rollback, by engine."""
        self._engines = {engine.id: engine for engine in engines}
        self._transport = transport
        self._config = config
        self._faults = faults
        self._listener = listener
        self._fenced: dict[EngineId, str] = {}
        self._by_behaviour: set[EngineId] = set()
        self._delivered: _Held | None = None
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

        The tensors must not change until `written` is set, if given, or else until this returns: engines get what the
        transport holds.

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
                await self._hold(manifest, tensors)
                write_s = time.perf_counter() - started
                if written is not None:
                    written.set()
                return await self._deliver(_Held(manifest=manifest, mode=mode, probe=probe), write_s)
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
                await self._reload(self._delivered, [engine.id])
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

    async def _deliver(self, held: _Held, write_s: float) -> Publication:
        """The protocol, from a readable version to one that serves."""
        fenced_before, parent = set(self._fenced), self.delivered
        try:
            stage, verify = await self._prepare(held, self._trusted())
        except DeliveryError:
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
        commit = await self._commit(held, self._trusted())
        self._require_engines()
        return Publication(
            version=held.version,
            parent=parent,
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

    async def _hold(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        await self._on_transport("hold", manifest, lambda: self._transport.hold(manifest, tensors))

    async def _offer(self, manifest: Manifest, engines: Sequence[EngineId]) -> WeightSource:
        return await self._on_transport("offer", manifest, lambda: self._transport.offer(manifest.version, engines))

    async def _on_transport(self, name: str, manifest: Manifest, call: Callable[[], T]) -> T:
        """One thread serves the transport, so what outlives its deadline is finished before anything else begins."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._faults.reach(f"{name}.before")
                answer = await asyncio.get_running_loop().run_in_executor(self._transport_thread, call)
                await self._faults.reach(f"{name}.after")
                return answer
        except TimeoutError as error:
            raise DeliveryError(
                f"the transport did not {name} {manifest.version.name} within {self._config.timeout_s:g} s; "
                "look at the medium, or raise sync.timeout_s"
            ) from error
        except (DeliveryError, PayloadError):
            raise
        except Exception as error:  # the boundary: whatever a transport raises, the version was not delivered
            reason = f"{type(error).__name__}: {error}"
            raise DeliveryError(f"the transport could not {name} {manifest.version.name}: {reason}") from error

    async def _stage(self, held: _Held, engines: Sequence[EngineId]) -> Phase[StageReport]:
        """In rounds: an engine that breaks a transfer shared with others is left out of the next one.

        Raises `DeliveryError` when it broke twice and no engine is to blame.
        """
        stage = Phase[StageReport]("stage", self._config.timeout_s, self._faults)
        blameless = 0
        while engines:
            source = await self._offer(held.manifest, engines)
            await stage.run(self._named(engines), partial(_stage, held.manifest, source))
            self._fence_all(stage.failed)
            blameless += len(stage.interrupted) == len(engines)
            if blameless == _MAX_BREAKS:
                raise DeliveryError(f"the transfer of {held.version.name} broke twice: {_listed(stage.interrupted)}")
            engines = tuple(stage.interrupted)
        return stage

    async def _prepare(
        self, held: _Held, engines: Iterable[EngineId]
    ) -> tuple[Phase[StageReport], Phase[VerifyReport]]:
        """Stage and verify. Engines that fail are fenced; those that refuse are left to the caller."""

        async def prove(engine: Receiver) -> VerifyReport:
            report = await engine.verify()
            if report.kind is not DigestKind.MEMORY:
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
        self._fence_all(verify.failed)
        return stage, verify

    async def _commit(self, held: _Held, engines: Iterable[EngineId]) -> Phase[CommitReport]:
        """Whoever confirms serves the version; whoever does not is fenced, also when this is cancelled half-way."""

        async def switch(engine: Receiver) -> CommitReport:
            probe = held.probe if engine.id in self._by_behaviour else None
            if probe is not None:
                self._listener.doubts(engine.id)
            report = await engine.commit(held.version, held.mode)
            if report.version != held.version:
                raise EngineError(engine.id, f"committed {report.version.name} instead of {held.version.name}")
            if probe is not None:
                await probe.check(engine, held.version)
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

        Where it was received over what served, the parent is loaded again.
        """
        rollback = Phase[None]("rollback", self._config.timeout_s, self._faults)
        await rollback.run(self._named(engines), lambda engine: engine.rollback())
        self._fence_all(rollback.refused | rollback.failed)
        live = [engine for engine in rollback.answers if self._receives_into(engine) is ReceivesInto.LIVE]
        if live and self._delivered is not None:
            await self._reload(self._delivered, live)

    async def _reload(self, held: _Held, engines: Sequence[EngineId]) -> None:
        """A full verified load of what serves elsewhere; an engine that does not take it is fenced."""
        try:
            stage, verify = await self._prepare(held, engines)
        except DeliveryError as error:
            self._fence_all({engine: str(error) for engine in engines})
            return
        self._fence_all(stage.refused | verify.refused)
        await self._commit(held, verify.answers)

    def _receives_into(self, engine: EngineId) -> ReceivesInto:
        return self._engines[engine].capabilities.receives_into

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


async def _stage(manifest: Manifest, source: WeightSource, engine: Receiver) -> StageReport:
    return await engine.stage(manifest, source)


def _listed(reasons: Mapping[EngineId, str]) -> str:
    return "; ".join(f"{engine}: {reason}" for engine, reason in reasons.items()) or "none"

"""A teacher's engine: started, given the teacher's weights, watched, replaced when it fails; and asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import final

import msgspec
from torch import Tensor

from fathom.config.families import TransportKind
from fathom.config.sync import SyncConfig
from fathom.core.errors import EngineDeadError, EngineError, EngineRefusedError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import Engine, ScoreRequest, ScoreResult
from fathom.core.records.sampling import InFlightMode
from fathom.ledger.events import EngineFenced, EngineJoined
from fathom.run.history.recorder import Recorder
from fathom.run.weights.member import Launch, Member
from fathom.sync.probe import Probe
from fathom.sync.publisher import Publisher
from fathom.sync.transports import TRANSPORTS

ATTEMPTS = 3
"""Attempts at one scoring."""
_AT_ONCE = 16
"""Scorings under way at a time: a deadline is for work, not for a queue."""
_LOOK_S = 1.0
_FIRST, _NUMBER = 1, 0
"""Incarnation and number of a teacher's one version: it never changes."""


@final
class Teacher:
    """One teacher. Its weights are delivered like a version of the policy's: staged, digested, committed."""

    def __init__(self, name: str, launch: Launch, run_folder: Path, recorder: Recorder, *, health_s: float) -> None:
        """`launch` starts its engine; each must answer a look within `health_s`."""
        self.name = name
        self.engine = EngineId(f"teacher-{name}")
        """What its engine is called."""
        self._launch = launch
        self._sync = SyncConfig(transport=TransportKind.SHARED)
        self._transport = TRANSPORTS[TransportKind.SHARED](run_folder, self._sync)
        self._recorder = recorder
        self._health_s = health_s
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._publisher: Publisher | None = None
        self._member: Member | None = None
        self._watch: asyncio.Task[None] | None = None
        self._restored = asyncio.Event()
        self._failure: BaseException | None = None

    async def start(self, weights: Mapping[str, Tensor], probe: Probe | None) -> None:
        """Start its engine and let it serve `weights`. `probe` is of these, for engines that digest only what they
        received.

        Raises:
            ConfigError | EngineError | DeliveryError | PayloadError: it cannot teach.
        """
        began = time.monotonic()
        engine = await self._launch(self.engine)
        try:
            self._publisher = Publisher([engine], self._transport, self._sync, listener=self)
            await self._publisher.publish(weights, _NUMBER, _FIRST, InFlightMode.DRAIN, probe=probe)
        except BaseException:
            await engine.close()
            raise
        self._member = Member(
            engine, self._launch, self._publisher, self._recorder, look_s=_LOOK_S, health_s=self._health_s
        )
        self._restored.set()
        self._watch = asyncio.create_task(self._look_after(self._member))
        self._watch.add_done_callback(self._watch_ended)
        joined = EngineJoined(engine=self.engine, asked=False, version=self.version, seconds=time.monotonic() - began)
        self._recorder.record(joined)
        self._recorder.commit()

    @property
    def version(self) -> PolicyVersion:
        """Its one version; the digest is that of its weights, read back from the engine."""
        version = self._publisher.delivered if self._publisher is not None else None
        assert version is not None, "start the teacher first"
        return version

    @property
    def process(self) -> Engine:
        """The engine that scores now."""
        assert self._member is not None, "start the teacher first"
        return self._member.engine

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Score by its weights. An engine that fails is replaced, and asked again, three times in all.

        Raises:
            EngineError: it failed each time, or refused.
            NoProgressError: it had to be replaced too often: the run cannot go on.
        """
        async with self._places:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    return await self._once(request, attempt)
                except EngineRefusedError:
                    raise
                except EngineError as error:
                    if isinstance(error, EngineDeadError) or not error.may_have_begun:
                        self._fence(error.reason)
                    if attempt == ATTEMPTS:
                        raise
        raise AssertionError("the last attempt returns or raises")

    async def close(self) -> None:
        """End its engine. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._member is not None:
            await self._member.close()
        if self._publisher is not None:
            await self._publisher.close()

    async def _once(self, request: ScoreRequest, attempt: int) -> ScoreResult:
        await self._restored.wait()
        if self._failure is not None:
            raise self._failure
        result = await self.process.score(_named(request, attempt))
        if result.version != self.version:
            raise EngineError(self.engine, f"it scored by {result.version.name}, and its weights are another's")
        return result

    async def _look_after(self, member: Member) -> None:
        while True:
            await member.serve()
            self._restored.clear()
            await member.replace()
            self._restored.set()

    def _watch_ended(self, watch: asyncio.Task[None]) -> None:
        """Whoever asks next hears of it, and the run ends."""
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._failure = error
            self._restored.set()

    def _fence(self, reason: str) -> None:
        if self._publisher is not None:
            self._publisher.fence(self.engine, reason)

    # What its publisher says -----------------------------------------------------------------------------------------

    def doubts(self, engine: EngineId) -> None:
        """See `Listener.doubts`: nobody asks it before it serves."""

    def serves(self, engine: EngineId, version: PolicyVersion) -> None:
        """See `Listener.serves`. The books of versions are the policy's; a teacher's is in `EngineJoined`."""

    def fenced(self, engine: EngineId, reason: str) -> None:
        """See `Listener.fenced`."""
        self._restored.clear()
        self._recorder.fault(engine, EngineError(engine, reason))
        self._recorder.record(EngineFenced(engine=engine, reason=reason, discarded=0))
        if self._member is not None:
            self._member.raise_alarm()


def _named(request: ScoreRequest, attempt: int) -> ScoreRequest:
    """Each attempt is a request of its own."""
    return msgspec.structs.replace(request, request_id=f"{request.request_id}/{attempt}")

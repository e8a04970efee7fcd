"""The engines of a run: started, watched, replaced when they fail; others join and leave while it runs."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from itertools import count
from typing import final

from fathom.config.sync import SyncConfig
from fathom.core.errors import ConfigError, EngineError, NoProgressError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import Engine, ScoreRequest, ScoreResult
from fathom.ledger.events import EngineFenced, EngineJoined, EngineLeft, EngineServes
from fathom.rollout.router.router import Router
from fathom.run.history.recorder import Recorder
from fathom.run.weights.member import Launch, Member
from fathom.sync.chain.keeper import Keeper
from fathom.sync.publisher import Publisher
from fathom.sync.transports.transport import Transport

_LOOK_S = 1.0
"""How often an engine is looked at."""


@final
class Fleet:
    """Engines by name, and the router over those that serve.

    What happens to one engine holds up neither requests nor publications on the others while `sync.min_engines` are
    left: watching, replacing, joining and leaving are tasks of their own. One that fails for good shows in `changed`
    and `recovered`.
    """

    def __init__(
        self,
        size: int,
        launch: Launch,
        transport: Transport,
        sync: SyncConfig,
        recorder: Recorder,
        *,
        health_s: float,
        request_s: float,
        look_s: float = _LOOK_S,
        keeper: Keeper | None = None,
    ) -> None:
        """`size` engines are started, `engine-0` and so on; each must answer a look within `health_s`. A request waits
        at most `request_s` for the version it demands. `keeper` gets a copy of every version; None: nobody does."""
        self._first = [EngineId(f"engine-{number}") for number in range(size)]
        self._numbers = count(size)
        self._launch = launch
        self._transport = transport
        self._sync = sync
        self._keeper = keeper
        self._recorder = recorder
        self._health_s = health_s
        self._look_s = look_s
        self._members: dict[EngineId, Member] = {}
        self._started: list[Engine] = []
        self._watches: dict[EngineId, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._turns = 0
        self._publisher: Publisher | None = None
        self.router = Router(lambda: self.serving, self.fence, wait_s=request_s)

    async def start(self) -> None:
        """Launch the first engines, all at once. Raises ConfigError or EngineError when one cannot start."""
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as starting:
                launches = [starting.create_task(self._start_one(name)) for name in self._first]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others only ended because of it
        engines = [launched.result() for launched in launches]
        self._publisher = Publisher(engines, self._transport, self._sync, listener=self, keeper=self._keeper)
        for engine in engines:
            self._adopt(self._member(engine), asked=False, seconds=time.monotonic() - began)

    @property
    def publisher(self) -> Publisher:
        """Delivers versions to these engines."""
        if self._publisher is None:
            raise AssertionError("start the fleet first")
        return self._publisher

    @property
    def serving(self) -> list[Engine]:
        """Engines that may get requests now: they hold a version, are not fenced, and do not leave."""
        members = [self._members[name] for name in self.publisher.serving if name in self._members]
        return [member.engine for member in members if not member.leaving]

    @property
    def engines(self) -> list[Engine]:
        """All engines, those fenced and leaving included."""
        return [member.engine for member in self._members.values()]

    @property
    def names(self) -> tuple[EngineId, ...]:
        """All engines, those fenced and leaving included."""
        return tuple(self._members)

    def fence(self, engine: EngineId, reason: str) -> None:
        """Send an engine no requests, discard what it has not finished, and replace it."""
        self.publisher.fence(engine, reason)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Score by the engines that serve, in turn. Raises EngineError when none does, or this one fails."""
        engines = self.serving
        if not engines:
            raise EngineError("fleet", "no engine serves")
        self._turns += 1
        return await engines[self._turns % len(engines)].score(request)

    async def changed(self) -> None:
        """Return when engines were fenced, restored, joined or left.

        Raises:
            NoProgressError: too few engines are left for a publication, and they cannot be brought back.
        """
        if self._failure is None:
            await self._changed.wait()
        self._require_hope()

    async def recovered(self) -> None:
        """Return when as many engines as a publication needs are whole. Raises as `changed`."""
        while len(self.publisher.holders) < self._sync.min_engines:
            await self.changed()
        self._require_hope()

    async def join(self) -> EngineId:
        """Start one more engine and let it serve after a full verified load; returns its name.

        Raises:
            ConfigError | EngineError: it cannot start or be loaded; the fleet is as before.
        """
        began = time.monotonic()
        member = self._member(await self._start_one(EngineId(f"engine-{next(self._numbers)}")))
        try:
            await member.restore()
        except BaseException:
            await self.publisher.remove(member.name)
            await member.close()
            self._started.remove(member.engine)
            raise
        self._adopt(member, asked=True, seconds=time.monotonic() - began)
        return member.name

    async def leave(self, engine: EngineId, within_s: float, reason: str = "it was asked to leave") -> int:
        """Let an engine go: no more requests, its generations end or are discarded after `within_s`, it is closed.

        Returns how many generations were discarded.

        Raises:
            ConfigError: there is no such engine, it leaves already, or fewer than `sync.min_engines` would stay.
        """
        member = self._members.get(engine)
        if member is None or member.leaving:
            staying = ", ".join(each.name for each in self._members.values() if not each.leaving)
            raise ConfigError(f"there is no engine {engine!r} that could leave; there are: {staying}")
        staying = sum(not each.leaving for each in self._members.values()) - 1
        if staying < self._sync.min_engines:
            raise ConfigError(
                f"{engine} cannot leave: {staying} engines would stay, and sync.min_engines = "
                f"{self._sync.min_engines}; let another one join first"
            )
        return await self._let_go(member, within_s, reason)

    async def close(self) -> None:
        """End all engines, remove what was published, and finish what is kept of it. Idempotent."""
        watches = tuple(self._watches.values())
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        try:
            if self._publisher is None:
                self._transport.close()
            else:
                await self._publisher.close()
        finally:
            engines = [*self._started, *(member.engine for member in self._members.values())]
            keeping = [] if self._keeper is None else [asyncio.to_thread(self._keeper.close)]
            await asyncio.gather(*(engine.close() for engine in engines), *keeping)

    # One engine -----------------------------------------------------------------------------------------------------

    async def _start_one(self, name: EngineId) -> Engine:
        engine = await self._launch(name)
        self._started.append(engine)
        return engine

    def _member(self, engine: Engine) -> Member:
        return Member(
            engine, self._launch, self.publisher, self._recorder, look_s=self._look_s, health_s=self._health_s
        )

    def _adopt(self, member: Member, *, asked: bool, seconds: float) -> None:
        version = self.publisher.delivered
        self._members[member.name] = member
        watch = self._watches[member.name] = asyncio.create_task(self._look_after(member))
        watch.add_done_callback(self._watch_ended)
        self._started.remove(member.engine)
        self._tell(EngineJoined(engine=member.name, asked=asked, version=version, seconds=seconds))

    async def _look_after(self, member: Member) -> None:
        """Its life. One that fails again and again is let go while enough others are left."""
        while True:
            await member.serve()
            if member.leaving:
                return
            try:
                await member.replace()
            except NoProgressError as error:
                others = [each for each in self._members.values() if each is not member and not each.leaving]
                if len(others) < self._sync.min_engines:
                    raise
                await self._let_go(member, 0.0, f"given up: {error}")
                return
            self._wake()

    async def _let_go(self, member: Member, within_s: float, reason: str) -> int:
        began = time.monotonic()
        member.leaving = True
        self._wake()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.router.idle(member.name)
        discarded = self.router.cut(member.name, "its engine left the fleet before it ended")
        await self.publisher.remove(member.name)
        watch = self._watches.pop(member.name)
        if watch is not asyncio.current_task():
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        await member.close()
        del self._members[member.name]
        seconds = time.monotonic() - began
        self._tell(EngineLeft(engine=member.name, reason=reason, discarded=discarded, seconds=seconds))
        return discarded

    # News -----------------------------------------------------------------------------------------------------------

    def doubts(self, engine: EngineId) -> None:
        """See `Listener.doubts`."""
        self.router.hold(engine)

    def serves(self, engine: EngineId, version: PolicyVersion) -> None:
        """See `Listener.serves`."""
        self.router.serves(engine, version)
        self._recorder.record(EngineServes(engine=engine, version=version))

    def fenced(self, engine: EngineId, reason: str) -> None:
        """See `Listener.fenced`."""
        discarded = self.router.cut(engine, reason)
        self._recorder.fault(engine, EngineError(engine, reason))
        if engine in self._members:
            self._members[engine].raise_alarm()
        self._tell(EngineFenced(engine=engine, reason=reason, discarded=discarded))

    def _tell(self, event: EngineJoined | EngineFenced | EngineLeft) -> None:
        self._recorder.record(event)
        self._recorder.commit()
        self._wake()

    def _wake(self) -> None:
        self.router.look_again()
        self._changed.set()
        self._changed = asyncio.Event()

    def _watch_ended(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._failure = error
            self._wake()

    def _require_hope(self) -> None:
        if self._failure is not None:
            raise self._failure

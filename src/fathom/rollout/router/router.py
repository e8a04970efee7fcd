"""Which engine serves a request: the one that has its context already, unless that one is far ahead in load.

A request goes to the home of its session, or else of its prompt: the engine that served it last, where its prefix lies
in the cache. When that engine has more than `LEAN` such requests' tokens in flight beyond the least loaded one, the
request goes to the least loaded, which is its home from then on. Requests of a barrier stay together in any case.

A request that demands a version at least goes only to engines known to serve that one or a newer one, and waits for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from functools import partial
from typing import final

from blake3 import blake3

from fathom.core.errors import EngineDeadError, EngineError, EngineRefusedError, EngineTimeoutError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import Engine, GenerateChunk, GenerateRequest
from fathom.rollout.router.flight import Flight, cost

LEAN = 8
"""So many requests' tokens may an engine be ahead of the least loaded one and still get those whose context it has."""
MAX_TRIES = 3
"""Engines that one request is sent to at most; only while it has provably not begun anywhere."""
MAX_FAILURES = 3
"""Generations that fail in a row, none succeeding in between, after which an engine is accused."""
_MAX_HOMES = 1 << 16

Accuse = Callable[[EngineId, str], None]
"""Told of an engine that cannot be reached or fails again and again, and why."""


@final
class Router:
    """Spreads generations over engines. `serving` is asked at every request: a fenced or leaving engine gets none."""

    def __init__(self, serving: Callable[[], Sequence[Engine]], accuse: Accuse, *, wait_s: float = 600.0) -> None:
        """A request waits for the version it demands at most `wait_s` seconds."""
        self._serving = serving
        self._accuse = accuse
        self._wait_s = wait_s
        self._versions: dict[EngineId, PolicyVersion] = {}
        self._news = asyncio.Event()
        self._flights: defaultdict[EngineId, set[Flight]] = defaultdict(set)
        self._load: Counter[EngineId] = Counter()
        self._failures: Counter[EngineId] = Counter()
        self._homes: OrderedDict[bytes, EngineId] = OrderedDict()
        self._held: dict[EngineId, asyncio.Event] = {}
        self._landed = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Stream one generation from one engine.

        A request that has provably not begun goes to another engine; one that may have begun is never repeated. Where
        an engine refuses a pinned request, others may hold its version and are asked, too.

        Raises:
            EngineError: no engine serves, or the chosen one failed or was fenced.
            EngineTimeoutError: no engine got the version demanded in time.
        """
        tried: set[EngineId] = set()
        while True:
            engine = self._pick(request, await self._able(request, tried))
            flight = self._depart(engine.id, request)
            stream = engine.generate(request)
            try:
                while True:
                    try:
                        chunk = await flight.next(stream, partial(self._trusted, engine.id))
                    except StopAsyncIteration:
                        return
                    self._count(flight, chunk)
                    yield chunk
            except EngineError as error:
                if not flight.is_cut:
                    self._judge(engine.id, error)
                tried.add(engine.id)
                elsewhere = request.pinned is not None and isinstance(error, EngineRefusedError) and self._others(tried)
                if len(tried) == MAX_TRIES or (error.may_have_begun and not elsewhere):
                    raise
            finally:
                self._arrive(flight)

    def forget(self, session_key: str) -> None:
        """The session has ended; its engine is no longer remembered."""
        self._homes.pop(_session(session_key), None)

    def serves(self, engine: EngineId, version: PolicyVersion) -> None:
        """An engine has confirmed that it serves a version from now on."""
        self._versions[engine] = version
        self.release(engine)
        self.look_again()

    def look_again(self) -> None:
        """Which engines serve has changed: whoever waits for one looks again."""
        self._news.set()
        self._news = asyncio.Event()

    def hold(self, engine: EngineId) -> None:
        """Hand on nothing of what an engine generates until `release`, or until it is cut."""
        self._held.setdefault(engine, asyncio.Event())

    def release(self, engine: EngineId) -> None:
        """Hand on again."""
        if (held := self._held.pop(engine, None)) is not None:
            held.set()

    def cut(self, engine: EngineId, reason: str) -> int:
        """Discard what an engine has not finished; returns how many generations that were."""
        flights = tuple(self._flights[engine])
        for flight in flights:
            flight.cut(reason)
        self.release(engine)
        self._failures.pop(engine, None)
        self._versions.pop(engine, None)
        return len(flights)

    def in_flight(self, engine: EngineId) -> int:
        """Generations that an engine has not finished."""
        return len(self._flights[engine])

    def tokens_in_flight(self, engine: EngineId) -> int:
        """Tokens that these may still cost: prompts, and what is not yet sampled of the budgets."""
        return self._load[engine]

    async def idle(self, engine: EngineId) -> None:
        """Return when an engine has finished everything. It must not be among those that serve."""
        while self._flights[engine]:
            await self._landed.wait()

    async def _trusted(self, engine: EngineId) -> None:
        while (held := self._held.get(engine)) is not None:
            await held.wait()

    # Where to -------------------------------------------------------------------------------------------------------

    async def _able(self, request: GenerateRequest, tried: Set[EngineId]) -> dict[EngineId, Engine]:
        """Engines that may be sent a request, at least one; waits until one serves the version demanded."""
        try:
            async with asyncio.timeout(self._wait_s):
                while True:
                    engines = self._others(tried)
                    if not engines:
                        raise EngineError("fleet", "no engine serves; see the faults in `fathom show`")
                    if able := {name: engine for name, engine in engines.items() if self._new_enough(name, request)}:
                        return able
                    await self._news.wait()
        except TimeoutError as error:
            assert request.at_least is not None, "nothing else is waited for"
            served = ", ".join(f"{name} {version.name}" for name, version in sorted(self._versions.items()))
            reason = (
                f"no engine served at least {request.at_least.name} within {self._wait_s:g} s, "
                f"but {served or 'nothing'}; publish it, or demand an older one"
            )
            raise EngineTimeoutError("fleet", reason, may_have_begun=False) from error

    def _others(self, tried: Set[EngineId]) -> dict[EngineId, Engine]:
        return {engine.id: engine for engine in self._serving() if engine.id not in tried}

    def _new_enough(self, engine: EngineId, request: GenerateRequest) -> bool:
        if request.at_least is None:
            return True
        version = self._versions.get(engine)
        return version is not None and version.order >= request.at_least.order

    def _pick(self, request: GenerateRequest, engines: Mapping[EngineId, Engine]) -> Engine:
        least = min(engines, key=lambda name: self._load[name])
        keys = _keys(request)
        home = next((self._homes[key] for key in keys if self._homes.get(key) in engines), None)
        if home is None or not (request.barrier or self._near(home, least, request)):
            home = least
        for key in keys:
            self._homes[key] = home
            self._homes.move_to_end(key)
        while len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
        return engines[home]

    def _near(self, home: EngineId, least: EngineId, request: GenerateRequest) -> bool:
        return self._load[home] - self._load[least] <= LEAN * cost(request)

    # On the way -----------------------------------------------------------------------------------------------------

    def _depart(self, engine: EngineId, request: GenerateRequest) -> Flight:
        flight = Flight(engine, request)
        self._flights[engine].add(flight)
        self._load[engine] += flight.tokens
        return flight

    def _count(self, flight: Flight, chunk: GenerateChunk) -> None:
        sampled = min(len(chunk.token_ids), flight.tokens)
        flight.tokens -= sampled
        self._load[flight.engine] -= sampled
        if chunk.end is not None:
            self._failures.pop(flight.engine, None)

    def _arrive(self, flight: Flight) -> None:
        self._flights[flight.engine].discard(flight)
        self._load[flight.engine] -= flight.tokens
        self._landed.set()
        self._landed = asyncio.Event()

    def _judge(self, engine: EngineId, error: EngineError) -> None:
        """An engine that only fails would look idle, and get everything."""
        if isinstance(error, EngineRefusedError):
            return
        self._failures[engine] += 1
        if isinstance(error, EngineDeadError) or not error.may_have_begun:
            self._accuse(engine, error.reason)
        elif self._failures[engine] >= MAX_FAILURES:
            self._accuse(engine, f"{self._failures[engine]} generations in a row failed, the last so: {error.reason}")


def _session(key: str) -> bytes:
    return b"s" + key.encode()


def _keys(request: GenerateRequest) -> tuple[bytes, ...]:
    """Under what its home is remembered, the strongest claim first."""
    if request.barrier is not None:
        return (b"b" + request.barrier.name.encode(),)
    return _session(request.session_key), b"p" + blake3(request.prompt_ids.tobytes()).digest()

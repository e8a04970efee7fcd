"""Which engine serves a request: the one that has its context already, unless that one is far ahead in load.

A request goes to the home of its session, or else of its prompt: the engine that served it last, where its prefix lies
in the cache. When that engine has more than `LEAN` such requests' tokens in flight beyond the least loaded one, the
request goes to the least loaded, which is its home from then on. Requests of a barrier stay together in any case.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence, Set
from functools import partial
from typing import final

from blake3 import blake3

from fathom.core.errors import EngineDeadError, EngineError, EngineRefusedError
from fathom.core.ids import EngineId
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

    def __init__(self, serving: Callable[[], Sequence[Engine]], accuse: Accuse) -> None:
        self._serving = serving
        self._accuse = accuse
        self._flights: defaultdict[EngineId, set[Flight]] = defaultdict(set)
        self._load: Counter[EngineId] = Counter()
        self._failures: Counter[EngineId] = Counter()
        self._homes: OrderedDict[bytes, EngineId] = OrderedDict()
        self._held: dict[EngineId, asyncio.Event] = {}
        self._landed = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Stream one generation from one engine.

        A request that has provably not begun goes to another engine; one that may have begun is never repeated.

        Raises:
            EngineError: no engine serves, or the chosen one failed or was fenced.
        """
        tried: set[EngineId] = set()
        while True:
            engine = self._pick(request, tried)
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
                if error.may_have_begun or len(tried) == MAX_TRIES:
                    raise
            finally:
                self._arrive(flight)

    def forget(self, session_key: str) -> None:
        """The session has ended; its engine is no longer remembered."""
        self._homes.pop(_session(session_key), None)

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

    def _pick(self, request: GenerateRequest, tried: Set[EngineId]) -> Engine:
        engines = {engine.id: engine for engine in self._serving() if engine.id not in tried}
        if not engines:
            raise EngineError("fleet", "no engine serves; see the faults in `fathom show`")
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

"""Which engine serves a request, and what becomes of requests whose engine fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import numpy as np
import pytest

from fathom.core.errors import EngineDeadError, EngineError, EngineRefusedError, EngineTimeoutError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import DiskSource, Manifest
from fathom.core.ports.engine import Barrier, GenerateChunk, GenerateRequest
from fathom.core.records.sampling import InFlightMode, Purpose, SamplingParams
from fathom.rollout.engines.scripted.fault import Call, Fault, Trouble
from fathom.rollout.engines.scripted.script import ToyPolicy
from fathom.rollout.engines.scripted.scripted_clock import ScriptedClock
from fathom.rollout.engines.scripted.scripted_engine import Pace, ScriptedEngine
from fathom.rollout.router.router import LEAN, MAX_FAILURES, MAX_TRIES, Router

V0 = PolicyVersion(incarnation=1, number=0, digest="0" * 64)
V1 = PolicyVersion(incarnation=1, number=1, digest="1" * 64)
NEW, PROMPT = 8, 4
WAIT_S = 0.2


def request(
    name: str,
    prompt: int = 0,
    *,
    session: str = "",
    barrier: Barrier | None = None,
    pinned: PolicyVersion | None = None,
    at_least: PolicyVersion | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=np.full(PROMPT, prompt, np.int32),
        sampling=SamplingParams(),
        seed=1,
        max_new_tokens=NEW,
        stop_ids=(),
        priority=0,
        session_key=session or name,
        purpose=Purpose.ROLLOUT,
        barrier=barrier,
        pinned=pinned,
        at_least=at_least,
    )


class World:
    """Engines on a clock that tests move, behind a router."""

    def __init__(self, count: int = 3) -> None:
        self.clock = ScriptedClock()
        self.engines = [
            ScriptedEngine(
                ToyPolicy(32),
                engine_id=f"e{number}",
                pace=Pace(token_s=1.0, deadline_s=1000.0),
                sleep=self.clock.sleep,
                max_running=1024,
            )
            for number in range(count)
        ]
        self.serving: Sequence[ScriptedEngine] = self.engines
        self.accused: list[tuple[str, str]] = []
        self.router = Router(
            lambda: self.serving, lambda engine, reason: self.accused.append((engine, reason)), wait_s=WAIT_S
        )
        self.running: dict[str, asyncio.Task[list[GenerateChunk]]] = {}

    async def begin(self) -> None:
        await self.commit(V0, *self.engines)

    async def commit(self, version: PolicyVersion, *engines: ScriptedEngine) -> None:
        """Engines serve a version from now on, and the router hears of it."""
        serving = asyncio.gather(*(self._hold(engine, version) for engine in engines))
        while not serving.done():
            await self.clock.advance(0.0)

    async def send(self, *requests: GenerateRequest) -> None:
        for each in requests:
            self.running[each.request_id] = asyncio.create_task(self._read(each))
        await self.clock.advance(0.0)

    async def finish(self) -> dict[str, list[GenerateChunk] | BaseException]:
        await self.clock.advance(NEW + 1.0)
        ended = await asyncio.gather(*self.running.values(), return_exceptions=True)
        return dict(zip(self.running, ended, strict=True))

    def got(self) -> list[list[str]]:
        return [[each.request_id for each in engine.requests] for engine in self.engines]

    async def _hold(self, engine: ScriptedEngine, version: PolicyVersion) -> None:
        await engine.stage(Manifest(version=version, parent=None, tensors=()), DiskSource(path=""))
        await engine.verify()
        await engine.commit(version, InFlightMode.CONTINUE)
        self.router.serves(engine.id, version)

    async def _read(self, asked: GenerateRequest) -> list[GenerateChunk]:
        return [chunk async for chunk in self.router.generate(asked)]


def run(scenario: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))  # type: ignore[arg-type]


def play(count: int = 3):
    """A test is a coroutine function of a world that has begun."""

    def wrap(scenario):
        def test() -> None:
            async def whole() -> None:
                world = World(count)
                await world.begin()
                await scenario(world)

            run(whole())

        test.__doc__, test.__name__ = scenario.__doc__, scenario.__name__
        return test

    return wrap


@play()
async def test_the_members_of_a_group_go_to_one_engine_and_groups_spread(world: World) -> None:
    await world.send(*(request(f"{prompt}/{member}", prompt) for prompt in range(3) for member in range(LEAN)))
    assert [{name[0] for name in got} for got in world.got()] == [{"0"}, {"1"}, {"2"}]
    assert all(not isinstance(end, BaseException) for end in (await world.finish()).values())
    assert [world.router.tokens_in_flight(engine.id) for engine in world.engines] == [0, 0, 0]


@play(2)
async def test_a_home_that_is_far_ahead_gets_no_more(world: World) -> None:
    await world.send(*(request(f"m{member}", 0) for member in range(3 * LEAN)))
    loads = [world.router.tokens_in_flight(engine.id) for engine in world.engines]
    assert sum(loads) == 3 * LEAN * (PROMPT + NEW)
    assert max(loads) - min(loads) <= (LEAN + 1) * (PROMPT + NEW)
    await world.finish()


@play()
async def test_tokens_count_until_they_are_sampled(world: World) -> None:
    await world.send(request("a"))
    home = world.engines[0].id
    assert world.router.tokens_in_flight(home) == PROMPT + NEW
    await world.clock.advance(3.0)
    assert world.router.tokens_in_flight(home) == PROMPT + NEW - 3
    await world.finish()
    assert world.router.tokens_in_flight(home) == world.router.in_flight(home) == 0


@play()
async def test_a_session_stays_at_home_and_is_forgotten(world: World) -> None:
    for turn in range(4):
        await world.send(request(f"t{turn}", turn, session="s"), request(f"other{turn}", 10 + turn))
        await world.finish()
    homes = {number for number, got in enumerate(world.got()) for name in got if name.startswith("t")}
    assert len(homes) == 1
    world.serving = [engine for number, engine in enumerate(world.engines) if number not in homes]
    await world.send(request("t4", 4, session="s"))
    assert not isinstance((await world.finish())["t4"], BaseException)
    world.router.forget("s")


@play()
async def test_a_barrier_is_never_split(world: World) -> None:
    size = 5 * LEAN
    barrier = Barrier(name="b", size=size)
    await world.send(*(request(f"m{member}", member % 31, barrier=barrier) for member in range(size)))
    assert sorted(map(len, world.got())) == [0, 0, size]
    await world.finish()


@play()
async def test_what_never_began_goes_to_another_engine(world: World) -> None:
    world.engines[0].die()
    await world.send(request("a"))
    assert not isinstance((await world.finish())["a"], BaseException)
    assert {engine for engine, _ in world.accused} == {"e0"}
    assert [len(engine.requests) for engine in world.engines] == [1, 1, 0]


@play(MAX_TRIES + 1)
async def test_tries_are_bounded(world: World) -> None:
    for engine in world.engines:
        engine.die()
    await world.send(request("a"))
    assert isinstance((await world.finish())["a"], EngineDeadError)
    assert sum(len(engine.requests) for engine in world.engines) == MAX_TRIES


@pytest.mark.parametrize("trouble", [Trouble.FAILS, Trouble.BREAKS_OFF, Trouble.REFUSES, Trouble.DIES])
@pytest.mark.parametrize("after_tokens", [0, 2])
def test_what_may_have_begun_is_never_repeated(trouble: Trouble, after_tokens: int) -> None:
    async def scenario() -> None:
        world = World()
        await world.begin()
        world.engines[0].inject(Fault(call=Call.GENERATE, trouble=trouble, after_tokens=after_tokens))
        await world.send(request("a"))
        assert isinstance((await world.finish())["a"], EngineError)
        assert [len(engine.requests) for engine in world.engines] == [1, 0, 0]
        assert [engine for engine, _ in world.accused] == (["e0"] if trouble is Trouble.DIES else [])

    run(scenario())


@play(1)
async def test_an_engine_that_only_fails_is_accused_and_one_that_refuses_is_not(world: World) -> None:
    (engine,) = world.engines
    engine.inject(Fault(call=Call.GENERATE, trouble=Trouble.REFUSES, times=MAX_FAILURES))
    await world.send(*(request(f"r{number}") for number in range(MAX_FAILURES)))
    assert all(isinstance(end, EngineRefusedError) for end in (await world.finish()).values())
    engine.inject(Fault(call=Call.GENERATE, trouble=Trouble.FAILS, times=MAX_FAILURES - 1))
    await world.send(*(request(f"f{number}") for number in range(MAX_FAILURES)))
    await world.finish()
    assert not world.accused
    engine.inject(Fault(call=Call.GENERATE, trouble=Trouble.FAILS, times=MAX_FAILURES))
    await world.send(*(request(f"g{number}") for number in range(MAX_FAILURES)))
    await world.finish()
    assert [name for name, _ in world.accused] == ["e0"]
    assert f"{MAX_FAILURES} generations in a row failed" in world.accused[0][1]


@play(2)
async def test_a_cut_reaches_every_reader_at_once_even_of_an_engine_that_hangs(world: World) -> None:
    world.engines[0].inject(Fault(call=Call.GENERATE, trouble=Trouble.HANGS, times=None))
    await world.send(request("a", 0), request("b", 0), request("c", 1))
    assert world.got() == [["a", "b"], ["c"]]
    world.serving = world.engines[1:]
    assert world.router.cut(world.engines[0].id, "it fell silent") == 2
    await world.clock.advance(0.0)
    for name in ("a", "b"):
        error = world.running[name].exception()
        assert isinstance(error, EngineError)
        assert "it fell silent" in str(error)
    assert not world.accused
    assert world.router.in_flight(world.engines[0].id) == 0
    assert not isinstance((await world.finish())["c"], BaseException)


@play(2)
async def test_an_engine_is_idle_when_its_last_generation_has_ended(world: World) -> None:
    await world.send(request("a", 0), request("b", 1))
    world.serving = world.engines[1:]
    idle = asyncio.create_task(world.router.idle(EngineId("e0")))
    await world.clock.advance(1.0)
    assert not idle.done()
    await world.finish()
    await idle


@play(3)
async def test_five_hundred_are_in_flight_at_once(world: World) -> None:
    await world.send(*(request(f"m{number}", number % 31) for number in range(512)))
    assert sum(world.router.in_flight(engine.id) for engine in world.engines) == 512
    await world.clock.advance(1.0)
    running = [(await engine.status()).running for engine in world.engines]
    assert sum(running) == 512
    assert max(running) - min(running) <= LEAN + 1
    assert all(not isinstance(end, BaseException) for end in (await world.finish()).values())


def test_without_engines_it_says_so() -> None:
    async def scenario() -> None:
        world = World(0)
        await world.send(request("a"))
        assert "no engine serves" in str((await world.finish())["a"])

    run(scenario())


@play()
async def test_a_demanded_version_is_waited_for_and_only_engines_that_serve_it_are_sent_to(world: World) -> None:
    await world.send(*(request(f"new{number}", number, at_least=V1) for number in range(2)), request("any", 5))
    assert sorted(map(len, world.got())) == [0, 0, 1]
    await world.commit(V1, world.engines[2])
    await world.send(*(request(f"more{number}", number, at_least=V1) for number in range(4)))
    assert {name for name in world.got()[2] if name != "any"} == {"new0", "new1", *(f"more{n}" for n in range(4))}
    assert [name for got in world.got()[:2] for name in got if name != "any"] == []
    ended = await world.finish()
    assert all(not isinstance(end, BaseException) for end in ended.values())
    chunks = [chunk for name, end in ended.items() if name != "any" for chunk in end]
    assert {number for chunk in chunks for number in chunk.policy_version} == {V1.number}


@play(2)
async def test_an_older_demand_is_served_by_anybody(world: World) -> None:
    await world.commit(V1, world.engines[0])
    await world.send(request("a", 0, at_least=V0), request("b", 1, at_least=V0))
    assert world.got() == [["a"], ["b"]]
    await world.finish()


@play(2)
async def test_a_demand_that_nobody_meets_ends_with_what_is_there(world: World) -> None:
    await world.send(request("a", at_least=V1))
    with pytest.raises(EngineTimeoutError, match=r"no engine served at least v1@1 .* e0 v0@1, e1 v0@1") as caught:
        await world.running["a"]
    assert not caught.value.may_have_begun
    assert world.got() == [[], []]
    assert not world.accused


@play(2)
async def test_an_engine_that_was_cut_is_not_known_to_serve_anything(world: World) -> None:
    await world.commit(V1, *world.engines)
    for engine in world.engines:
        world.router.cut(engine.id, "it was fenced")
    await world.send(request("a", at_least=V1))
    assert world.got() == [[], []]
    await world.commit(V1, world.engines[1])
    assert not isinstance((await world.finish())["a"], BaseException)
    assert world.got() == [[], ["a"]]


@play(2)
async def test_a_pinned_request_goes_on_to_the_engine_that_holds_its_version(world: World) -> None:
    await world.commit(V1, world.engines[1])
    await world.send(request("a", pinned=V1))
    assert not isinstance((await world.finish())["a"], BaseException)
    assert world.got() == [["a"], ["a"]]
    await world.send(request("b", pinned=PolicyVersion(incarnation=1, number=7, digest="7" * 64)))
    assert isinstance((await world.finish())["b"], EngineRefusedError)
    assert not world.accused

"""Nothing of an engine in doubt reaches anybody, until it is trusted or cut."""

import asyncio

import numpy as np
import pytest

from fathom.core.errors import EngineError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import DiskSource, Manifest
from fathom.core.ports.engine import GenerateRequest
from fathom.core.records.sampling import InFlightMode, Purpose, SamplingParams
from fathom.rollout.engines.scripted.script import ToyPolicy
from fathom.rollout.engines.scripted.scripted_engine import ScriptedEngine
from fathom.rollout.router.router import Router

E = EngineId("e0")
NEW = 8
REQUEST = GenerateRequest(
    request_id="a",
    prompt_ids=np.full(4, 1, np.int32),
    sampling=SamplingParams(),
    seed=1,
    max_new_tokens=NEW,
    stop_ids=(),
    priority=0,
    session_key="a",
    purpose=Purpose.ROLLOUT,
)


async def held(router: Router, got: list[int]) -> asyncio.Task[None]:
    """A generation that has had all the time it needs."""

    async def read() -> None:
        async for chunk in router.generate(REQUEST):
            got.extend(chunk.token_ids.tolist())

    router.hold(E)
    reading = asyncio.create_task(read())
    for _ in range(200):
        await asyncio.sleep(0)
    assert got == []
    assert router.in_flight(E) == 1
    return reading


async def new_router() -> Router:
    engine = ScriptedEngine(ToyPolicy(32), engine_id=E)
    version = PolicyVersion(incarnation=1, number=0, digest="0" * 64)
    await engine.stage(Manifest(version=version, parent=None, tensors=()), DiskSource(path=""))
    await engine.verify()
    await engine.commit(version, InFlightMode.CONTINUE)
    return Router(lambda: [engine], lambda name, reason: None)


def test_what_was_held_is_handed_on_once_the_engine_is_trusted() -> None:
    async def run() -> None:
        router, got = await new_router(), list[int]()
        reading = await held(router, got)
        router.release(E)
        await reading
        assert len(got) == NEW

    asyncio.run(run())


def test_what_was_held_is_discarded_with_the_engine() -> None:
    async def run() -> None:
        router, got = await new_router(), list[int]()
        reading = await held(router, got)
        router.cut(E, "the probe failed")
        with pytest.raises(EngineError, match="the probe failed"):
            await reading
        assert got == []

    asyncio.run(run())

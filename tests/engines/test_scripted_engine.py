import asyncio

import numpy as np
import pytest

from fathom.core.errors import EngineDeadError, EngineError, EngineRefusedError, EngineTimeoutError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import DiskSource, Manifest, TensorEntry
from fathom.core.records.sampling import FinishReason, InFlightMode
from fathom.rollout.engines.conformance import CASES, Case, Subject
from fathom.rollout.engines.scripted.fault import Call, Fault, Trouble
from fathom.rollout.engines.scripted.script import Replies, Reply, ToyPolicy
from fathom.rollout.engines.scripted.scripted_clock import ScriptedClock
from fathom.rollout.engines.scripted.scripted_engine import Pace, ScriptedEngine

VOCAB = 64


async def publish(number: int) -> tuple[Manifest, DiskSource]:
    version = PolicyVersion(incarnation=1, number=number, digest=f"{number:064x}")
    tensors = tuple(
        TensorEntry(name=name, dtype="F32", shape=(2, 2), offset=16 * index, size_bytes=16, checksum="")
        for index, name in enumerate(["a.weight", "b.weight"])
    )
    return Manifest(version=version, parent=None, tensors=tensors), DiskSource(path="unread")


async def serving(engine: ScriptedEngine) -> Subject:
    subject = Subject(engine, publish, VOCAB)
    await subject.serve()
    return subject


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case: Case) -> None:
    async def run() -> None:
        engine = ScriptedEngine(ToyPolicy(VOCAB), max_context_tokens=192, pace=Pace(chunk_tokens=3), decode=letters)
        await case(Subject(engine, publish, VOCAB, decode=letters))

    asyncio.run(run())


def letters(ids: list[int]) -> str:
    return "".join(chr(ord("A") + token) for token in ids)


def test_an_engine_without_text_refuses_stop_strings() -> None:
    async def run() -> None:
        subject = await serving(ScriptedEngine(ToyPolicy(VOCAB)))
        with pytest.raises(EngineRefusedError, match="stop_strings"):
            await subject.run(subject.request(stop_strings=("x",)))

    asyncio.run(run())


def test_replies_come_back_exactly_and_requests_are_kept() -> None:
    async def run() -> None:
        reply = Reply(token_ids=(383, 75, 385, 9), logprobs=(-0.1, -0.2, -0.3, -0.4))
        engine = ScriptedEngine(Replies.table({(1, 2): reply}))
        subject = await serving(engine)
        done = await subject.run(subject.request(prompt=(1, 2), stop=(9,)))
        assert done.text == [383, 75, 385, 9]
        np.testing.assert_allclose(done.logprobs, [-0.1, -0.2, -0.3, -0.4], rtol=1e-6)
        assert done.end.finish_reason is FinishReason.STOP
        assert [request.prompt_ids.tolist() for request in engine.requests] == [[1, 2]]
        assert engine.calls == [Call.STAGE, Call.VERIFY, Call.COMMIT, Call.GENERATE]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (Trouble.REFUSES, EngineRefusedError),
        (Trouble.FAILS, EngineError),
        (Trouble.DIES, EngineDeadError),
        (Trouble.HANGS, EngineTimeoutError),
        (Trouble.BREAKS_OFF, EngineError),
    ],
)
def test_a_fault_meets_one_generation(trouble: Trouble, error: type[EngineError]) -> None:
    async def run() -> None:
        fault = Fault(call=Call.GENERATE, trouble=trouble, after_tokens=2)
        engine = ScriptedEngine(ToyPolicy(VOCAB), faults=[fault], pace=Pace(deadline_s=0.01))
        subject = await serving(engine)
        with pytest.raises(error):
            await subject.run(subject.request())
        if trouble is Trouble.DIES:
            with pytest.raises(EngineDeadError):
                await engine.health()
        else:
            await subject.run(subject.request())

    asyncio.run(run())


@pytest.mark.parametrize(
    "trouble",
    [
        Trouble.ONE_LOGPROB_FEWER,
        Trouble.NAN_LOGPROB,
        Trouble.POSITIVE_LOGPROB,
        Trouble.UNKNOWN_VERSION,
        Trouble.OTHER_PROMPT,
        Trouble.ENDS_TWICE,
    ],
)
def test_a_wrong_answer_is_noticed_by_the_suite(trouble: Trouble) -> None:
    async def run() -> None:
        engine = ScriptedEngine(ToyPolicy(VOCAB), faults=[Fault(call=Call.GENERATE, trouble=trouble)])
        subject = await serving(engine)
        with pytest.raises(AssertionError):
            await subject.run(subject.request())

    asyncio.run(run())


def test_a_wrong_digest_is_reported_and_cannot_be_committed() -> None:
    async def run() -> None:
        engine = ScriptedEngine(ToyPolicy(VOCAB), faults=[Fault(call=Call.VERIFY, trouble=Trouble.WRONG_DIGEST)])
        manifest, source = await publish(1)
        await engine.stage(manifest, source)
        assert (await engine.verify()).digest != manifest.version.digest
        with pytest.raises(EngineRefusedError):
            await engine.commit(manifest.version, InFlightMode.CONTINUE)

    asyncio.run(run())


def test_time_passes_when_the_clock_is_advanced() -> None:
    async def run() -> None:
        clock = ScriptedClock()
        engine = ScriptedEngine(ToyPolicy(VOCAB), pace=Pace(start_s=10, token_s=1), sleep=clock.sleep)
        staging = asyncio.create_task(serving(engine))
        await clock.advance(0)
        subject = await staging
        running = asyncio.create_task(subject.run(subject.request(new=5)))
        await clock.advance(14.9)
        assert not running.done()
        await clock.advance(0.1)
        assert len((await running).text) == 5
        assert clock.now_s == 15

    asyncio.run(run())


def test_the_oldest_is_served_first() -> None:
    async def run() -> None:
        clock = ScriptedClock()
        engine = ScriptedEngine(ToyPolicy(VOCAB), pace=Pace(token_s=1), sleep=clock.sleep, max_running=1)
        starting = asyncio.create_task(serving(engine))
        await clock.advance(0)
        subject = await starting
        order: list[int] = []

        async def one(priority: int) -> None:
            await subject.run(subject.request(new=2, priority=priority))
            order.append(priority)

        tasks = [asyncio.create_task(one(priority)) for priority in (9, 5, 7, 1)]
        for _ in range(10):
            await clock.advance(1)
        await asyncio.gather(*tasks)
        assert order == [9, 1, 5, 7], "the first to arrive found the slot free"

    asyncio.run(run())


def test_death_reaches_every_call_under_way() -> None:
    async def run() -> None:
        clock = ScriptedClock()
        engine = ScriptedEngine(ToyPolicy(VOCAB), pace=Pace(token_s=1), sleep=clock.sleep)
        preparing = asyncio.create_task(serving(engine))
        await clock.advance(0)
        subject = await preparing
        next_one = asyncio.create_task(subject.prepare())
        await clock.advance(0)
        staged = await next_one
        running = asyncio.create_task(subject.run(subject.request()))
        await clock.advance(2)
        draining = asyncio.create_task(engine.commit(staged.version, InFlightMode.DRAIN))
        await clock.advance(1)
        engine.die()
        await clock.advance(1)
        for call in (running, draining, engine.health()):
            with pytest.raises(EngineDeadError):
                await call

    asyncio.run(run())

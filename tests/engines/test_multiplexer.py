import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import numpy as np
import pytest

from fathom.core.errors import RecordError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.ports.engine import GenerateChunk, GenerateEnd, GenerateRequest, ScoreRequest, ScoreResult
from fathom.core.records.sampling import FinishReason, Purpose, SamplingParams
from fathom.core.wire import FrameReader, frame
from fathom.rollout.engines.embedded.messages import (
    Failure,
    FailureKind,
    RequestFailure,
    Scored,
    Streamed,
    StreamFrame,
    SubmitCall,
)
from fathom.rollout.engines.embedded.multiplexer import Multiplexer, Reply

END = GenerateEnd(
    finish_reason=FinishReason.LENGTH,
    engine=EngineId("e"),
    dtype="float32",
    kernels="k",
    prompt_hash="",
    cached_tokens=0,
    drafted_tokens=0,
    accepted_tokens=0,
    queue_s=0.0,
    generate_s=0.0,
)


def request(name: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=np.array([1], np.int32),
        sampling=SamplingParams(),
        seed=0,
        max_new_tokens=1,
        stop_ids=(),
        priority=0,
        session_key=name,
        purpose=Purpose.ROLLOUT,
    )


def chunk(name: str, token: int = 0, last: bool = False) -> GenerateChunk:
    one = np.array([token], np.int32)
    return GenerateChunk(
        request_id=name,
        token_ids=one,
        logprobs=np.zeros(1, np.float32),
        policy_version=one,
        kv_version=one,
        versions=(),
        kept=None,
        raw_logprobs=None,
        routes=None,
        end=END if last else None,
    )


def sent(*parts: Streamed) -> bytes:
    return frame(StreamFrame(parts=parts))


class Remote:
    """Stands in for the engine: `answer` streams the body of each call."""

    def __init__(self, answer: Callable[[list[str]], AsyncIterator[bytes]]) -> None:
        self.calls: list[list[str]] = []
        self.aborts: list[tuple[str, ...]] = []
        self._answer = answer

    async def __call__(self, http: httpx.Request) -> httpx.Response:
        (call,) = FrameReader(SubmitCall).feed(http.content)
        names = [each.request_id for each in call.requests]
        self.calls.append(names)
        return httpx.Response(200, content=self._answer(names))

    async def abort(self, names: tuple[str, ...]) -> None:
        self.aborts.append(names)


def play(remote: Remote, test: Callable[[Multiplexer], Awaitable[None]]) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(remote)) as http:
            multiplexer = Multiplexer(http, remote.abort)
            async with asyncio.timeout(5):
                await test(multiplexer)
                await multiplexer.close()

    asyncio.run(run())


async def token(reply: Reply) -> int:
    part = await reply.next()
    assert isinstance(part, GenerateChunk)
    return int(part.token_ids[0])


async def all_end(names: list[str]) -> AsyncIterator[bytes]:
    yield sent(*(chunk(name, int(name), last=True) for name in reversed(names)))


def test_requests_of_one_moment_share_a_call_and_get_their_own_chunks() -> None:
    remote = Remote(all_end)

    async def test(multiplexer: Multiplexer) -> None:
        first = [multiplexer.start(request(str(index))) for index in range(256)]
        assert await asyncio.gather(*map(token, first)) == list(range(256))
        assert await token(multiplexer.start(request("256"))) == 256

    play(remote, test)
    assert list(map(len, remote.calls)) == [256, 1]


def test_the_same_id_twice_is_left_to_the_engine_to_refuse() -> None:
    remote = Remote(all_end)

    async def test(multiplexer: Multiplexer) -> None:
        await asyncio.gather(*(token(multiplexer.start(request("7"))) for _ in range(2)))

    play(remote, test)
    assert remote.calls == [["7"], ["7"]]


def test_scorings_travel_with_generations() -> None:
    version = PolicyVersion(incarnation=1, number=3, digest="d")
    result = ScoreResult(logprobs=np.zeros(1, np.float32), version=version)
    scoring = ScoreRequest(
        request_id="1",
        token_ids=np.array([1, 2], np.int32),
        positions=np.array([1], np.int64),
        temperature=np.ones(1, np.float32),
        kept=None,
        bias=None,
    )

    async def answer(names: list[str]) -> AsyncIterator[bytes]:
        yield sent(Scored(request_id="1", result=result), chunk("0", 5, last=True))

    async def test(multiplexer: Multiplexer) -> None:
        generated, scored = multiplexer.start(request("0")), multiplexer.start(scoring)
        part = await scored.next()
        assert isinstance(part, ScoreResult)
        assert part.version == version
        assert await token(generated) == 5

    remote = Remote(answer)
    play(remote, test)
    assert remote.calls == [["0", "1"]]


def test_one_failure_is_that_of_one_request() -> None:
    failure = Failure(kind=FailureKind.REFUSED, reason="no")

    async def answer(names: list[str]) -> AsyncIterator[bytes]:
        yield sent(RequestFailure(request_id="1", failure=failure), chunk("0", 5, last=True))

    async def test(multiplexer: Multiplexer) -> None:
        good, bad = multiplexer.start(request("0")), multiplexer.start(request("1"))
        assert await bad.next() == failure
        assert await token(good) == 5

    play(Remote(answer), test)


def test_a_call_that_is_refused_as_a_whole_fails_all_of_it() -> None:
    failure = Failure(kind=FailureKind.REFUSED, reason="no token")

    async def answer(names: list[str]) -> AsyncIterator[bytes]:
        yield frame(failure)

    async def test(multiplexer: Multiplexer) -> None:
        assert [await multiplexer.start(request(name)).next() for name in "01"] == [failure] * 2

    play(Remote(answer), test)


@pytest.mark.parametrize("broken", [True, False])
def test_a_stream_that_breaks_fails_exactly_what_has_not_ended(broken: bool) -> None:
    async def answer(names: list[str]) -> AsyncIterator[bytes]:
        yield sent(chunk("0", 3, last=True), chunk("1", 4))
        if broken:
            raise httpx.ReadError("gone")

    async def test(multiplexer: Multiplexer) -> None:
        ended, begun, waiting = (multiplexer.start(request(name)) for name in "012")
        assert await token(ended) == 3
        assert await token(begun) == 4
        for reply in (begun, waiting):
            with pytest.raises(httpx.ReadError if broken else RecordError):
                await reply.next()

    play(Remote(answer), test)


def test_what_is_left_together_is_aborted_together_and_the_rest_goes_on() -> None:
    go_on = asyncio.Event()

    async def answer(names: list[str]) -> AsyncIterator[bytes]:
        yield sent(chunk("0", 1))
        await go_on.wait()
        yield sent(chunk("1", 8, last=True), chunk("0", 9, last=True))

    async def test(multiplexer: Multiplexer) -> None:
        replies = [multiplexer.start(request(name)) for name in "0123"]
        assert await token(replies[0]) == 1
        multiplexer.leave(replies[1])
        multiplexer.leave(replies[3])
        while not remote.aborts:
            await asyncio.sleep(0)
        go_on.set()
        assert await token(replies[0]) == 9
        multiplexer.leave(replies[0])

    remote = Remote(answer)
    play(remote, test)
    assert remote.aborts == [("1", "3")]


def test_a_call_that_everybody_left_is_closed() -> None:
    closed = asyncio.Event()

    async def answer(names: list[str]) -> AsyncIterator[bytes]:
        try:
            yield sent(chunk("0", 1))
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def test(multiplexer: Multiplexer) -> None:
        reply = multiplexer.start(request("0"))
        await token(reply)
        multiplexer.leave(reply)
        await closed.wait()

    remote = Remote(answer)
    play(remote, test)
    assert not remote.aborts


def test_a_request_that_is_left_before_it_leaves_is_never_sent() -> None:
    remote = Remote(all_end)

    async def test(multiplexer: Multiplexer) -> None:
        early, other = multiplexer.start(request("0")), multiplexer.start(request("1"))
        multiplexer.leave(early)
        assert await token(other) == 1

    play(remote, test)
    assert remote.calls == [["1"]]
    assert not remote.aborts


def test_closing_fails_what_has_not_ended() -> None:
    async def answer(names: list[str]) -> AsyncIterator[bytes]:
        yield sent(chunk("0", 1))
        await asyncio.Event().wait()

    async def test(multiplexer: Multiplexer) -> None:
        reply = multiplexer.start(request("0"))
        await token(reply)
        await multiplexer.close()
        with pytest.raises(RecordError):
            await reply.next()

    play(Remote(answer), test)

"""How generations end, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import numpy as np

from fathom.core.errors import EngineRefusedError
from fathom.core.ports.engine import Barrier, GenerateChunk, GenerateRequest, ScoreRequest
from fathom.core.records.sampling import FinishReason
from fathom.rollout.engines.conformance.subject import Case, Subject

_LONG = 160
_GONE_S = 10.0


async def length_ends(subject: Subject) -> None:
    """`max_new_tokens` is met exactly, at its edge too."""
    await subject.serve()
    for new in (1, 2, 17):
        done = await subject.run(subject.request(new=new))
        assert (len(done.text), done.end.finish_reason) == (new, FinishReason.LENGTH)


async def stop_ids_end(subject: Subject) -> None:
    """Each of several stop ids ends a generation; it is sampled once and is the last token."""
    await subject.serve()
    free = await subject.run(subject.request(new=24, seed=3))
    for stop in sorted(set(free.text))[:3]:
        first = free.text.index(stop)
        done = await subject.run(subject.request(new=24, seed=3, stop=(stop, subject.vocab_size - 1)))
        assert done.end.finish_reason is FinishReason.STOP
        assert done.text == free.text[: first + 1] or done.text[-1] == subject.vocab_size - 1


async def stop_strings_end(subject: Subject) -> None:
    """The token that completes a stop string is the last one; the engine that has no text refuses."""
    await subject.serve()
    if not subject.engine.capabilities.stop_strings:
        return await _refused(subject, subject.request(stop_strings=("x",)))
    if subject.decode is None:
        return
    free = await subject.run(subject.request(new=24, seed=3))
    texts = [subject.decode(free.text[:count]) for count in range(len(free.text) + 1)]
    whole = texts[-1]
    for stop in {whole[-1:], whole[2:4], whole[5:8], whole[-3:]} - {""}:
        done = await subject.run(subject.request(new=24, seed=3, stop_strings=(stop, "never said")))
        size = next(count for count, text in enumerate(texts) if stop in text)
        assert (done.text, done.end.finish_reason) == (free.text[:size], FinishReason.STOP)
    done = await subject.run(subject.request(new=24, seed=3, stop_strings=("never said",)))
    assert (done.text, done.end.finish_reason) == (free.text, FinishReason.LENGTH)
    await _refused(subject, subject.request(stop_strings=("",)))


async def stop_at_the_limit_is_a_stop(subject: Subject) -> None:
    """A stop id sampled as the last allowed token is a stop, not a cut."""
    await subject.serve()
    free = await subject.run(subject.request(new=6, seed=4))
    first = free.text.index(free.text[-1])
    done = await subject.run(subject.request(new=first + 1, seed=4, stop=(free.text[-1],)))
    assert done.end.finish_reason is FinishReason.STOP


async def context_ends(subject: Subject) -> None:
    """One token fits after a prompt one short of the context; longer prompts are refused."""
    await subject.serve()
    limit = subject.engine.capabilities.max_context_tokens
    prompt = tuple((np.arange(limit - 1) % (subject.vocab_size - 1)).tolist())
    done = await subject.run(subject.request(prompt=prompt, new=8))
    assert (len(done.text), done.end.finish_reason) == (1, FinishReason.CONTEXT)
    done = await subject.run(subject.request(prompt=prompt, new=1))
    assert (len(done.text), done.end.finish_reason) == (1, FinishReason.LENGTH)
    for size in (limit, limit + 1):
        await _refused(subject, subject.request(prompt=(0,) * size, new=8))


async def single_token_prompts_work(subject: Subject) -> None:
    """The shortest prompt, alone and as a group."""
    await subject.serve()
    group = await asyncio.gather(*(subject.run(subject.request(prompt=(3,), seed=seed)) for seed in (0, 1)))
    again = await subject.run(subject.request(prompt=(3,), seed=1))
    assert again.text == group[1].text


async def impossible_requests_are_refused(subject: Subject) -> None:
    """No prompt, no tokens, a version it does not hold."""
    version = await subject.serve()
    await _refused(subject, subject.request(prompt=()))
    await _refused(subject, subject.request(new=0))
    unknown = type(version)(incarnation=version.incarnation, number=version.number + 1000, digest="0" * 64)
    await _refused(subject, subject.request(pinned=unknown))


async def impossible_scores_are_refused(subject: Subject) -> None:
    """The first token has no left context; there are no tokens beyond the last."""
    await subject.serve()
    for positions in ([0, 1], [1, 3], []):
        request = ScoreRequest(
            request_id=subject.name(),
            token_ids=np.array([1, 2, 3], np.int32),
            positions=np.array(positions, np.int64),
            temperature=np.ones(len(positions), np.float32),
            kept=None,
            bias=None,
        )
        try:
            await subject.engine.score(request)
        except EngineRefusedError:
            continue
        raise AssertionError(f"positions {positions} of 3 tokens should have been refused")


async def a_request_is_never_started_twice(subject: Subject) -> None:
    """The same id is refused while it runs and after it ended."""
    await subject.serve()
    running = await subject.begin(subject.request(new=_LONG))
    await _refused(subject, running.request)
    await subject.engine.abort(running.request.request_id)
    await running.finish()
    await _refused(subject, running.request)


async def abort_returns_what_there_is(subject: Subject) -> None:
    """Aborted half-way: what was sampled comes back, and it is what would have been sampled anyway."""
    await subject.serve()
    running = await subject.begin(subject.request(new=_LONG, seed=5))
    await subject.engine.abort(running.request.request_id)
    done = await running.finish()
    assert done.end.finish_reason is FinishReason.ABORTED
    assert 1 <= len(done.text) < _LONG
    whole = await subject.run(subject.request(new=len(done.text), seed=5))
    assert whole.text == done.text


async def abort_before_the_first_token(subject: Subject) -> None:
    """A generation aborted while it waits ends with no tokens."""
    if not subject.engine.capabilities.barriers:
        return
    await subject.serve()
    waiting = subject.request(barrier=Barrier(name=subject.name(), size=2))
    running = asyncio.create_task(subject.run(waiting))
    while not (await subject.engine.status()).queued:
        await asyncio.sleep(0.01)
    await subject.engine.abort(waiting.request_id)
    done = await running
    assert (done.text, done.end.finish_reason) == ([], FinishReason.ABORTED)


async def abort_of_others_is_ignored(subject: Subject) -> None:
    """Unknown and ended requests may be aborted."""
    await subject.serve()
    done = await subject.run(subject.request(new=2))
    await subject.engine.abort(done.request.request_id)
    await subject.engine.abort("nobody")


async def closing_the_stream_cancels(subject: Subject) -> None:
    """Nothing runs for a caller who has gone."""
    await subject.serve()
    stream = cast("AsyncGenerator[GenerateChunk]", subject.engine.generate(subject.request(new=_LONG)))
    await anext(stream)
    await stream.aclose()
    async with asyncio.timeout(_GONE_S):
        while (await subject.engine.status()).running:
            await asyncio.sleep(0.01)


async def status_and_health_tell(subject: Subject) -> None:
    """Status names what serves and what runs."""
    version = await subject.serve()
    await subject.engine.health()
    running = await subject.begin(subject.request(new=_LONG))
    status = await subject.engine.status()
    assert (status.engine, status.version, status.staged) == (subject.engine.id, version, None)
    assert status.running == 1
    assert status.capabilities == subject.engine.capabilities
    await subject.engine.abort(running.request.request_id)
    await running.finish()


async def _refused(subject: Subject, request: GenerateRequest) -> None:
    try:
        await subject.run(request)
    except EngineRefusedError:
        return
    raise AssertionError(f"{request.request_id} should have been refused")


ENDING_CASES: tuple[Case, ...] = (
    length_ends,
    stop_ids_end,
    stop_strings_end,
    stop_at_the_limit_is_a_stop,
    context_ends,
    single_token_prompts_work,
    impossible_requests_are_refused,
    impossible_scores_are_refused,
    a_request_is_never_started_twice,
    abort_returns_what_there_is,
    abort_before_the_first_token,
    abort_of_others_is_ignored,
    closing_the_stream_cancels,
    status_and_health_tell,
)

"""The registry: keys, idle sessions, the bound on memory, counters; and replies that break off."""

import asyncio

import pytest
from plain_parts import END, Answers, PlainReads, PlainRenderer, session

from fathom.core.errors import BudgetError, EngineError
from fathom.core.records.message import Message, Role
from fathom.core.records.sampling import Purpose, SamplingParams
from fathom.core.records.trajectory import TrajectoryStatus
from fathom.rollout.session.call import CallRefusedError, Refusal, TurnCall
from fathom.rollout.session.dialects.chat_completions import ChatCompletions
from fathom.rollout.session.dialects.dialect import Terms
from fathom.rollout.session.plan import SessionPlan
from fathom.rollout.session.reply import Reply
from fathom.rollout.session.sessions import Sessions


def plan(name: str) -> SessionPlan:
    return SessionPlan(
        name=name,
        sampling=SamplingParams(),
        max_new_tokens=50,
        max_context_tokens=200,
        max_turns=20,
        stop_ids=(END,),
        seed=0,
        priority=0,
        purpose=Purpose.ROLLOUT,
    )


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def registry(answers, clock=None, **changes):
    options = {"max_tokens": 1000, "idle_s": 10.0, "clock": clock or Clock()} | changes
    return Sessions(answers, PlainRenderer(), PlainReads(), **options)


async def ask(opened, text="x", **changes):
    call = TurnCall(messages=(Message(role=Role.USER, content=text),), **changes)
    return [each async for each in opened.answer(call)][-1]


def test_keys_are_of_one_session_and_not_to_be_guessed():
    async def scenario():
        sessions = registry(Answers())
        keys = [sessions.open(plan(f"s{number}")) for number in range(20)]
        assert len({sessions.get(key).plan.name for key in keys}) == 20
        assert min(map(len, keys)) > 30
        with pytest.raises(ValueError, match="is open"):
            sessions.open(plan("s1"))
        await sessions.close(keys[1])
        sessions.open(plan("s1"))
        for key, kind in ((keys[1], Refusal.ENDED), ("other", Refusal.UNKNOWN_KEY)):
            with pytest.raises(CallRefusedError) as refused:
                sessions.get(key)
            assert refused.value.kind is kind

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("key", "kind", "words"),
    [
        ("of the one before", Refusal.ENDED, r"incarnation 2 of the run, which has ended \(this is 3\)"),
        ("fathom-1-abc", Refusal.ENDED, "belongs to incarnation 1"),
        ("fathom-3-abc", Refusal.UNKNOWN_KEY, "names no session"),
        ("fathom-4-abc", Refusal.UNKNOWN_KEY, "names no session"),
        ("fathom-²-abc", Refusal.UNKNOWN_KEY, "names no session"),
        ("fathom-1-", Refusal.UNKNOWN_KEY, "names no session"),
        ("fathom-99999999999999999999-abc", Refusal.UNKNOWN_KEY, "names no session"),
    ],
)
def test_keys_of_earlier_incarnations_are_told_from_unknown_ones(key, kind, words):
    before, now = registry(Answers(), incarnation=2), registry(Answers(), incarnation=3)
    given = before.open(plan("s0")) if key == "of the one before" else key
    now.open(plan("s0"))
    with pytest.raises(CallRefusedError, match=words) as refused:
        now.get(given)
    assert refused.value.kind is kind


def test_idle_sessions_are_aborted_and_their_records_wait_to_be_taken():
    async def scenario():
        clock, gate = Clock(), asyncio.Event()
        sessions = registry(Answers("hi$", "yo$", gate=gate), clock)
        busy, idle = sessions.open(plan("busy")), sessions.open(plan("idle"))
        running = asyncio.create_task(ask(sessions.get(busy)))
        await asyncio.sleep(0)
        clock.now_s = 11.0
        await sessions.expire()
        with pytest.raises(CallRefusedError, match="has ended"):
            await ask(sessions.get(idle))
        gate.set()
        assert (await running).message.content == "hi"
        await sessions.expire()
        assert (await sessions.close(busy)).status is TrajectoryStatus.COMPLETED, "idle time begins when a turn ends"
        closed = await sessions.close(idle)
        assert (closed.status, closed.cause) == (TrajectoryStatus.ABORTED, "nothing was asked for 10 s")

    asyncio.run(scenario())


def test_no_session_is_opened_beyond_the_tokens_that_may_be_kept():
    async def scenario():
        sessions = registry(Answers("hi$"), max_tokens=9)
        first = sessions.open(plan("s0"))
        await ask(sessions.get(first))
        assert sessions.tokens == len("u:x$a:hi$")
        with pytest.raises(BudgetError, match="9 are allowed"):
            sessions.open(plan("s1"))
        await sessions.close(first)
        sessions.open(plan("s1"))

    asyncio.run(scenario())


def test_turns_tokens_and_concurrency_are_counted():
    async def scenario():
        clock, gate = Clock(), asyncio.Event()
        sessions = registry(Answers("hi$", "yo$", "h$", gate=gate), clock)
        opened = [sessions.get(sessions.open(plan(f"s{number}"))) for number in range(2)]
        running = [asyncio.create_task(ask(each)) for each in opened]
        await asyncio.sleep(0.01)
        clock.now_s = 3.0
        gate.set()
        await asyncio.gather(*running)
        sessions.meter.read()
        failing = registry(Answers("h$", failure=EngineError("e", "gone")))
        with pytest.raises(EngineError):
            await ask(failing.get(failing.open(plan("f"))))
        metered = sessions.meter.read()
        assert (metered.turns, metered.prompt_tokens, metered.sampled_tokens) == (2, 12, 6)
        assert (metered.running, metered.most_running, metered.running_s) == (0, 2, 6.0)
        assert (failing.meter.read().failed, failing.meter.read().running) == (1, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lost_after", [0, 1, 2, 99])
def test_a_reply_counts_as_heard_when_all_of_it_was_sent(lost_after, stream):
    """The connection breaks while the `lost_after`-th part is sent; a client that asks again hears the same, or not."""

    async def reply(opened):
        gone, sent = asyncio.Event(), []

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if len(sent) > lost_after:
                gone.set()
                await asyncio.sleep(0.01)

        body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": %s}'
        dialect = ChatCompletions()
        asked = dialect.read(body % (b"true" if stream else b"false"), Terms(sampling=SamplingParams()))
        await Reply(dialect, asked, opened, {})({"type": "http"}, receive, send)
        return any(message.get("more_body") is False for message in sent)

    async def scenario():
        answers = Answers("hi$", "yo$")
        opened = session(answers)
        whole = await reply(opened)
        again = await ask(opened)
        assert again.message.content == ("yo" if whole else "hi")
        assert len(answers.requests) == 1 + whole
        assert len((await opened.close()).payload.branches) == len(answers.requests)

    asyncio.run(scenario())

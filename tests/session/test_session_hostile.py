"""Whatever happens around a session, calls end, and every trained token has the context that the engine was sent."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_parts import Answers, PlainReader, PlainReads, PlainRenderer, session, text

from fathom.core.errors import DataError, EngineError, NotAppendableError
from fathom.core.records.message import Message, Role
from fathom.core.records.trajectory import TrajectoryStatus
from fathom.rollout.session.call import CallRefusedError, Refusal, TurnBegan, TurnCall, TurnEnded
from fathom.rollout.session.session import Session
from fathom.text.chat.deltas import TextDelta


def user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


async def ask(opened, *messages, **changes) -> TurnEnded:
    heard = [each async for each in opened.answer(TurnCall(messages=messages, **changes))]
    return heard[-1]


def with_parts(answers, renderer=None, reads=None, **changes) -> Session:
    plan = session(answers, **changes).plan
    return Session(plan, answers, renderer or PlainRenderer(), reads or PlainReads())


class Renderer(PlainRenderer):
    """Raises what it is told to."""

    error: Exception | None = None
    extend_error: Exception | None = None

    def render(self, messages, tools):
        if self.error:
            raise self.error
        return super().render(messages, tools)

    def extend(self, before, new, tools, last_token):
        if self.extend_error:
            raise self.extend_error
        return super().extend(before, new, tools, last_token)


def test_a_conversation_that_the_template_refuses_changes_nothing():
    async def scenario():
        renderer = Renderer()
        opened = with_parts(Answers("hi$", "yo$"), renderer)
        first = await ask(opened, user("x"))
        renderer.extend_error = DataError("roles must alternate")
        with pytest.raises(CallRefusedError, match="must alternate") as refused:
            await ask(opened, user("x"), first.message, user("y"))
        assert refused.value.kind is Refusal.INVALID
        closed = await opened.close()
        assert (closed.status, closed.matched) == (TrajectoryStatus.COMPLETED, {})
        assert len(closed.payload.branches) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["render", "feed", "end", "reader", "surrogates"])
def test_parts_that_break_fail_the_trajectory_and_never_leave_a_caller_waiting(where):
    class Reader(PlainReader):
        def feed(self, token_ids):
            if where == "feed":
                raise KeyError("feed")
            return super().feed(token_ids)

        def end(self, finish_reason):
            if where == "end":
                raise KeyError("end")
            deltas, message = super().end(finish_reason)
            return deltas, Message(role=Role.ASSISTANT, content="\ud800") if where == "surrogates" else message

    class Reads:
        def reader(self, tools, stop_strings, turn):
            if where == "reader":
                raise KeyError("reader")
            return Reader()

    async def scenario():
        renderer = Renderer()
        renderer.error = KeyError("render") if where == "render" else None
        opened = with_parts(Answers("hi$"), renderer, Reads())
        with pytest.raises(CallRefusedError, match=where) as refused:
            await asyncio.wait_for(ask(opened, user("x")), 5)
        assert refused.value.kind is Refusal.INTERNAL
        closed = await opened.close()
        assert closed.status is TrajectoryStatus.FAILED
        assert where in closed.cause

    asyncio.run(scenario())


def test_a_turn_rendered_as_a_whole_is_a_row_of_its_own_and_the_one_before_is_trained():
    async def scenario():
        renderer = Renderer()
        renderer.extend_error = NotAppendableError("thoughts are deleted")
        answers = Answers("hi$", "yo$", "no$")
        opened = with_parts(answers, renderer)
        first = await ask(opened, user("x"))
        second = await ask(opened, user("x"), first.message, user("y"))
        await ask(opened, user("x"), first.message, user("y"), second.message, user("z"))
        closed = await opened.close()
        assert closed.rendered_whole == 2
        trained = [(text(each.token_ids), text(each.token_ids[each.loss_mask])) for each in closed.payload.branches]
        sent = [text(each.prompt_ids) for each in answers.requests]
        assert trained == [(f"{sent[0]}hi$", "hi$"), (f"{sent[1]}yo$", "yo$"), (f"{sent[2]}no$", "no$")]

    asyncio.run(scenario())


def test_a_summary_after_a_full_context_does_not_make_the_long_conversation_abandoned():
    async def scenario():
        opened = session(Answers("hello$", "ok$"), max_context_tokens=20)
        first = await ask(opened, user("x"))
        with pytest.raises(CallRefusedError, match="maximum context"):
            await ask(opened, user("x"), first.message, user("a long one"))
        await ask(opened, user("brief"))
        payload = (await opened.close()).payload
        assert [text(each.token_ids[each.loss_mask]) for each in payload.branches] == ["hello$", "ok$"]

    asyncio.run(scenario())


def test_what_was_thought_is_known_to_the_template_though_the_agent_left_it_out():
    class Thinker(PlainReader):
        def end(self, finish_reason):
            return [], Message(role=Role.ASSISTANT, content=self.said, reasoning="hm")

    class Reads:
        def reader(self, tools, stop_strings, turn):
            return Thinker()

    class Watching(PlainRenderer):
        before = ()

        def extend(self, before, new, tools, last_token):
            self.before = before
            return super().extend(before, new, tools, last_token)

    async def scenario():
        renderer = Watching()
        opened = with_parts(Answers("hi$", "yo$", "no$"), renderer, Reads())
        said = [user("x")]
        for content in ("y", "z"):
            ended = await ask(opened, *said)
            said += [Message(role=Role.ASSISTANT, content=ended.message.content), user(content)]
        await ask(opened, *said)
        assert [each.reasoning for each in renderer.before] == ["", "hm", "", "hm"]
        closed = await opened.close()
        assert (len(closed.payload.branches), closed.matched) == (1, {"content": 2})

    asyncio.run(scenario())


def test_the_tokens_of_a_session_are_bounded():
    async def scenario():
        answers = Answers("hello$", "hello$")
        opened = session(answers, max_sampled_tokens=8)
        first = await ask(opened, user("x"))
        second = await ask(opened, user("x"), first.message, user("y"))
        assert (answers.requests[1].max_new_tokens, second.sampled_tokens) == (2, 2)
        with pytest.raises(CallRefusedError) as refused:
            await ask(opened, user("z"))
        assert refused.value.kind is Refusal.NO_TOKENS_LEFT
        closed = await opened.close()
        assert (closed.status, closed.cause) == (TrajectoryStatus.TRUNCATED, "max_sampled_tokens")

    asyncio.run(scenario())


def test_turns_are_bounded_and_failed_ones_do_not_count():
    async def scenario():
        opened = session(Answers("hi$", "hi$", "yo$", failure=EngineError("e", "gone")), max_turns=2)
        with pytest.raises(EngineError):
            await ask(opened, user("x"), retry="k")
        await ask(opened, user("x"), retry="k")
        await ask(opened, user("y"))
        with pytest.raises(CallRefusedError) as refused:
            await ask(opened, user("z"))
        assert refused.value.kind is Refusal.NO_TURNS_LEFT
        assert (await opened.close()).cause == "max_turns"

    asyncio.run(scenario())


@pytest.mark.parametrize("messages", [(), (user("x"), Message(role=Role.ASSISTANT, content="I"))])
def test_what_has_nothing_to_answer_is_refused(messages):
    with pytest.raises(CallRefusedError):
        asyncio.run(ask(session(Answers()), *messages))


def test_closing_at_once_ends_answers_that_have_not_begun():
    async def scenario():
        opened = session(Answers("hi$"))
        asking = asyncio.create_task(ask(opened, user("x")))
        await asyncio.sleep(0)
        closed = await opened.close()
        assert closed is await opened.close()
        assert closed.status is TrajectoryStatus.ABORTED
        with pytest.raises(CallRefusedError, match="closed"):
            await asyncio.wait_for(asking, 5)

    asyncio.run(scenario())


def test_answers_that_were_heard_keep_no_parts():
    async def scenario():
        opened = session(Answers("x" * 999 + "$"), max_new_tokens=2000, max_context_tokens=3000)
        await ask(opened, user("x"))
        again = [each async for each in opened.answer(TurnCall(messages=(user("x"),), resent=True))]
        assert [type(each) for each in again] == [TurnBegan, TextDelta, TurnEnded]
        assert again[1].text == "x" * 999

    asyncio.run(scenario())


# Random conversations -----------------------------------------------------------------------------------------------


class Random(Answers):
    """Sampled text is drawn; some turns lack their end, some fail."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.draw = draw
        self.sent = []

    async def __call__(self, request):
        line = self.draw(st.text("ab", max_size=3)) + self.draw(st.sampled_from(["$", "$", "$", "!"]))
        if self.draw(st.integers(0, 9)) == 0:
            raise EngineError("e", "gone")
        self.lines = [line]
        said = []
        async for chunk in super().__call__(request):
            await asyncio.sleep(0)
            said += chunk.token_ids.tolist()
            yield chunk
        self.sent.append((text(request.prompt_ids), text(said)))


class Sometimes(PlainRenderer):
    """A template that cannot always be gone on with."""

    def __init__(self, draw) -> None:
        self.draw = draw

    def extend(self, before, new, tools, last_token):
        if self.draw(st.integers(0, 5)) == 0:
            raise NotAppendableError("not now")
        return super().extend(before, new, tools, last_token)


async def step(draw, opened, known):
    """One thing that an agent may do."""
    history = list(draw(st.sampled_from(known)))
    match draw(st.sampled_from(["extend", "extend", "extend", "edit", "resend", "leave", "together"])):
        case "edit" if history:
            place = draw(st.integers(0, len(history) - 1))
            history[place] = Message(role=history[place].role, content=draw(st.text("xy", max_size=2)))
        case "resend" if history:
            if history[-1].role is Role.ASSISTANT:
                history.pop()
            await said(opened, history, known, resent=draw(st.booleans()))
            return
        case "leave":
            leaving = asyncio.create_task(said(opened, [*history, user("left")], known))
            for _ in range(draw(st.integers(0, 6))):
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        case "together":
            same = draw(st.booleans())
            asked = [[*history, user("t" if same else f"t{number}")] for number in range(2)]
            await asyncio.gather(*(said(opened, each, known) for each in asked))
            return
        case _:
            pass
    await said(opened, [*history, user(draw(st.text("xy", max_size=2)))], known)


async def said(opened, messages, known, **changes):
    try:
        ended = await asyncio.wait_for(ask(opened, *messages, **changes), 5)
    except (EngineError, CallRefusedError):
        return
    known.append([*messages, ended.message])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_trained_token_stands_behind_what_the_engine_was_sent(data):
    async def scenario():
        answers = Random(data.draw)
        opened = with_parts(answers, Sometimes(data.draw), max_context_tokens=120, max_turns=30)
        known = [[]]
        for _ in range(data.draw(st.integers(1, 8))):
            await step(data.draw, opened, known)
        return answers, await opened.close()

    answers, closed = asyncio.run(scenario())
    if closed.payload is None:
        assert not answers.sent
        return
    recorded, trained = [], 0
    for branch in closed.payload.branches:
        for turn in branch.turns:
            context, own = text(branch.token_ids[: turn.start]), text(branch.token_ids[turn.start : turn.end])
            assert (context, own) in answers.sent
            if turn.start >= branch.shared_prefix:
                recorded.append((context, own))
        trained += int(branch.loss_mask.sum())
        assert not np.any(branch.loss_mask & ~branch.sampled)
    assert sorted(recorded) == sorted(answers.sent), "what was sampled is recorded, once"
    assert 0 < trained <= sum(len(own) for _, own in answers.sent)

"""A session: what is trained is what the engine was sent and sampled; retries, branches, ends."""

import asyncio

import msgspec
import pytest
from plain_parts import Answers, session, text

from fathom.core.errors import EngineError, RecordError
from fathom.core.records.message import Message, Role
from fathom.core.records.trajectory import TrajectoryStatus
from fathom.rollout.session.call import CallRefusedError, TurnCall, TurnEnded


def user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


async def ask(opened, *messages: Message, **changes) -> TurnEnded:
    heard = [each async for each in opened.answer(TurnCall(messages=messages, **changes))]
    assert isinstance(heard[-1], TurnEnded)
    return heard[-1]


def test_turns_go_on_from_the_ids_that_were_sampled():
    async def scenario():
        answers = Answers("hi$", "yo$", "b")
        opened = session(answers)
        first = await ask(opened, user("x"))
        second = await ask(opened, user("x"), first.message, user("y"))
        await ask(opened, user("x"), first.message, user("y"), second.message, user("z"))
        closed = await opened.close()
        (branch,) = closed.payload.branches
        assert text(branch.token_ids) == "u:x$a:hi$u:y$a:yo$u:z$a:b"
        assert text(branch.token_ids[branch.loss_mask]) == "hi$yo$b"
        assert [text(each.prompt_ids) for each in answers.requests] == [
            "u:x$a:",
            "u:x$a:hi$u:y$a:",
            "u:x$a:hi$u:y$a:yo$u:z$a:",
        ]
        assert closed.status is TrajectoryStatus.COMPLETED

    asyncio.run(scenario())


def test_another_history_opens_a_branch_and_nothing_is_overwritten():
    async def scenario():
        opened = session(Answers("hi$", "yo$", "no$"))
        first = await ask(opened, user("x"))
        await ask(opened, user("x"), first.message, user("y"))
        await ask(opened, user("x"), Message(role=Role.ASSISTANT, content="edited"), user("y"))
        payload = (await opened.close()).payload
        assert [text(each.token_ids) for each in payload.branches] == ["u:x$a:hi$u:y$a:yo$", "u:x$a:edited$u:y$a:no$"]
        trained = [text(each.token_ids[each.loss_mask]) for each in payload.branches]
        assert trained == ["hi$", "no$"], "the second answer of the first branch was abandoned"

    asyncio.run(scenario())


def test_an_answer_that_nobody_heard_is_given_again_and_sampled_once():
    async def scenario():
        gate = asyncio.Event()
        answers = Answers("hi$", gate=gate)
        opened = session(answers)
        lost = asyncio.create_task(ask(opened, user("x")))
        await asyncio.sleep(0.01)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        again = asyncio.create_task(ask(opened, user("x")))
        await asyncio.sleep(0.01)
        gate.set()
        assert (await again).message.content == "hi"
        assert len(answers.requests) == 1
        assert len((await opened.close()).payload.branches) == 1

    asyncio.run(scenario())


def test_the_same_question_asked_twice_on_purpose_is_sampled_twice():
    async def scenario():
        answers = Answers("hi$", "yo$", "more$")
        opened = session(answers)
        one, two = await asyncio.gather(ask(opened, user("x")), ask(opened, user("x")))
        assert {one.message.content, two.message.content} == {"hi", "yo"}
        assert (await ask(opened, user("x"))).message.content == "more"
        assert len((await opened.close()).payload.branches) == 3

    asyncio.run(scenario())


def test_calls_of_one_retry_key_are_one_call():
    async def scenario():
        answers = Answers("hi$")
        opened = session(answers)
        told = [await ask(opened, user("x"), retry="k") for _ in range(3)]
        assert {each.message.content for each in told} == {"hi"}
        assert len(answers.requests) == 1

    asyncio.run(scenario())


def test_a_full_context_is_refused_and_the_trajectory_is_truncated():
    async def scenario():
        opened = session(Answers("hi$"), max_context_tokens=12)
        first = await ask(opened, user("x"))
        with pytest.raises(CallRefusedError, match="15 tokens"):
            await ask(opened, user("x"), first.message, user("y"))
        closed = await opened.close()
        assert (closed.status, closed.cause) == (TrajectoryStatus.TRUNCATED, "context")
        assert text(closed.payload.branches[0].token_ids) == "u:x$a:hi$"

    asyncio.run(scenario())


def test_a_turn_without_its_end_is_closed_by_the_next_prompt():
    async def scenario():
        answers = Answers("hello$", "yo$")
        opened = session(answers)
        first = await ask(opened, user("x"), max_new_tokens=3)
        await ask(opened, user("x"), first.message, user("y"))
        assert text(answers.requests[1].prompt_ids) == "u:x$a:hel$u:y$a:"
        closed = await opened.close()
        assert closed.status is TrajectoryStatus.COMPLETED

    asyncio.run(scenario())


def test_a_failed_engine_fails_the_trajectory_unless_the_call_is_repeated():
    async def scenario(repeat: bool):
        opened = session(Answers("hi$", "hi$", failure=EngineError("e", "gone")))
        with pytest.raises(EngineError):
            await ask(opened, user("x"))
        if repeat:
            await ask(opened, user("x"))
        return await opened.close()

    assert asyncio.run(scenario(False)).status is TrajectoryStatus.FAILED
    assert asyncio.run(scenario(True)).status is TrajectoryStatus.COMPLETED


def test_closing_ends_what_runs_and_refuses_what_comes_later():
    async def scenario():
        opened = session(Answers("hi$", gate=asyncio.Event()))
        running = asyncio.create_task(ask(opened, user("x")))
        await asyncio.sleep(0.01)
        closed = await opened.close()
        assert closed.status is TrajectoryStatus.ABORTED
        with pytest.raises(CallRefusedError, match="closed"):
            await running
        with pytest.raises(CallRefusedError, match="has ended"):
            await ask(opened, user("y"))

    asyncio.run(scenario())


def test_an_engine_that_executed_another_prompt_is_found_out():
    class Liar(Answers):
        def chunk(self, request, letter, last, reason):
            made = super().chunk(request, letter, last, reason)
            end = made.end and msgspec.structs.replace(made.end, prompt_hash="of something else")
            return msgspec.structs.replace(made, end=end)

    async def scenario():
        opened = session(Liar("hi$"))
        with pytest.raises(RecordError, match="another prompt"):
            await ask(opened, user("x"))
        assert (await opened.close()).status is TrajectoryStatus.FAILED

    asyncio.run(scenario())

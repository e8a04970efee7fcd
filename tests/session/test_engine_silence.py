"""An agent that was cut while its engine was silent is no evidence about the policy; one that was slow is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from plain_parts import Answers, PlainReads, PlainRenderer, session

from fathom.core.errors import EngineError
from fathom.core.records.message import Message, Role
from fathom.core.records.trajectory import TrajectoryStatus
from fathom.rollout.engines.scripted.scripted_clock import ScriptedClock
from fathom.rollout.session.call import TurnCall
from fathom.rollout.session.plan import Closed
from fathom.rollout.session.session import SILENT_SHARE, Session

HI = Message(role=Role.USER, content="hi")
ABORTED, FAILED = TrajectoryStatus.ABORTED, TrajectoryStatus.FAILED


class Agent:
    """Asks turn after turn; its engine says a token whenever the scripted time has come for it."""

    def __init__(self, *tokens_s: Sequence[float]) -> None:
        """For each turn, the seconds that its tokens take."""
        self.clock = ScriptedClock()
        self.lines = Answers(*["h" * (len(each) - 1) + "$" for each in tokens_s])
        self.tokens_s = list(tokens_s)
        plan = session(self.lines).plan
        self.session = Session(plan, self.generate, PlainRenderer(), PlainReads(), clock=lambda: self.clock.now_s)
        self.said = [HI]

    async def generate(self, request):
        pauses = iter(self.tokens_s.pop(0))
        async for chunk in self.lines(request):
            await self.clock.sleep(next(pauses))
            yield chunk

    async def ask(self) -> None:
        call = TurnCall(messages=tuple(self.said))
        heard = [part async for part in self.session.answer(call)]
        self.said += [heard[-1].message, HI]

    async def work(self, *slow_s: float) -> None:
        """Ask for all turns, and take so many seconds after each."""
        while self.tokens_s:
            await self.ask()
            await self.clock.sleep(slow_s[len(self.said) // 2 - 1] if slow_s else 0.0)

    async def cut_after(self, seconds: float, *slow_s: float) -> Closed:
        working = asyncio.create_task(self.work(*slow_s))
        await self.clock.advance(seconds)
        working.cancel()
        return await self.session.close()


def cut(agent: Agent, after_s: float, *slow_s: float) -> Closed:
    return asyncio.run(agent.cut_after(after_s, *slow_s))


def test_an_engine_that_says_nothing_to_the_end_is_to_blame() -> None:
    closed = cut(Agent([1, 1], [1000]), 100)
    assert closed.status is FAILED
    assert closed.cause == "engine_silent: not a token of an answer in the last 98 s of 100 s"
    assert len(closed.finish_reasons) == 1, "what had been said is in the record all the same"


def test_an_engine_that_stops_in_the_middle_of_an_answer_is_to_blame() -> None:
    closed = cut(Agent([1, 1], [1, 1, 1, 1000]), 100)
    assert (closed.status, closed.cause[:13]) == (FAILED, "engine_silent")
    assert "the last 95 s" in closed.cause


def test_an_agent_whose_tools_are_slow_is_cut_by_its_own_doing() -> None:
    closed = cut(Agent([1, 1], [1, 1]), 100, 1000)
    assert (closed.status, closed.cause) == (TrajectoryStatus.COMPLETED, ""), "no answer was to come"
    closed = cut(Agent([1, 1], [1000]), 100, 93)
    assert (closed.status, closed.cause) == (ABORTED, "closed while it generated"), "asked 5 s before the end"


def test_a_long_answer_that_goes_on_is_the_policy_s_doing() -> None:
    closed = cut(Agent([1, 1], [5] * 40), 100)
    assert closed.status is ABORTED


@pytest.mark.parametrize(("silent_s", "status"), [(10.0, ABORTED), (10.5, FAILED)])
def test_the_share_is_of_the_time_since_the_first_call(silent_s: float, status: TrajectoryStatus) -> None:
    assert SILENT_SHARE == 0.1
    closed = cut(Agent([1, 1], [1000]), 100, 100 - 2 - silent_s)
    assert closed.status is status


def test_a_failure_that_was_not_made_good_stays_one_while_the_call_is_sent_again() -> None:
    async def scenario() -> Closed:
        gate = asyncio.Event()
        gate.set()
        answers = Answers("hi$", "yo$", "yo$", gate=gate)
        opened, clock = session(answers), ScriptedClock()
        opened = Session(opened.plan, answers, PlainRenderer(), PlainReads(), clock=lambda: clock.now_s)
        first = [part async for part in opened.answer(TurnCall(messages=(HI,)))][-1]
        call = TurnCall(messages=(HI, first.message, HI))
        answers.failure = EngineError("e", "gone")
        with pytest.raises(EngineError):
            [part async for part in opened.answer(call)]
        gate.clear()
        again = asyncio.ensure_future(anext(opened.answer(call)))
        await again
        return await opened.close()

    closed = asyncio.run(scenario())
    assert (closed.status, closed.cause[:12]) == (FAILED, "engine_error")

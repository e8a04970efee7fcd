"""What becomes of a trajectory by how its agent and its turns ended."""

import asyncio

import numpy as np
import pytest
from plain_parts import END, Answers, PlainReads, PlainRenderer

from fathom.core.errors import GraderDeadError
from fathom.core.ids import GroupId, Occurrence, TaskId
from fathom.core.ports.agent import Acting, Endpoint, Played, Transcript
from fathom.core.ports.environment import Task
from fathom.core.records.message import Message, Role
from fathom.core.records.sampling import Purpose, SamplingParams
from fathom.core.records.trajectory import Graded, TrajectoryStatus, Ungraded
from fathom.rollout.agent_episode import AgentEpisodeRunner, SessionTerms
from fathom.rollout.episode import EpisodePlan
from fathom.rollout.session.call import TurnCall
from fathom.rollout.session.sessions import Sessions
from synthetic.records import TOKENIZER

HI = Message(role=Role.USER, content="hi")
GOOD = Graded(components={"all": 1.0}, grader="g", answer_found=True)
PLAN = EpisodePlan(
    group=GroupId("g"),
    member=0,
    occurrence=Occurrence(epoch=0, index=0),
    attempt=0,
    task=Task(id=TaskId("t"), messages=(), answer=""),
    prompt_ids=np.empty(0, np.int32),
    sampling=SamplingParams(),
    max_new_tokens=50,
    seed=0,
    priority=0,
    purpose=Purpose.ROLLOUT,
    pinned=None,
    barrier=None,
)


class Playing:
    """Asks so many turns, perhaps leaves while one more runs, and ends as it is told."""

    def __init__(
        self, *lines, acting=Acting.ENDED, leaves=False, raises=None, boots=True, max_tokens=1000, silent_s=0.0
    ):
        self.answers = Answers(*lines)
        self.now_s, self.silent_s = 0.0, silent_s
        self.sessions = Sessions(
            self.answers,
            PlainRenderer(),
            PlainReads(),
            max_tokens=max_tokens,
            idle_s=60,
            clock=lambda: self.now_s,
        )
        self.lines, self.acting, self.leaves, self.raises, self.boots = lines, acting, leaves, raises, boots
        self.told = None
        self.forgotten = []

    async def __call__(self, task, endpoint, tell):
        if self.raises:
            raise self.raises
        if not self.boots:
            return Played(reward=Ungraded(cause="boot_error", detail="no"), acting=None, detail="", fault="")
        session, said = self.sessions.get(endpoint.key), [HI]
        for place in range(len(self.lines)):
            if self.leaves and place == len(self.lines) - 1:
                self.answers.gate = asyncio.Event()
                leaving = asyncio.create_task(self.ask(session, said))
                await asyncio.sleep(0.01)
                self.now_s += self.silent_s
                leaving.cancel()
                break
            said += [await self.ask(session, said), HI]
        detail = "" if self.acting is Acting.ENDED else "why"
        self.told = await tell(self.acting, detail)
        reward = self.told if isinstance(self.told, Ungraded) else GOOD
        return Played(reward=reward, acting=self.acting, detail=detail, fault="")

    async def ask(self, session, said):
        return [part async for part in session.answer(TurnCall(messages=tuple(said)))][-1].message

    def run(self):
        terms = SessionTerms(
            max_context_tokens=200, max_turns=9, max_sampled_tokens=None, stop_ids=(END,), record_routes=False
        )
        runner = AgentEpisodeRunner(
            sessions=self.sessions,
            endpoint=lambda key: Endpoint(base_url="", key=key, model="m"),
            play=self,
            terms=terms,
            tokenizer=TOKENIZER,
            forget=self.forgotten.append,
        )
        try:
            return asyncio.run(runner.run(PLAN))
        finally:
            assert len(self.sessions) == 0


@pytest.mark.parametrize(
    ("playing", "status", "cause", "turns"),
    [
        (Playing("ho$", "he$"), TrajectoryStatus.COMPLETED, "", 2),
        (Playing("ho$", "h" * 60), TrajectoryStatus.TRUNCATED, "length", 2),
        (Playing("ho$", acting=Acting.TIMEOUT), TrajectoryStatus.TRUNCATED, "agent_timeout: why", 1),
        (Playing("ho$", acting=Acting.FAILED), TrajectoryStatus.TRUNCATED, "agent_failed: why", 1),
        (Playing("ho$", "he$", leaves=True), TrajectoryStatus.TRUNCATED, "closed while it generated", 1),
        (
            Playing("ho$", "he$", leaves=True, acting=Acting.TIMEOUT),
            TrajectoryStatus.TRUNCATED,
            "agent_timeout: why",
            1,
        ),
    ],
)
def test_what_was_sampled_is_graded(playing, status, cause, turns):
    trajectory = playing.run()
    header = trajectory.header
    assert (header.status, header.cause, header.reward) == (status, cause, GOOD)
    assert header.session.turns == len(trajectory.payload.calls) == turns
    assert isinstance(playing.told, Transcript)
    assert playing.told.acting is playing.acting
    assert len(playing.told.finish_reasons) == turns
    assert playing.forgotten == [header.id]


def test_an_agent_that_asked_nothing_has_no_reward():
    header = Playing().run().header
    assert (header.status, header.reward.cause) == (TrajectoryStatus.FAILED, "no_turns")


@pytest.mark.parametrize("acting", list(Acting))
def test_an_agent_that_was_cut_before_any_answer_had_come_has_no_reward(acting):
    """The engine was silent all the time, say. That is no reward of 0."""
    playing = Playing("ho$", leaves=True, acting=acting)
    trajectory = playing.run()
    assert (trajectory.header.status, trajectory.header.reward.cause) == (TrajectoryStatus.FAILED, "no_turns")
    assert f"agent_{acting}" in trajectory.header.reward.detail
    assert isinstance(playing.told, Ungraded), "nothing is asked of the grader"
    assert trajectory.payload.num_sampled == 0


@pytest.mark.parametrize("acting", list(Acting))
def test_an_agent_that_was_cut_while_its_engine_was_silent_has_no_reward(acting):
    """Whether its own time was over or it had lost patience: what it left says nothing about the policy."""
    playing = Playing("ho$", "he$", leaves=True, acting=acting, silent_s=9.0)
    trajectory = playing.run()
    assert (trajectory.header.status, trajectory.header.reward.cause) == (TrajectoryStatus.FAILED, "engine_silent")
    assert trajectory.header.session.acting == acting
    assert isinstance(playing.told, Ungraded), "nothing is asked of the grader"
    assert trajectory.payload.num_sampled == 3


def test_what_did_not_boot_has_no_reward_and_says_why():
    trajectory = Playing("ho$", boots=False).run()
    assert trajectory.header.status is TrajectoryStatus.FAILED
    assert trajectory.header.cause == "boot_error: no"
    assert trajectory.header.session.acting == ""
    assert trajectory.payload.num_sampled == 0


def test_without_room_for_a_session_it_fails():
    header = Playing("ho$", max_tokens=0).run().header
    assert (header.status, header.reward.cause) == (TrajectoryStatus.FAILED, "no_session")


def test_what_ends_the_run_comes_out_and_the_session_is_closed():
    playing = Playing("ho$", raises=GraderDeadError("gone"))
    with pytest.raises(GraderDeadError):
        playing.run()
    assert playing.forgotten == ["g/m0"]

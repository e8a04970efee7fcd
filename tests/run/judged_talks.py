"""Talks whose reward comes in part from a model that judges."""

from __future__ import annotations

from typing import final

from talks import TalkOptions, Talks

from fathom.config.section import Section
from fathom.core.ports.agent import AgentEpisode, Endpoint, Transcript
from fathom.core.ports.environment import Task
from fathom.core.records.trajectory import Graded
from fathom.envs.judging import Judge, JudgeOptions


class JudgedTalkOptions(Section):
    """Who judges, and what is talked about."""

    judge: JudgeOptions
    """The judge."""
    talk: TalkOptions = TalkOptions()
    """The talk."""


@final
class JudgedTalk:
    """Component `letters` as of the talk, and `judge`: what the judge says of the last answer."""

    def __init__(self, talk: AgentEpisode, judge: Judge, task: Task) -> None:
        self.talk = talk
        self.judge = judge
        self.task = task

    async def boot(self) -> None:
        await self.talk.boot()

    async def act(self, endpoint: Endpoint) -> None:
        await self.talk.act(endpoint)

    async def grade(self, transcript: Transcript) -> Graded:
        own = await self.talk.grade(transcript)
        score = await self.judge.score(f"{self.task.answer} How good is this? {transcript.messages[-1].content}")
        components = {**own.components, "judge": self.judge.scaled(score)}
        return Graded(components=components, grader=f"{own.grader} + judge/1", answer_found=own.answer_found)

    async def close(self) -> None:
        await self.talk.close()


@final
class JudgedTalks:
    """See `JudgedTalk`."""

    Options = JudgedTalkOptions

    def __init__(self, options: JudgedTalkOptions) -> None:
        self.talks = Talks(options.talk)
        self.judge = Judge(options.judge)

    def tasks(self) -> tuple[Task, ...]:
        return self.talks.tasks()

    def eval_tasks(self) -> tuple[Task, ...]:
        return self.talks.eval_tasks()

    def episode(self, task: Task) -> AgentEpisode:
        return JudgedTalk(self.talks.episode(task), self.judge, task)

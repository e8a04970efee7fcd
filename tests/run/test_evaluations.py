"""An evaluation that fails, or is given up, leaves no episode behind."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fathom.config.run import EvalConfig
from fathom.core.errors import GraderDeadError
from fathom.core.ids import PolicyVersion, TaskId
from fathom.core.ports.environment import Task
from fathom.run.rollouts.evaluation import Evaluator
from fathom.run.stop import Stop

VERSION = PolicyVersion(incarnation=1, number=3, digest="d")


class Episodes:
    """Episodes that never end, but for one that fails when all have begun."""

    def __init__(self, failing: int | None) -> None:
        self.failing = failing
        self.running = 0
        self.begun = asyncio.Event()

    async def play(self, plan):
        self.running += 1
        if self.running == 4:
            self.begun.set()
        try:
            await self.begun.wait()
            if plan.occurrence.index == self.failing:
                raise GraderDeadError("gone")
            await asyncio.Event().wait()
        finally:
            self.running -= 1


def evaluator(episodes: Episodes, stop: Stop) -> Evaluator:
    tasks = [(Task(id=TaskId(f"t{n}"), messages=(), answer=""), np.empty(0, np.int32)) for n in range(4)]

    async def recover() -> None:
        """Nothing is to be done."""

    return Evaluator(
        EvalConfig(tasks=4),
        episodes.play,
        tasks,
        max_new_tokens=1,
        concurrency=9,
        seed=0,
        stop=stop,
        recover=recover,
    )


def test_one_that_fails_ends_the_others() -> None:
    async def go() -> int:
        episodes = Episodes(failing=2)
        with pytest.raises(GraderDeadError, match="gone"):
            await evaluator(episodes, Stop()).evaluate(VERSION)
        return episodes.running

    assert asyncio.run(go()) == 0


def test_a_run_that_is_asked_to_end_gives_it_up() -> None:
    async def go() -> tuple[object, int]:
        episodes, stop = Episodes(failing=None), Stop()
        evaluating = asyncio.create_task(evaluator(episodes, stop).evaluate(VERSION))
        await episodes.begun.wait()
        stop.ask()
        return await evaluating, episodes.running

    assert asyncio.run(go()) == (None, 0)

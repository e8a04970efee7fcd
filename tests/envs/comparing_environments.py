"""Environments that compare groups, well or badly: the task's answer says how."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from fathom.core.errors import UngradedError
from fathom.core.ids import TaskId
from fathom.core.ports.environment import GroupGrade, GroupMember, Task
from fathom.core.records.trajectory import Graded


def task(deed: str) -> Task:
    return Task(id=TaskId("t"), messages=({"role": "user", "content": "?"},), answer=deed)


async def compare(deed: str, members: Sequence[GroupMember]) -> GroupGrade:
    match deed:
        case "hang":
            await asyncio.sleep(3600)
        case "block":
            time.sleep(3600)
        case "die":
            os._exit(3)
        case "raise":
            raise ValueError("as asked")
        case "named":
            raise UngradedError("judge_budget", "all calls are used up")
        case "short":
            return GroupGrade(components={"length": (1.0,)}, grader="c/1")
        case "twice":
            return GroupGrade(components={"own": (0.0,) * len(members)}, grader="c/1")
        case "nan":
            return GroupGrade(components={"length": (float("nan"),) * len(members)}, grader="c/1")
        case "overflow":
            huge = (1.7e308,) * len(members)
            return GroupGrade(components={"a": huge, "b": huge}, grader="c/1")
        case "none":
            return None  # type: ignore[return-value]
        case _:
            pass
    longest = max(len(member.answer) for member in members)
    return GroupGrade(components={"length": tuple(len(member.answer) / longest for member in members)}, grader="c/1")


class Comparing:
    """Single-turn."""

    def tasks(self):
        return (task(""),)

    def eval_tasks(self):
        return ()

    def grade(self, task: Task, answer: str) -> Graded:
        if answer == "no budget":
            raise UngradedError("judge_budget", "all calls are used up")
        return Graded(components={"own": 1.0}, grader="own/1", answer_found=True)

    async def grade_group(self, task: Task, members: Sequence[GroupMember]) -> GroupGrade:
        return await compare(task.answer, members)


class ComparingAgents:
    """An agent acts."""

    def tasks(self):
        return (task(""),)

    def eval_tasks(self):
        return ()

    def episode(self, task: Task):
        raise AssertionError("groups are compared here, no episode is played")

    async def grade_group(self, task: Task, members: Sequence[GroupMember]) -> GroupGrade:
        return await compare(task.answer, members)


class NotAsync(Comparing):
    """Refused."""

    def grade_group(self, task: Task, members: Sequence[GroupMember]) -> GroupGrade:  # type: ignore[override]
        return GroupGrade(components={"length": (1.0,) * len(members)}, grader="c/1")

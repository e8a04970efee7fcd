"""The environment port: what a task is, and how an episode is graded.

The smallest user class has `tasks` and `grade`; nothing here knows tokens or engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypedDict, runtime_checkable

import msgspec

from fathom.core.errors import RecordError
from fathom.core.ids import TaskId
from fathom.core.records.message import Message, Role
from fathom.core.records.trajectory import Graded


class ChatMessage(TypedDict):
    """One message as chat templates expect it."""

    role: str
    content: str


class Task(msgspec.Struct, frozen=True, tag="task.1"):
    """One prompt and what is needed to grade an answer to it."""

    id: TaskId
    """Stable identity: the same data give the same id in every process."""
    messages: tuple[ChatMessage, ...]
    """The conversation so far; the policy answers it."""
    answer: str
    """Reference answer for the grader. Empty: the grader needs none."""


@runtime_checkable
class Environment(Protocol):
    """A set of tasks and their grader. Single-turn; tools and turns join it later.

    Instances are sent to grader processes when these start, so they must be picklable by import path: define the
    class in a module, or guard the script with `if __name__ == "__main__"`.
    """

    def tasks(self) -> Sequence[Task]:
        """Training tasks, in a fixed order."""
        ...

    def eval_tasks(self) -> Sequence[Task]:
        """Held-out tasks, disjoint from `tasks`. May be empty."""
        ...

    def grade(self, task: Task, answer: str) -> Graded:
        """Judge an answer. Runs in a worker process under a deadline. An exception means *ungraded*, never reward 0."""
        ...


@runtime_checkable
class DemonstratedEnvironment(Environment, Protocol):
    """An environment that can also show how tasks are solved, for a supervised warm start."""

    def demonstration(self, task: Task) -> str:
        """A good answer to `task`."""
        ...


class GroupMember(msgspec.Struct, frozen=True, tag="group_member.1"):
    """A graded member of a group, as whoever compares them sees it."""

    member: int
    """Its place in the group, from 0. Places of members without a reward are missing."""
    messages: tuple[Message, ...]
    """The answer to the task's messages; of an agent, the conversation that ended last."""
    reward: Graded
    """What it is worth by itself."""

    @property
    def answer(self) -> str:
        """What the policy said last. Empty: nothing."""
        last = self.messages[-1:]
        return last[0].content if last and last[0].role is Role.ASSISTANT else ""


class GroupGrade(msgspec.Struct, frozen=True, tag="group_grade.1"):
    """What a comparison adds to the reward of each member."""

    components: dict[str, tuple[float, ...]]
    """Named parts of the reward, none of which members have already; one finite value for each member, in the order in
    which they were given."""
    grader: str
    """Identity of what compared them: name and version."""

    def __post_init__(self) -> None:
        finite = all(math.isfinite(value) for values in self.components.values() for value in values)
        if not self.components or not finite:
            raise RecordError(f"the grade of a group needs finite components, got {self.components}")


@runtime_checkable
class ComparingEnvironment(Protocol):
    """An environment of either kind that also compares the members of a group. Those wait for each other then."""

    async def grade_group(self, task: Task, members: Sequence[GroupMember]) -> GroupGrade:
        """Compare the graded members of a complete group, once, in a process of the grader's, under its deadline.

        An exception means that all of them are *ungraded*: a group is compared whole or not at all. It is not called
        in evaluations, nor for a group with too few graded members to be trained.
        """
        ...

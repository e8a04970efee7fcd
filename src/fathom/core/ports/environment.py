"""The environment port: what a task is, and how an episode is graded.

The smallest user class has `tasks` and `grade`; nothing here knows tokens or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypedDict, runtime_checkable

import msgspec

from fathom.core.ids import TaskId
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

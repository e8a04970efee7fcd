"""A task for small runs: rewards differ within a group from the first step on, so every step changes the weights."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from fathom import Graded, Task
from fathom.config.section import Section
from fathom.core.ids import TaskId


class Digits:
    """Answer with digits. The reward is their share of the answer, or a constant."""

    class Options(Section):
        """Options."""

        train: int = Field(default=200, gt=0)
        """Training tasks."""
        constant: float | None = None
        """The reward of every answer. None: the share of digits."""

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or self.Options()

    def tasks(self) -> Sequence[Task]:
        """`0=`, `1=`, ..."""
        return [self._task("train", number) for number in range(self._options.train)]

    def eval_tasks(self) -> Sequence[Task]:
        """Twenty more."""
        return [self._task("eval", number) for number in range(20)]

    def demonstration(self, task: Task) -> str:
        """A digit."""
        return task.answer

    def grade(self, task: Task, answer: str) -> Graded:
        """See the class."""
        share = sum(character.isdigit() for character in answer) / max(len(answer), 1)
        reward = share if self._options.constant is None else self._options.constant
        return Graded(components={"digits": reward}, grader="digits/1", answer_found=bool(answer))

    def _task(self, split: str, number: int) -> Task:
        messages = ({"role": "user", "content": f"{number}="},)
        return Task(id=TaskId(f"{split}-{number}"), messages=messages, answer=str(number % 10))

"""An environment whose reward is only in the comparison; every first comparison of a task fails, if asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from fathom import Graded, Task
from fathom.config.section import Section
from fathom.core.ids import TaskId
from fathom.core.ports.environment import GroupGrade, GroupMember


class Comparisons:
    """The one with the most digits, relative to the others."""

    class Options(Section):
        """Options."""

        notes: str
        """Folder in which each comparison leaves a file."""
        fails_first: bool = False
        """The first comparison of each task raises."""
        train: int = Field(default=8, gt=0)
        """Training tasks."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def tasks(self) -> Sequence[Task]:
        return [
            Task(id=TaskId(f"c{number}"), messages=({"role": "user", "content": f"{number}="},), answer="")
            for number in range(self._options.train)
        ]

    def eval_tasks(self) -> Sequence[Task]:
        return [Task(id=TaskId("e"), messages=({"role": "user", "content": "1="},), answer="")]

    def grade(self, task: Task, answer: str) -> Graded:
        return Graded(components={"said": 0.0}, grader="said/1", answer_found=bool(answer))

    async def grade_group(self, task: Task, members: Sequence[GroupMember]) -> GroupGrade:
        folder = Path(self._options.notes)
        calls = len(list(folder.glob(f"{task.id}-*")))
        (folder / f"{task.id}-{calls}").write_text(" ".join(str(member.member) for member in members))
        if self._options.fails_first and not calls:
            raise ValueError("as asked")
        digits = [sum(map(str.isdigit, member.answer)) for member in members]
        mean = sum(digits) / len(digits)
        return GroupGrade(components={"above": tuple(count - mean for count in digits)}, grader="above/1")

"""The gold check: an environment's grader must give the gold answer 1.0."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from fathom.core.ports.environment import DemonstratedEnvironment, Environment, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldReport:
    """What the check saw."""

    checked: int
    """Tasks that have a gold answer and were graded with it."""
    without_gold: int
    """Tasks that have none."""
    faults: tuple[str, ...]
    """One sentence per gold answer that did not get 1.0. Empty: the grader passes, if anything was checked."""


def check_environment(environment: Environment, n: int) -> GoldReport:
    """Grade the gold answers of the first `n` training and the first `n` held-out tasks, in this process.

    The gold answer is the environment's demonstration, or else the task's reference answer. What the grader raises
    is raised.
    """
    faults: list[str] = []
    checked = without_gold = 0
    for task in (*islice(environment.tasks(), n), *islice(environment.eval_tasks(), n)):
        if not task.answer:
            without_gold += 1
            continue
        checked += 1
        gold = _gold(environment, task)
        graded = environment.grade(task, gold)
        if graded.total != 1.0 or not graded.answer_found:
            faults.append(f"task {task.id}: the gold answer {gold!r} got {graded.total:g}, not 1")
    return GoldReport(checked=checked, without_gold=without_gold, faults=tuple(faults))


def _gold(environment: Environment, task: Task) -> str:
    return environment.demonstration(task) if isinstance(environment, DemonstratedEnvironment) else task.answer

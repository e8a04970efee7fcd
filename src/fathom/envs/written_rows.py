"""Tasks with their good answers as files of rows: conversations to imitate, or pairs to prefer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fathom.core.errors import DataError
from fathom.core.ports.environment import DemonstratedEnvironment, Task

_TRIES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRows:
    """What was written."""

    train: int
    """Rows of `train.jsonl`."""
    held_out: int
    """Rows of `eval.jsonl`."""


def write_rows(environment: DemonstratedEnvironment, folder: Path, *, pairs: bool, seed: int) -> WrittenRows:
    """Write `train.jsonl` and `eval.jsonl` into a folder, which is made.

    A pair's rejected answer is a wrong one, drawn by the seed: the good one with one digit changed if it is a number,
    else another task's. The grader has the last word on what is wrong.

    Raises:
        DataError: the folder holds one of the files, or no wrong answer is found for a task.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts: list[int] = []
    for name, tasks in (("train", environment.tasks()), ("eval", environment.eval_tasks())):
        path = folder / f"{name}.jsonl"
        if path.exists():
            raise DataError(f"{path} exists; remove it, or give another folder")
        rng = random.Random(f"{seed} {name}")
        rows = [_pair(environment, task, tasks, rng) if pairs else _conversation(environment, task) for task in tasks]
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        counts.append(len(rows))
    return WrittenRows(train=counts[0], held_out=counts[1])


def _conversation(environment: DemonstratedEnvironment, task: Task) -> dict[str, object]:
    answer = {"role": "assistant", "content": environment.demonstration(task)}
    return {"messages": [*task.messages, answer]}


def _pair(
    environment: DemonstratedEnvironment, task: Task, tasks: Sequence[Task], rng: random.Random
) -> dict[str, object]:
    chosen = environment.demonstration(task)
    best = environment.grade(task, chosen).total
    for _ in range(_TRIES):
        rejected = _other_digit(chosen, rng) or environment.demonstration(rng.choice(tasks))
        if rejected != chosen and environment.grade(task, rejected).total < best:
            return {"prompt": list(task.messages), "chosen": chosen, "rejected": rejected}
    raise DataError(f"no wrong answer was found for task {task.id}; pairs cannot be made of these tasks")


def _other_digit(number: str, rng: random.Random) -> str:
    """The same with one digit changed, of as many digits. Empty: it is no number."""
    digits = number.removeprefix("-")
    if not digits.isdecimal():
        return ""
    place = rng.randrange(len(digits))
    leads = place == 0 and len(digits) > 1
    others = [digit for digit in "0123456789" if digit != digits[place] and not (leads and digit == "0")]
    return number[: len(number) - len(digits)] + digits[:place] + rng.choice(others) + digits[place + 1 :]

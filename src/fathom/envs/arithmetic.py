"""Sums made from a seed: the smallest real task, for tiny models with a character vocabulary."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Sequence
from typing import Literal, Self, final

from pydantic import Field, model_validator

from fathom.config.section import Section
from fathom.core.errors import ConfigError
from fathom.core.ids import TaskId
from fathom.core.ports.environment import Task
from fathom.core.records.trajectory import Graded

Operator = Literal["+", "-", "*"]
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_RESULT = {"+": "sum", "-": "difference", "*": "product"}
_INTEGER = re.compile(r"-?\d+")


class ArithmeticOptions(Section):
    """Which problems. More operands than a model has seen, and `*`, make them harder."""

    num_train: int = Field(default=8192, gt=0)
    """Training problems."""
    num_eval: int = Field(default=512, ge=0)
    """Held-out problems, none of which is a training problem."""
    operators: tuple[Operator, ...] = Field(default=("+", "-"), min_length=1)
    """Operators to draw from."""
    min_operand: int = Field(default=0, ge=0)
    """Smallest operand."""
    max_operand: int = Field(default=99, ge=0)
    """Largest operand."""
    wording: Literal["number", "sentence"] = "number"
    """How a good answer is worded: `number` is the integer and nothing else; `sentence` is `the sum of 17 and 25 is
    42`, and there the last integer of an answer counts, whatever stands before it."""
    seed: int = 0
    """Which problems are drawn. The held-out ones do not depend on `num_train`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_operand > self.max_operand:
            raise ValueError(f"min_operand {self.min_operand} is above max_operand {self.max_operand}")
        if len(set(self.operators)) < len(self.operators):
            raise ValueError(f"an operator occurs twice in {list(self.operators)}")
        return self


@final
class Arithmetic:
    """Problems like `12+7=`, answered by `19`. The reward is 1 for the right integer, else 0."""

    def __init__(self, options: ArithmeticOptions) -> None:
        """Draw the problems. Raises ConfigError when there are not enough different ones."""
        span = options.max_operand - options.min_operand + 1
        possible = span * span * len(options.operators)
        wanted = options.num_train + options.num_eval
        if wanted > possible:
            raise ConfigError(
                f"task.options: num_train + num_eval = {wanted}, but only {possible} different problems exist; "
                "lower them or raise max_operand"
            )
        order = random.Random(options.seed).sample(range(possible), wanted)
        tasks = tuple(_problem(options, span, number) for number in order)
        self._eval, self._train = tasks[: options.num_eval], tasks[options.num_eval :]
        self._sentences = options.wording == "sentence"

    def tasks(self) -> Sequence[Task]:
        """Training problems."""
        return self._train

    def eval_tasks(self) -> Sequence[Task]:
        """Held-out problems."""
        return self._eval

    def demonstration(self, task: Task) -> str:
        """The right integer, alone or at the end of a sentence."""
        return _sentence(task) if self._sentences else task.answer

    def grade(self, task: Task, answer: str) -> Graded:
        """Compare with the right integer; leading zeros or a second line are wrong, and so are words, unless sentences
        are asked for."""
        given, grader = answer.strip(), "arithmetic/1"
        if self._sentences:
            integers = _INTEGER.findall(given)
            given, grader = (integers[-1] if integers else ""), "arithmetic-sentence/1"
        return Graded(
            components={"correct": float(given == task.answer)},
            grader=grader,
            answer_found=_INTEGER.fullmatch(given) is not None,
        )


def _sentence(task: Task) -> str:
    left, sign, right = re.split(r"([-+*])", task.messages[0]["content"].rstrip("="))
    return f"the {_RESULT[sign]} of {left} and {right} is {task.answer}"


def _problem(options: ArithmeticOptions, span: int, number: int) -> Task:
    """The problem with this number, of `span * span * len(operators)`."""
    number, which = divmod(number, len(options.operators))
    left, right = (options.min_operand + part for part in divmod(number, span))
    sign = options.operators[which]
    text = f"{left}{sign}{right}="
    return Task(
        id=TaskId(f"arithmetic/{text}"),
        messages=({"role": "user", "content": text},),
        answer=str(_APPLY[sign](left, right)),
    )

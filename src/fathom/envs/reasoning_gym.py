"""Any family of the `reasoning-gym` package: procedurally generated questions with their own scorers."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, final

from blake3 import blake3
from pydantic import Field, JsonValue

from fathom.config.section import Section
from fathom.core.errors import ConfigError, DataError, MissingDependencyError
from fathom.core.ids import TaskId
from fathom.core.ports.environment import ChatMessage, Task
from fathom.core.records.trajectory import Graded

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?")
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
_TRIES_PER_QUESTION = 10


class AnswerFormat(StrEnum):
    """Where the answer stands in what the policy says."""

    TAG = "tag"
    """Inside the last `<answer>...</answer>`."""
    LAST_LINE = "last_line"
    """The last line that is not empty."""
    LAST_NUMBER = "last_number"
    """The last number, without thousands separators."""
    WHOLE = "whole"
    """All of it."""


_INSTRUCTIONS = {
    AnswerFormat.TAG: "Give your final answer between <answer> and </answer>.",
    AnswerFormat.LAST_LINE: "Write your final answer alone on the last line.",
    AnswerFormat.LAST_NUMBER: "End with your final answer, a number.",
    AnswerFormat.WHOLE: "Reply with the answer only.",
}


class ReasoningGymOptions(Section):
    """A family and what is drawn from it."""

    dataset: str
    """Name of the family, e.g. `chain_sum`."""
    size: int = Field(default=1000, gt=0)
    """Training questions."""
    eval_size: int = Field(default=500, ge=0)
    """Held-out questions, none of which is a training question."""
    seed: int = 0
    """Which questions are drawn. The held-out ones do not depend on `size`."""
    parameters: dict[str, JsonValue] = Field(default={})
    """Parameters of the family, e.g. `{ min_terms = 2, max_terms = 3 }`."""
    answer_format: AnswerFormat = AnswerFormat.TAG
    """Where the answer stands in what the policy says."""
    system_prompt: str | None = None
    """System message. None: no system message."""
    instruction: str | None = None
    """Sentence after the question. None: the one that fits `answer_format`. Empty: none."""


@final
class ReasoningGym:
    """Questions of one family. The reward is the family's own score, from 0 to 1.

    A task's id is made from its question: some families draw other questions in another process (they iterate over
    sets of strings), so an id never stands for two questions, and the drawn entries travel to the graders.
    """

    def __init__(self, options: ReasoningGymOptions) -> None:
        """Draw the questions.

        Raises:
            ConfigError: unknown family or parameter, a value it refuses, or too few different questions.
            MissingDependencyError: the package is not installed.
        """
        self._options = options
        wanted = options.size + options.eval_size
        self._dataset = _create(options, wanted * _TRIES_PER_QUESTION)
        self._entries = dict(_draw(options, self._dataset, wanted))
        tasks = tuple(_task(options, id, entry) for id, entry in self._entries.items())
        self._eval, self._train = tasks[: options.eval_size], tasks[options.eval_size :]
        self._grader = f"reasoning-gym {version('reasoning-gym')} {options.dataset}"

    def tasks(self) -> Sequence[Task]:
        """Training questions."""
        return self._train

    def eval_tasks(self) -> Sequence[Task]:
        """Held-out questions."""
        return self._eval

    def demonstration(self, task: Task) -> str:
        """The reference answer in the asked format. Raises DataError where the family knows none."""
        if not task.answer:
            raise DataError(f"reasoning-gym {self._options.dataset} has no reference answers to imitate")
        return f"<answer>{task.answer}</answer>" if self._options.answer_format is AnswerFormat.TAG else task.answer

    def grade(self, task: Task, answer: str) -> Graded:
        """The family's score of the answer. An answer that its scorer cannot read counts as none found."""
        given = extract_answer(answer, self._options.answer_format)
        try:
            score = None if given is None else float(self._dataset.score_answer(given, self._entries[task.id]))
        except _UNREADABLE:  # scorers are pure functions of the answer; several raise on one of the wrong kind
            score = None
        return Graded(components={"score": score or 0.0}, grader=self._grader, answer_found=score is not None)

    def __getstate__(self) -> dict[str, Any]:
        """All but the generator: some hold functions that cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "_dataset"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._dataset = _create(self._options, len(self._entries))


def extract_answer(text: str, where: AnswerFormat) -> str | None:
    """The answer in `text`, stripped. None: there is none."""
    match where:
        case AnswerFormat.TAG:
            _, opened, tail = text.rpartition("<answer>")
            inside, closed, _ = tail.partition("</answer>")
            found = inside if opened and closed else ""
        case AnswerFormat.LAST_LINE:
            found = text.strip().rpartition("\n")[2]
        case AnswerFormat.LAST_NUMBER:
            numbers = _NUMBER.findall(text)
            found = numbers[-1].replace(",", "") if numbers else ""
        case AnswerFormat.WHOLE:
            found = text
    return found.strip() or None


def _create(options: ReasoningGymOptions, size: int) -> ProceduralDataset:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as error:
        raise MissingDependencyError("task.kind = 'reasoning_gym'", "reasoning-gym", "reasoning-gym") from error
    if options.dataset not in DATASETS:
        near = difflib.get_close_matches(options.dataset, DATASETS, n=3, cutoff=0.5)
        raise ConfigError(
            f"task.options.dataset: reasoning-gym has no family {options.dataset!r}"
            + (f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(sorted(DATASETS))}")
        )
    _, config = DATASETS[options.dataset]
    known = [f.name for f in dataclasses.fields(config) if f.name not in ("seed", "size")]
    for name in options.parameters:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"task.options.parameters: {options.dataset} has no parameter {name!r}"
                + (f"; did you mean {near[0]}?" if near else "")
                + f" It has {', '.join(known)}"
            )
    parameters: Mapping[str, Any] = options.parameters
    try:
        return create_dataset(options.dataset, seed=options.seed, size=size, **parameters)
    except Exception as error:  # families check values by assert and by whatever fails first
        raise ConfigError(
            f"task.options.parameters: {options.dataset} refuses {dict(parameters)}: "
            f"{str(error) or type(error).__name__}"
        ) from error


def _draw(options: ReasoningGymOptions, dataset: ProceduralDataset, wanted: int) -> Iterator[tuple[TaskId, Any]]:
    """`wanted` entries with different questions, by task id."""
    seen: set[TaskId] = set()
    for index in range(len(dataset)):
        entry = dataset[index]
        id = TaskId(f"{options.dataset}/{blake3(entry['question'].encode()).hexdigest()[:16]}")
        if id not in seen:
            seen.add(id)
            yield id, entry
        if len(seen) == wanted:
            return
    raise ConfigError(
        f"task.options: {options.dataset} gave only {len(seen)} different questions in {len(dataset)} tries, "
        f"size + eval_size = {wanted}; lower them, or widen its parameters"
    )


def _task(options: ReasoningGymOptions, id: TaskId, entry: Any) -> Task:
    instruction = _INSTRUCTIONS[options.answer_format] if options.instruction is None else options.instruction
    system: list[ChatMessage] = [{"role": "system", "content": options.system_prompt}] if options.system_prompt else []
    question = "\n\n".join(part for part in (entry["question"], instruction) if part)
    return Task(id=id, messages=(*system, {"role": "user", "content": question}), answer=entry["answer"] or "")

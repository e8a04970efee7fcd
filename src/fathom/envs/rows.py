"""Questions with reference answers from a JSONL or Parquet file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, final

import msgspec
from pydantic import Field, model_validator

from fathom.config.section import Section
from fathom.core.errors import DataError
from fathom.core.ids import TaskId
from fathom.core.ports.environment import ChatMessage, Task
from fathom.core.records.trajectory import Graded
from fathom.envs.judging.judge import JudgeOptions
from fathom.envs.judging.questions import PROMPT, QuestionJudge
from fathom.envs.row_file import FileRow, column_names, lookup, read_rows

_PROMPT_COLUMNS = ("messages", "prompt", "question", "problem")
_ANSWER_COLUMNS = ("answer", "label", "ground_truth", "reward_model.ground_truth")


class RowGrader(StrEnum):
    """How an answer is compared with the row's."""

    MATH = "math"
    """As numbers, expressions or sets (see `math_answer`); the row's may be a worked solution with `#### 18`."""
    EXACT = "exact"
    """As text, without surrounding white space."""
    JUDGE = "judge"
    """By a model; see `judge`. Rows need no reference answer."""


class RowsOptions(Section):
    """A file and its columns. Column names are dotted: `reward_model.ground_truth`."""

    path: str
    """`.jsonl` or `.parquet` file of training rows, relative to the working directory."""
    prompt: str | None = None
    """Column of the question: text, or a list of chat messages. None: see `messages`."""
    messages: str | None = None
    """Column of a list of chat messages, or of its JSON text. None, like `prompt`: the one column of the first row
    that is called messages, prompt, question or problem."""
    answer: str | None = None
    """Column of the reference answer. None: the one that is called answer, label, ground_truth or
    reward_model.ground_truth."""
    eval_path: str | None = None
    """File of held-out rows with the same columns. None: see `eval_rows`."""
    eval_rows: int = Field(default=0, ge=0)
    """Hold out this many of the last rows of `path`. Training rows with a held-out question are left out, also with
    `eval_path`."""
    max_rows: int | None = Field(default=None, gt=0)
    """Read only this many rows of each file. None: all."""
    system_prompt: str | None = None
    """System message before each question. None: none is added."""
    instruction: str = ""
    """Sentence after each question."""
    grader: RowGrader = RowGrader.MATH
    """How an answer is compared with the row's."""
    judge: JudgeOptions | None = None
    """The model that judges, and what it may cost; with `grader = "judge"` only."""
    judge_prompt: str | None = None
    """What it is asked; `{question}`, `{reference}`, `{answer}`, `{lowest}` and `{highest}` are filled in. None: to
    compare the answer with the question and the reference, and to reply with a number."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompt is not None and self.messages is not None:
            raise ValueError("prompt and messages both name the column of the question; set one")
        if self.eval_path is not None and self.eval_rows:
            raise ValueError("eval_path and eval_rows both say what is held out; set one")
        if (self.grader is RowGrader.JUDGE) != (self.judge is not None):
            raise ValueError("grader = 'judge' and the section judge go together; set both or none")
        if self.judge_prompt is not None and "{answer}" not in self.judge_prompt:
            raise ValueError("judge_prompt never shows the {answer} that is to be judged; write {answer} in it")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """The functions of a `RowGrader`. Pickled by name, so a grader process loads what they need before it forks."""

    grade: Callable[[Task, str], Graded]
    """(the row, the policy's text) to a reward."""
    reference: Callable[[str], str]
    """The row's answer to the part that is compared. Empty: there is none."""
    needs_reference: bool = True
    """False: a row may have no answer."""


@final
@dataclass(frozen=True, slots=True)
class _ByReference:
    """Grades by the row's answer alone."""

    grade: Callable[[str, str], Graded]

    def __call__(self, task: Task, answer: str) -> Graded:
        return self.grade(task.answer, answer)


@final
class Rows:
    """Rows as tasks. The reward is 1 for a right answer, else 0."""

    def __init__(self, options: RowsOptions) -> None:
        """Read the files. Raises DataError, which names the file, the row and what was found there."""
        self._judge = _judge(options)
        train = _read(options, self._judge, Path(options.path), "train")
        if options.eval_path is not None:
            held_out = _read(options, self._judge, Path(options.eval_path), "eval")
        else:
            kept = max(0, len(train) - options.eval_rows)
            train, held_out = train[:kept], train[kept:]
        held_out_questions = {_question(task) for task in held_out}
        self._train = tuple(task for task in train if _question(task) not in held_out_questions)
        self._eval = tuple(held_out)

    def tasks(self) -> Sequence[Task]:
        """Training rows, in the file's order."""
        return self._train

    def eval_tasks(self) -> Sequence[Task]:
        """Held-out rows, in their file's order."""
        return self._eval

    def grade(self, task: Task, answer: str) -> Graded:
        """Compare with the row's answer."""
        return self._judge.grade(task, answer)

    def __getstate__(self) -> dict[str, Any]:
        """Without the rows: graders are sent their task with each answer."""
        return {"_judge": self._judge, "_train": (), "_eval": ()}


def grade_exact(reference: str, text: str) -> Graded:
    """1 when both are the same text, white space around it aside, else 0."""
    given = text.strip()
    equal = given == reference.strip()
    return Graded(components={"correct": float(equal)}, grader="exact/1", answer_found=bool(given))


def _judge(options: RowsOptions) -> _Judge:
    match options.grader:
        case RowGrader.MATH:
            from fathom.envs.math_answer import grade_math, reference_answer  # sympy: only for those who need it

            return _Judge(grade=_ByReference(grade_math), reference=reference_answer)
        case RowGrader.EXACT:
            return _Judge(grade=_ByReference(grade_exact), reference=str.strip)
        case RowGrader.JUDGE:
            assert options.judge is not None, "checked in the options"
            judge = QuestionJudge(options.judge, options.judge_prompt or PROMPT)
            return _Judge(grade=judge.grade, reference=str.strip, needs_reference=False)


def _question(task: Task) -> tuple[str, ...]:
    return tuple(message["content"].strip() for message in task.messages)


def _read(options: RowsOptions, judge: _Judge, path: Path, split: str) -> list[Task]:
    rows = read_rows(path, options.max_rows)
    first_number, first = rows[0]
    where = f"{path}: row {first_number}"
    named = options.prompt or options.messages
    question = named or _only_column(first, _PROMPT_COLUMNS, "prompt (or messages)", where)
    answer = options.answer
    if answer is None and (judge.needs_reference or any(_has(first, name) for name in _ANSWER_COLUMNS)):
        answer = _only_column(first, _ANSWER_COLUMNS, "answer", where)
    tasks: list[Task] = []
    for number, row in rows:
        where = f"{path}: row {number}"
        messages = _messages(_value(row, question, where), options.messages is not None, f"{where}: column {question}")
        reference = _reference(_value(row, answer, where), judge, f"{where}: column {answer}") if answer else ""
        id = TaskId(f"{split}/{path.name}:{number}")
        tasks.append(Task(id=id, messages=_dress(messages, options, where), answer=reference))
    return tasks


def _only_column(row: FileRow, names: Sequence[str], option: str, where: str) -> str:
    present = [name for name in names if _has(row, name)]
    if len(present) == 1:
        return present[0]
    problem = f"both {' and '.join(present)} could be meant" if present else f"none is called {', '.join(names)}"
    raise DataError(f"{where}: set task.options.{option}: {problem}; columns found: {', '.join(column_names(row))}")


def _has(row: FileRow, column: str) -> bool:
    try:
        lookup(row, column)
    except KeyError:
        return False
    return True


def _value(row: FileRow, column: str, where: str) -> Any:
    try:
        return lookup(row, column)
    except KeyError:
        found = ", ".join(column_names(row))
        raise DataError(f"{where} has no column {column!r}; columns found: {found}") from None


def _messages(value: Any, may_be_json: bool, where: str) -> tuple[ChatMessage, ...]:
    """One user message from text; role and content of each message from a list."""
    if may_be_json and isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise DataError(f"{where} is not the JSON text of a list of messages: {error}") from error
    if isinstance(value, str) and value.strip():
        return ({"role": "user", "content": value},)
    try:
        messages = tuple(msgspec.convert(value, list[ChatMessage]))
    except msgspec.ValidationError as error:
        raise DataError(f"{where} is neither text nor a list of messages with role and content: {error}") from error
    if not messages or messages[-1]["role"] != "user":
        raise DataError(f"{where} does not end with a message of the user, which the policy could answer")
    return messages


def _dress(messages: tuple[ChatMessage, ...], options: RowsOptions, where: str) -> tuple[ChatMessage, ...]:
    """With the system prompt before and the instruction after."""
    if options.instruction:
        last = messages[-1]
        last = ChatMessage(role=last["role"], content=f"{last['content']}\n\n{options.instruction}")
        messages = (*messages[:-1], last)
    if options.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(f"{where} has a system message of its own; remove task.options.system_prompt")
    return ({"role": "system", "content": options.system_prompt}, *messages)


def _reference(value: Any, judge: _Judge, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where} must be text or a number, got {type(value).__name__}")
    text = str(value)
    if judge.needs_reference and not judge.reference(text):
        raise DataError(f"{where} is empty: there is nothing to compare an answer with")
    return text

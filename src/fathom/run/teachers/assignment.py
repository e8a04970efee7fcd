"""Who teaches which task, and whether a teacher can teach this student. Loads no model and no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fathom.config.distillation import DistillationConfig, TeacherConfig
from fathom.config.families import DistillationForm, IdSet
from fathom.config.run import ModelConfig, RunConfig
from fathom.core.errors import ConfigError
from fathom.core.ids import TaskId
from fathom.run.starting_model import StartingModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherModel:
    """A teacher that can teach."""

    config: TeacherConfig
    """Its options."""
    model: StartingModel
    """What it computes with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Teachers by name, and the name of every task's teacher."""

    teachers: Mapping[str, TeacherModel]
    """The teachers."""
    by_task: Mapping[TaskId, str]
    """Every training task's."""


def assign(config: RunConfig, student: StartingModel, tasks: Iterable[TaskId]) -> Assignment | None:
    """Look at the teachers and give every task its own. None: there are none.

    Raises:
        ConfigError: a teacher cannot score this student's tokens, or a task has no teacher, or several.
    """
    if config.distillation is None:
        return None
    _check_sizes(config.distillation, student, config.rollout.max_kept_ids)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    teachers: dict[str, TeacherModel] = {}
    for name, teacher in config.distillation.teachers.items():
        model = StartingModel.of(ModelConfig(path=teacher.path, tiny=teacher.tiny))
        _check_teacher(name, model, student, longest, config.distillation.form)
        teachers[name] = TeacherModel(config=teacher, model=model)
    return Assignment(teachers=teachers, by_task=_by_task(config.distillation, tasks))


def asks_student(config: DistillationConfig) -> bool:
    """Whether the student's own likeliest ids are needed."""
    return config.form is DistillationForm.TOP_K and config.set is not IdSet.ONLY_TEACHER


def ids_at_most(config: DistillationConfig, vocab_size: int) -> int:
    """Most ids that are recorded for one token, besides itself."""
    match config.form:
        case DistillationForm.SAMPLED_TOKEN:
            return 0
        case DistillationForm.FULL_VOCABULARY:
            return vocab_size
        case DistillationForm.TOP_K:
            alone = config.set in (IdSet.ONLY_STUDENT, IdSet.ONLY_TEACHER)
            return min(config.top_k if alone else 2 * config.top_k, vocab_size)


def _check_sizes(config: DistillationConfig, student: StartingModel, limit: int) -> None:
    """Ids and log-probabilities of each token are kept in the record, and computed with again by the trainer."""
    most = ids_at_most(config, student.vocab_size)
    if most <= limit:
        return
    size = f"{most} ids and log-probabilities ({most * 10 / 1e3:.1f} kB) for each token"
    if config.form is DistillationForm.FULL_VOCABULARY:
        raise ConfigError(
            f"distillation.form = 'full_vocabulary' needs {size}, and rollout.max_kept_ids = {limit} allows fewer; set "
            "distillation.form = 'top_k', which needs a few, or raise rollout.max_kept_ids"
        )
    raise ConfigError(
        f"distillation.top_k = {config.top_k} with set = '{config.set}' needs up to {size}, and rollout.max_kept_ids = "
        f"{limit} allows fewer; lower the one or raise the other"
    )


def _check_teacher(
    name: str, model: StartingModel, student: StartingModel, longest: int, form: DistillationForm
) -> None:
    option = f"distillation.teachers.{name}"
    if model.tokenizer.digest != student.tokenizer.digest:
        raise ConfigError(
            f"{option}: its tokenizer ({model.tokenizer.digest[:12]}) is another one than the student's "
            f"({student.tokenizer.digest[:12]}), so the student's token ids mean something else to it; choose "
            "a teacher with the student's tokenizer"
        )
    if model.vocab_size < student.vocab_size or (
        form is not DistillationForm.SAMPLED_TOKEN and model.vocab_size != student.vocab_size
    ):
        raise ConfigError(
            f"{option}: its output head has {model.vocab_size} rows, the student's {student.vocab_size}; choose a "
            "teacher with as many"
            + ("" if form is DistillationForm.SAMPLED_TOKEN else ", or distillation.form = 'sampled_token'")
        )
    if model.max_positions < longest:
        raise ConfigError(
            f"{option}: it was made for {model.max_positions} positions, rollout.max_prompt_tokens + "
            f"rollout.max_new_tokens = {longest}; lower one of them"
        )


def _by_task(config: DistillationConfig, tasks: Iterable[TaskId]) -> dict[TaskId, str]:
    found: dict[TaskId, str] = {}
    idle = set(config.teachers)
    for task in tasks:
        matching = [name for name, teacher in config.teachers.items() if fnmatchcase(task, teacher.tasks)]
        if not matching:
            patterns = ", ".join(f"{name}: {teacher.tasks!r}" for name, teacher in config.teachers.items())
            raise ConfigError(
                f"task {task!r} has no teacher ({patterns}); widen distillation.teachers.NAME.tasks of one of them"
            )
        if len(matching) > 1:
            raise ConfigError(
                f"task {task!r} has {len(matching)} teachers: {', '.join(matching)}; narrow "
                "distillation.teachers.NAME.tasks so that one is left"
            )
        found[task] = matching[0]
        idle.discard(matching[0])
    if idle:
        unused = sorted(idle)[0]
        raise ConfigError(
            f"distillation.teachers.{unused}: no task matches its pattern {config.teachers[unused].tasks!r}; change "
            "it, or remove the teacher"
        )
    return found

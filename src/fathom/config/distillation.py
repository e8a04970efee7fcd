"""On-policy distillation: teachers, and what is learned from them (`algorithms.md` D.8)."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from fathom.config.families import DistillationForm, EngineKind, IdSet, IdWeight
from fathom.config.section import DEVICE, Section

TeacherName = Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
_OF_TOP_K = {"top_k", "set", "weight"}


class TeacherConfig(Section):
    """A teacher: a model that scores what the student sampled, by an engine of its own."""

    path: str | None = None
    """Hugging Face folder (model and tokenizer), or a hub id where a hub is reached. None: a tiny model."""
    tiny: str | None = Field(default=None, pattern="^(arithmetic|moe|terminal)$")
    """Name of a tiny model made from the run's seed. None: `path` is used."""
    tasks: str = Field(default="*", min_length=1)
    """Ids of the tasks that it teaches, as a pattern with `*`, `?` and `[...]`. Every task has exactly one teacher."""
    kind: EngineKind = EngineKind.EMBEDDED
    """Which engine scores for it."""
    device: str = Field(default="cpu", pattern=DEVICE)
    """Torch device of its engine."""
    threads: int = Field(default=1, gt=0, le=1024)
    """CPU threads of its engine."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("set exactly one of path and tiny")
        if self.kind is EngineKind.VLLM and self.device != "cpu":
            raise ValueError(f"kind = 'vllm' computes on 'cpu' only, not on '{self.device}'")
        return self


class DistillationConfig(Section):
    """On-policy distillation: the student samples, a teacher scores the student's own tokens at the same temperature.

    Reverse KL to the teacher, alone or beside the task's reward.
    """

    form: DistillationForm = DistillationForm.SAMPLED_TOKEN
    """What is compared: the sampled token alone, the likeliest ids, or all of the vocabulary."""
    coefficient: float = Field(default=1.0, gt=0)
    """Lambda: weight of the reverse KL."""
    task_reward: bool = False
    """Train on the task's reward too. False: rewards are graded and reported, and their advantages count as 0."""
    top_k: int = Field(default=16, gt=0)
    """How many of the likeliest ids of student and teacher each are looked at. Of `form = "top_k"` only."""
    set: IdSet = IdSet.ONLY_STUDENT
    """Which of these ids are compared. Of `form = "top_k"` only."""
    weight: IdWeight = IdWeight.STUDENT_P
    """How the compared ids are weighted; weights sum to 1 over the set, but for `set = "xor"`. Of `form = "top_k"`
    only."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of one scoring. After three attempts the trajectory stays without a teacher, and its rows are not
    trained."""
    teachers: dict[TeacherName, TeacherConfig] = Field(min_length=1)
    """The teachers by name, as `[distillation.teachers.NAME]`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.form is not DistillationForm.TOP_K and (unused := self.model_fields_set & _OF_TOP_K):
            raise ValueError(f"{', '.join(sorted(unused))} changes nothing with form = '{self.form}'; remove it")
        return self

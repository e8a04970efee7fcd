"""Log-probabilities of ids that were not sampled, and what a teacher says of a student's tokens.

Letters: N places, K ids over all places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np

from fathom.core.errors import RecordError


class IdLists(msgspec.Struct, frozen=True, tag="id_lists.1"):
    """Ids at each of N places, ragged."""

    offsets: np.ndarray
    """int64 [N+1]: place n has `ids[offsets[n]:offsets[n+1]]`. An empty range means none."""
    ids: np.ndarray
    """int32 [K]: ascending within a place."""

    @classmethod
    def of(cls, places: Sequence[np.ndarray]) -> Self:
        """From the ids of each place, ascending."""
        offsets = np.concatenate([[0], np.cumsum([len(own) for own in places])]).astype(np.int64)
        return cls(offsets=offsets, ids=np.concatenate([*places, np.empty(0, np.int32)]).astype(np.int32))

    @property
    def places(self) -> np.ndarray:
        """int64 [K]: the place of each id."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def at(self, place: int) -> np.ndarray:
        """int32: the ids of a place."""
        return self.ids[self.offsets[place] : self.offsets[place + 1]]

    def take(self, places: np.ndarray) -> IdLists:
        """The lists of some places, in the given order."""
        return IdLists.of([self.at(place) for place in places.tolist()])

    def check(self, count: int) -> None:
        """Raises `RecordError` unless these are lists of `count` places, each ascending."""
        whole = self.offsets.dtype == np.int64 and self.offsets.shape == (count + 1,) and self.ids.dtype == np.int32
        if not whole or self.offsets[0] != 0 or self.offsets[-1] != len(self.ids) or np.any(np.diff(self.offsets) < 0):
            raise RecordError(f"lists of ids do not fit {count} places")
        places = self.places
        if np.any((np.diff(self.ids) <= 0) & (places[1:] == places[:-1])):
            raise RecordError("the ids of a place must be ascending")


class IdScores(msgspec.Struct, frozen=True, tag="id_scores.1"):
    """Ids at each of N places with their log-probabilities there."""

    lists: IdLists
    """The ids."""
    logprobs: np.ndarray
    """float32 [K]."""

    @classmethod
    def likeliest(cls, distributions: np.ndarray, count: int) -> Self:
        """The `count` likeliest ids of each row of float32 [N, V] log-probabilities; -inf: the id is not there."""
        order = np.sort(np.argsort(-distributions, axis=1, kind="stable")[:, :count], axis=1)
        own = [ids[np.isfinite(row[ids])].astype(np.int32) for ids, row in zip(order, distributions, strict=True)]
        lists = IdLists.of(own)
        return cls(lists=lists, logprobs=distributions[lists.places, lists.ids])


class ComparedIds(msgspec.Struct, frozen=True, tag="compared_ids.1"):
    """The ids at which a student is compared with its teacher: the likeliest ones of either."""

    lists: IdLists
    """The ids."""
    logprobs: np.ndarray
    """float32 [K]: the teacher's log-probabilities."""
    of_student: np.ndarray
    """bool [K]: among the student's likeliest when the trajectory had ended."""
    of_teacher: np.ndarray
    """bool [K]: among the teacher's likeliest."""

    def __post_init__(self) -> None:
        self.lists.check(len(self.lists.offsets) - 1)
        for name, column in (
            ("logprobs", self.logprobs),
            ("of_student", self.of_student),
            ("of_teacher", self.of_teacher),
        ):
            if column.shape != self.lists.ids.shape:
                raise RecordError(f"{name} has shape {column.shape} beside {len(self.lists.ids)} ids")
        if np.any(~(self.of_student | self.of_teacher)):
            raise RecordError("an id is neither the student's nor the teacher's")
        if not np.all(np.isfinite(self.logprobs)) or np.any(self.logprobs > 0):
            raise RecordError("a teacher's log-probabilities must be finite and at most 0")


class DistillationMetrics(msgspec.Struct, frozen=True, tag="distillation_metrics.1"):
    """What a step learned from teachers."""

    asked: int
    """Tokens with loss of the step's rows, those of rows that were removed for want of a teacher included."""
    tokens: int
    """Tokens in the gradient, all of them with a teacher's scores; the means are only meaningful when > 0."""
    reverse_kl: float
    """Mean over these of log student - log teacher at the sampled token, the student being the trainer before the first
    step on the batch: an estimate of KL(student || teacher), which can be negative."""
    compared: float | None
    """Mean over these of the sum over the compared ids. None: only sampled tokens are compared."""
    scored_share: float
    """Share of those asked about that a teacher has scored at their own temperatures. Rows without are not trained."""
    seconds: float
    """Seconds that teachers took for the step's rows, all questions added up; they overlap."""


class TeacherScores(msgspec.Struct, frozen=True, tag="teacher_scores.1"):
    """What a teacher says of the N tokens with loss of a branch, under the distribution they were sampled from: the
    same temperature, bias and kept set, the teacher's logits."""

    teacher: str
    """Its name in the config."""
    model: str
    """Root digest (hex) of its weights, read back from the engine that scored."""
    temperature: np.ndarray
    """float32 [N]: what the teacher's logits were divided by."""
    logprobs: np.ndarray
    """float32 [N]."""
    seconds: float
    """Seconds from the first question to the last answer."""
    compared: ComparedIds | None = None
    """More ids at each token. None: only the sampled ones were scored."""

    def __post_init__(self) -> None:
        count = len(self.logprobs)
        if self.logprobs.dtype != np.float32 or self.temperature.dtype != np.float32:
            raise RecordError("a teacher's log-probabilities and temperatures are float32")
        if self.temperature.shape != (count,):
            raise RecordError(f"{len(self.temperature)} temperatures beside {count} log-probabilities of a teacher")
        if not np.all(np.isfinite(self.logprobs)) or np.any(self.logprobs > 0):
            raise RecordError("a teacher's log-probabilities must be finite and at most 0")
        if self.compared is not None and len(self.compared.lists.offsets) != count + 1:
            raise RecordError("the ids compared with a teacher must be of its tokens")

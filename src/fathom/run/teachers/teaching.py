"""Trajectories with what their teachers say of them.

A trajectory is scored when it has ended and before it arrives in the buffer: rollout, scoring and training go on side
by side, each in processes of its own, and what waits in the buffer waits for nobody. Letters: N tokens with loss.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import final

import msgspec
import numpy as np

from fathom.config.distillation import DistillationConfig
from fathom.config.families import DistillationForm, IdSet
from fathom.core.errors import EngineError, RecordError
from fathom.core.ids import TaskId
from fathom.core.ports.engine import ScoreRequest, ScoreResult
from fathom.core.records.row import Row, rows_of
from fathom.core.records.scores import ComparedIds, IdLists, IdScores, TeacherScores
from fathom.core.records.trajectory import Graded, Trajectory
from fathom.rollout.episode import EpisodePlan
from fathom.run.history.recorder import Recorder
from fathom.run.parts import Runner
from fathom.run.teachers.assignment import asks_student
from fathom.run.teachers.teacher import ATTEMPTS, Teacher

Ask = Callable[[ScoreRequest], Awaitable[ScoreResult]]


@final
class Teaching:
    """A runner whose trajectories have been scored by their teachers.

    The question has the row's own temperatures, biases and kept sets, so that a teacher's distribution is the student's
    but for the logits. What a teacher could not answer is left out and recorded as a fault: such rows are not trained.
    """

    def __init__(
        self,
        runner: Runner,
        config: DistillationConfig,
        teachers: Mapping[str, Teacher],
        by_task: Mapping[TaskId, str],
        ask_student: Ask,
        recorder: Recorder,
        *,
        vocab_size: int,
    ) -> None:
        """`by_task` names every task's teacher. `ask_student` scores by an engine of the policy, whatever version it
        serves: its likeliest ids are those of the policy when the trajectory has ended."""
        self._runner = runner
        self._config = config
        self._teachers = teachers
        self._by_task = by_task
        self._ask_student = ask_student
        self._recorder = recorder
        self._vocab_size = vocab_size

    async def run(self, plan: EpisodePlan) -> Trajectory:
        """Play one and have it scored. Raises what ends the run: a teacher that cannot be brought back, too."""
        ended = await self._runner.run(plan)
        if not isinstance(ended.header.reward, Graded):
            return ended  # it will not be trained
        teacher = self._teachers[self._by_task[ended.header.task]]
        branches = list(ended.payload.branches)
        for row in rows_of(ended):
            try:
                scores = await self._scores(teacher, row)
            except (EngineError, RecordError) as error:
                self._recorder.fault(teacher.engine, error)
                continue
            branches[row.branch] = msgspec.structs.replace(branches[row.branch], teacher=scores)
        return msgspec.structs.replace(ended, payload=msgspec.structs.replace(ended.payload, branches=tuple(branches)))

    async def _scores(self, teacher: Teacher, row: Row) -> TeacherScores:
        began, name = time.monotonic(), f"{row.trajectory}/{row.branch}"
        others = await self._of_student(row, name)
        plain = question(row, f"teacher/{teacher.name}/{name}")
        request = msgspec.structs.replace(plain, top=self._of_teacher(), others=others)
        result = await teacher.score(request)
        compared = None
        if self._config.form is not DistillationForm.SAMPLED_TOKEN:
            compared = merged(others, result.others, result.top, len(row.positions))
        return TeacherScores(
            teacher=teacher.name,
            model=result.version.digest,
            temperature=request.temperature,
            logprobs=result.logprobs,
            seconds=time.monotonic() - began,
            compared=compared,
        )

    def _of_teacher(self) -> int:
        """How many of its likeliest ids a teacher is asked for."""
        match self._config.form:
            case DistillationForm.SAMPLED_TOKEN:
                return 0
            case DistillationForm.FULL_VOCABULARY:
                return self._vocab_size
            case DistillationForm.TOP_K:
                return 0 if self._config.set is IdSet.ONLY_STUDENT else self._config.top_k

    async def _of_student(self, row: Row, name: str) -> IdLists | None:
        """The student's likeliest ids. None: they are not compared."""
        if not asks_student(self._config):
            return None
        for attempt in range(1, ATTEMPTS + 1):
            plain = question(row, f"student/{name}/{attempt}")
            try:
                top = (await self._ask_student(msgspec.structs.replace(plain, top=self._config.top_k))).top
            except EngineError:
                if attempt == ATTEMPTS:
                    raise
                continue
            if top is None:
                raise RecordError("an engine that was asked for the likeliest ids named none")
            return top.lists
        raise AssertionError("the last attempt returns or raises")


def question(row: Row, request_id: str) -> ScoreRequest:
    """What was sampled, under the distribution that it was sampled from."""
    return ScoreRequest(
        request_id=request_id,
        token_ids=row.token_ids,
        positions=row.positions,
        temperature=row.temperature,
        kept=row.kept,
        bias=row.bias,
    )


_SPAN = 1 << 32
"""More than any id."""


def merged(
    of_student: IdLists | None, logprobs: np.ndarray | None, of_teacher: IdScores | None, count: int
) -> ComparedIds:
    """The ids of both at each of N places, each once.

    Args:
        of_student: the student's. None: not compared.
        logprobs: float32 [K], the teacher's of these.
        of_teacher: the teacher's, with its log-probabilities. None: not compared.
        count: N.

    Raises:
        RecordError: ids and log-probabilities do not belong together.
    """
    student, student_logprobs = _keys(of_student, logprobs, count)
    teacher, teacher_logprobs = _keys(
        of_teacher.lists if of_teacher is not None else None,
        of_teacher.logprobs if of_teacher is not None else None,
        count,
    )
    keys = np.union1d(student, teacher)
    found = np.empty(len(keys), np.float32)
    found[np.searchsorted(keys, teacher)] = teacher_logprobs
    found[np.searchsorted(keys, student)] = student_logprobs
    offsets = np.searchsorted(keys, np.arange(count + 1) * _SPAN).astype(np.int64)
    return ComparedIds(
        lists=IdLists(offsets=offsets, ids=(keys % _SPAN).astype(np.int32)),
        logprobs=found,
        of_student=np.isin(keys, student),
        of_teacher=np.isin(keys, teacher),
    )


def _keys(lists: IdLists | None, logprobs: np.ndarray | None, count: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [K] ids made different from place to place, ascending, and their float32 [K] log-probabilities."""
    if lists is None:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    lists.check(count)
    if logprobs is None or logprobs.shape != lists.ids.shape:
        raise RecordError("a teacher did not score every id that it was asked about")
    return lists.places * _SPAN + lists.ids, logprobs

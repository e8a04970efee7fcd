"""Rows with what their teachers say: which of them can be distilled, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch

from fathom.config.distillation import DistillationConfig
from fathom.config.families import DistillationForm
from fathom.core.records.row import Row
from fathom.core.records.scores import DistillationMetrics
from fathom.core.records.step import RowOutcome, StepOutcome
from fathom.trainer.loop.candidate import Candidate
from fathom.trainer.objective.distillation import ComparedTokens, TaughtTokens
from fathom.trainer.objective.objective import LossSums
from fathom.trainer.objective.plan import IN_GRADIENT


def is_taught(row: Row, config: DistillationConfig) -> bool:
    """Whether a teacher has scored the row's tokens, at their own temperatures, in the form that is asked for."""
    scores = row.teacher
    return (
        scores is not None
        and np.array_equal(scores.temperature, row.temperature)
        and (scores.compared is None) == (config.form is DistillationForm.SAMPLED_TOKEN)
    )


def with_teachers(config: DistillationConfig | None, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Mark rows that no teacher has scored, and take the task's reward out where it is not trained on."""
    if config is None:
        return list(candidates)
    return [_with_teacher(config, candidate) for candidate in candidates]


def _with_teacher(config: DistillationConfig, candidate: Candidate) -> Candidate:
    marked = replace(candidate, taught=is_taught(candidate.row, config))
    return marked if config.task_reward else replace(marked, advantage=0.0, advantages=None)


def taught_tokens(config: DistillationConfig | None, rows: Sequence[Row]) -> TaughtTokens | None:
    """What teachers say of the tokens of rows that are all taught, end to end. None: there are no teachers."""
    if config is None:
        return None
    scores = [row.teacher for row in rows if row.teacher is not None]
    assert len(scores) == len(rows), "rows without a teacher were removed"
    compared = [each.compared for each in scores if each.compared is not None]
    return TaughtTokens(
        config=config,
        logp_teacher=torch.from_numpy(np.concatenate([each.logprobs for each in scores])),
        compared=ComparedTokens(
            offsets=torch.from_numpy(_joined_offsets([each.lists.offsets for each in compared])),
            logp_teacher=torch.from_numpy(np.concatenate([each.logprobs for each in compared])),
            of_student=torch.from_numpy(np.concatenate([each.of_student for each in compared])),
            of_teacher=torch.from_numpy(np.concatenate([each.of_teacher for each in compared])),
        )
        if compared
        else None,
    )


def _joined_offsets(parts: Sequence[np.ndarray]) -> np.ndarray:
    widths = np.concatenate([np.diff(part) for part in parts])
    return np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)


def with_distillation(
    config: DistillationConfig | None, candidates: Sequence[Candidate], sums: LossSums, outcome: StepOutcome
) -> StepOutcome:
    """The record of a step over these rows, with what was learned from teachers. Without teachers, as it is."""
    if config is None:
        return outcome
    rows = outcome.rows
    if config.form is DistillationForm.SAMPLED_TOKEN:
        rows = tuple(_as_trained(config, *each) for each in zip(candidates, rows, strict=True))
    return msgspec.structs.replace(outcome, distillation=_metrics(config, candidates, sums), rows=rows)


def _as_trained(config: DistillationConfig, candidate: Candidate, row: RowOutcome) -> RowOutcome:
    """With the advantages that the loss has seen: of tokens in the gradient, those of the teacher included."""
    trained = row.mask_codes == IN_GRADIENT
    scores = candidate.row.teacher
    if scores is None or not trained.any():
        return row
    advantages = np.array(candidate.token_advantages, np.float32)
    taken_off = config.coefficient * (row.trainer_logprobs[trained] - scores.logprobs[trained])
    advantages[trained] -= taken_off.astype(np.float32)
    return msgspec.structs.replace(row, advantages=advantages, advantage=float(advantages.mean(dtype=np.float64)))


def _metrics(config: DistillationConfig, candidates: Sequence[Candidate], sums: LossSums) -> DistillationMetrics:
    asked = sum(candidate.num_loss_tokens for candidate in candidates)
    scored = sum(candidate.num_loss_tokens for candidate in candidates if candidate.taught)
    tokens = max(1, sums.tokens)
    return DistillationMetrics(
        asked=asked,
        tokens=sums.tokens,
        reverse_kl=sums.reverse_kl / tokens,
        compared=None if config.form is DistillationForm.SAMPLED_TOKEN else sums.compared / tokens,
        scored_share=scored / asked if asked else 0.0,
        seconds=sum(each.row.teacher.seconds for each in candidates if each.row.teacher is not None),
    )

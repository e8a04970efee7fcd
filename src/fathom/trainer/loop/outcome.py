"""From what a step tallied to the record of the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fathom.core.records.step import MaskReason, Mismatch, MismatchSlice, RowOutcome, StepMetrics, StepOutcome
from fathom.trainer.backends.port import Update
from fathom.trainer.loop.candidate import Candidate
from fathom.trainer.loop.tally import Tally
from fathom.trainer.objective.mismatch import measure_by_age, measure_mismatch
from fathom.trainer.objective.plan import MASK_CODES


def step_outcome(
    *,
    version: int,
    candidates: Sequence[Candidate],
    fresh: Sequence[Candidate],
    tally: Tally,
    update: Update | None,
    has_reference: bool,
    step_s: float,
) -> StepOutcome:
    """The record of the step from `version` on.

    Args:
        version: version before the step.
        candidates: all rows of the step, in batch order.
        fresh: those within the bounds, in the same order; `tally` has their tokens.
        tally: what was reported of them.
        update: what the backend did. None: it was not asked, for want of a token in the gradient.
        has_reference: a KL to the reference was measured.
        step_s: seconds.
    """
    mismatch, slices = _mismatch(fresh, tally, version)
    return StepOutcome(
        number=version + 1,
        stepped=update is not None and update.applied,
        why_not=_why_not(candidates, fresh, tally, update),
        metrics=_metrics(fresh, tally, update, has_reference, step_s),
        mismatch=mismatch,
        slices=slices,
        rows=_row_outcomes(candidates, fresh, tally),
    )


def _mismatch(
    fresh: Sequence[Candidate], tally: Tally, version: int
) -> tuple[Mismatch | None, tuple[MismatchSlice, ...]]:
    if not fresh:
        return None, ()
    log_ratio = tally.trainer_logprobs - np.concatenate([candidate.row.logprobs for candidate in fresh])
    ages = version - np.concatenate([candidate.row.policy_version for candidate in fresh])
    kv_ages = version - np.concatenate([candidate.row.kv_version for candidate in fresh])
    return (
        measure_mismatch(log_ratio, tally.capped, tally.rejected),
        measure_by_age(log_ratio, tally.capped, tally.rejected, ages, kv_ages),
    )


def _why_not(candidates: Sequence[Candidate], fresh: Sequence[Candidate], tally: Tally, update: Update | None) -> str:
    if update is not None:
        return "" if update.applied else f"the gradient is not finite (norm {update.grad_norm})"
    masked = {reason.value: int((tally.mask_codes == code).sum()) for reason, code in MASK_CODES.items()}
    masked[MaskReason.AGE.value] += sum(c.num_loss_tokens for c in candidates) - sum(c.num_loss_tokens for c in fresh)
    reasons = ", ".join(f"{count} {reason}" for reason, count in masked.items() if count)
    return f"no token is in the gradient; masked: {reasons}" if candidates else "the step has no rows"


def _metrics(
    fresh: Sequence[Candidate], tally: Tally, update: Update | None, has_reference: bool, step_s: float
) -> StepMetrics:
    sums, tokens = tally.sums, max(1, tally.sums.tokens)
    return StepMetrics(
        loss=sums.loss,
        grad_norm=update.grad_norm if update is not None else 0.0,
        lr=update.lr if update is not None else 0.0,
        clip_fraction=sums.clipped / tokens,
        entropy=sums.neg_logp / tokens,
        kl=sums.kl / tokens if has_reference else None,
        log_ratios_clamped=sums.log_ratios_clamped,
        non_finite_tokens=sums.non_finite,
        tokens=sums.tokens,
        rows=len(fresh),
        forward_tokens=sum(candidate.length for candidate in fresh),
        step_s=step_s,
    )


def _row_outcomes(candidates: Sequence[Candidate], fresh: Sequence[Candidate], tally: Tally) -> tuple[RowOutcome, ...]:
    ends = np.cumsum([candidate.num_loss_tokens for candidate in fresh])
    places = {
        id(candidate): slice(end - candidate.num_loss_tokens, end)
        for candidate, end in zip(fresh, ends.tolist(), strict=True)
    }
    return tuple(_row_outcome(candidate, tally, places.get(id(candidate))) for candidate in candidates)


def _row_outcome(candidate: Candidate, tally: Tally, place: slice | None) -> RowOutcome:
    """`place` is where the tally has the row's tokens. None: it was removed for age."""
    tokens = candidate.num_loss_tokens
    if place is None:
        unknown = np.full(tokens, np.nan, np.float32)
        logprobs = candidate.old_logprobs if candidate.old_logprobs is not None else unknown
        weights, codes = np.zeros(tokens, np.float32), np.full(tokens, MASK_CODES[MaskReason.AGE], np.int8)
    else:
        logprobs, weights, codes = tally.trainer_logprobs[place], tally.weights[place], tally.mask_codes[place]
    return RowOutcome(
        trajectory=candidate.row.trajectory,
        branch=candidate.row.branch,
        positions=candidate.row.positions,
        trainer_logprobs=logprobs,
        weights=weights,
        mask_codes=codes,
        advantage=candidate.advantage,
    )

"""From what a step tallied to the record of the step. Letters: N tokens with loss."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from fathom.config.objective import ObjectiveConfig
from fathom.config.objectives.declaration import RecordField
from fathom.core.records.step import Mismatch, MismatchSlice, RowOutcome, StepMetrics, StepOutcome
from fathom.trainer.backends.port import Update
from fathom.trainer.loop.candidate import Candidate
from fathom.trainer.loop.tally import Tally
from fathom.trainer.objective.mismatch import measure_by_age, measure_mismatch
from fathom.trainer.objective.plan import MASK_CODES


def step_outcome(
    *,
    version: int,
    candidates: Sequence[Candidate],
    tally: Tally,
    update: Update | None,
    critic_update: Update | None,
    objective: ObjectiveConfig,
    reference: str | None,
    step_s: float,
) -> StepOutcome:
    """The record of the step from `version` on.

    Args:
        version: version before the step.
        candidates: the rows of the step, in batch order.
        tally: what was reported of their tokens.
        update: what the backend did. None: it was not asked, for want of a token in the gradient.
        critic_update: what the critic did. None: there is none, or it was not asked.
        objective: which numbers were measured.
        reference: digest of the KL reference that was used. None: none was.
        step_s: seconds.
    """
    mismatch, slices = _mismatch(candidates, tally, version)
    trained = _trained(candidates, tally)
    return StepOutcome(
        number=version + 1,
        stepped=update is not None and update.applied,
        why_not=_why_not(tally, update),
        metrics=_with_critic(_metrics(trained, tally, update, objective, step_s), tally, critic_update, objective),
        mismatch=mismatch,
        slices=slices,
        routes=tally.routes.metrics([candidate.row for candidate in trained]),
        rows=tuple(
            RowOutcome(
                trajectory=candidate.row.trajectory,
                branch=candidate.row.branch,
                positions=candidate.row.positions,
                trainer_logprobs=tally.trainer_logprobs[place],
                weights=tally.weights[place],
                mask_codes=tally.mask_codes[place],
                advantage=_advantage(candidate),
                route_changes=_route_changes(tally.route_changes[place]),
                advantages=candidate.advantages,
                reference_logprobs=tally.reference_logprobs[place] if tally.reference_logprobs is not None else None,
            )
            for candidate, place in zip(candidates, tally.places, strict=True)
        ),
        reference=reference,
    )


def _trained(candidates: Sequence[Candidate], tally: Tally) -> list[Candidate]:
    """Those that were not removed before any forward."""
    removed = tally.untrained
    return [candidate for candidate, place in zip(candidates, tally.places, strict=True) if not removed[place][0]]


def _advantage(candidate: Candidate) -> float:
    return candidate.advantage if candidate.advantages is None else float(candidate.advantages.mean(dtype=np.float64))


def _route_changes(changes: np.ndarray) -> np.ndarray | None:
    return None if np.any(changes < 0) else changes


def _mismatch(
    candidates: Sequence[Candidate], tally: Tally, version: int
) -> tuple[Mismatch | None, tuple[MismatchSlice, ...]]:
    """Over the tokens of the rows that were not removed, whatever the correction did with them."""
    if not candidates:
        return None, ()
    here = ~tally.untrained
    behaviour, policy_version, kv_version = (
        np.concatenate(columns)[here]
        for columns in zip(*((c.row.logprobs, c.row.policy_version, c.row.kv_version) for c in candidates), strict=True)
    )
    log_ratio, capped, rejected = tally.trainer_logprobs[here] - behaviour, tally.capped[here], tally.rejected[here]
    return (
        measure_mismatch(log_ratio, capped, rejected),
        measure_by_age(log_ratio, capped, rejected, version - policy_version, version - kv_version),
    )


def _why_not(tally: Tally, update: Update | None) -> str:
    if update is not None:
        return "" if update.applied else f"the gradient is not finite (norm {update.grad_norm})"
    counts = {reason: int((tally.mask_codes == code).sum()) for reason, code in MASK_CODES.items()}
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
    return f"no token is in the gradient; masked: {reasons}" if reasons else "the step has no rows"


def _metrics(
    trained: Sequence[Candidate], tally: Tally, update: Update | None, objective: ObjectiveConfig, step_s: float
) -> StepMetrics:
    sums, tokens = tally.sums, max(1, tally.sums.tokens)
    return StepMetrics(
        loss=sums.loss,
        grad_norm=update.grad_norm if update is not None else 0.0,
        lr=update.lr if update is not None else 0.0,
        clip_fraction=sums.clipped / tokens,
        entropy=sums.neg_logp / tokens,
        kl=sums.kl / tokens if objective.reference else None,
        log_ratios_clamped=sums.log_ratios_clamped,
        non_finite_tokens=sums.non_finite,
        tokens=sums.tokens,
        rows=len(trained),
        forward_tokens=sum(candidate.length for candidate in trained),
        step_s=step_s,
        vocabulary_entropy=sums.entropy / tokens if objective.entropy_coefficient > 0 else None,
    )


def _with_critic(metrics: StepMetrics, tally: Tally, update: Update | None, objective: ObjectiveConfig) -> StepMetrics:
    if RecordField.VALUES not in objective.declaration.needs:
        return metrics
    sums = tally.value_sums
    return msgspec.structs.replace(
        metrics,
        value_loss=sums.loss,
        value_clip_fraction=sums.clipped / max(1, sums.tokens),
        explained_variance=sums.explained_variance,
        critic_grad_norm=update.grad_norm if update is not None else None,
        non_finite_tokens=metrics.non_finite_tokens + sums.non_finite,
    )

"""Weights for tokens of another distribution (`algorithms.md` C.1, C.4, C.5). Letters: N tokens, B trajectories.

Everything here sees only tokens with a finite log ratio d = log trainer - log behaviour, and all of them: sequence
forms and the normalisation need the whole optimizer step. Weights are constants; nothing here has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch

from fathom.config.families import Correction, RejectionDenominator
from fathom.config.objective import ObjectiveConfig
from fathom.trainer.objective.policy_loss import bounded_ratio

SMALLEST_MEAN_WEIGHT = 1e-8
"""Weights with a smaller mean are not normalised."""
SEQUENCE_FORMS = frozenset({Correction.SEQUENCE_TIS, Correction.SEQUENCE_MIS, Correction.GEOMETRIC_RS})
"""Corrections by the ratio of a whole trajectory: all its tokens share one weight."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What a correction looks at."""

    log_ratio: torch.Tensor
    """[N], finite, detached: d."""
    sequence: torch.Tensor
    """Int64 [N]: the trajectory of each token, in [0, B)."""
    sequences: int
    """B."""

    def sequence_sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[B] sums of d and [B] token counts. A trajectory without tokens has 0 and 0."""
        sums = self.log_ratio.new_zeros(self.sequences).index_add(0, self.sequence, self.log_ratio)
        return sums, torch.bincount(self.sequence, minlength=self.sequences)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """What a correction makes of the tokens. A token is in the gradient unless popped or vetoed."""

    weights: torch.Tensor
    """[N]: factor of the token's loss; 0 where popped or vetoed."""
    capped: torch.Tensor
    """Bool [N]: the weight is a bound instead of the ratio."""
    popped: torch.Tensor
    """Bool [N]: rejected for the token's own ratio."""
    vetoed: torch.Tensor
    """Bool [N]: rejected with its whole trajectory."""


def _weighting(
    weights: torch.Tensor,
    *,
    capped: torch.Tensor | None = None,
    popped: torch.Tensor | None = None,
    vetoed: torch.Tensor | None = None,
) -> Weighting:
    nowhere = torch.zeros_like(weights, dtype=torch.bool)
    popped = nowhere if popped is None else popped
    vetoed = nowhere if vetoed is None else vetoed
    return Weighting(
        weights=weights.masked_fill(popped | vetoed, 0),
        capped=nowhere if capped is None else capped,
        popped=popped,
        vetoed=vetoed,
    )


def _outside(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (ratio < low) | (ratio > high)


def none(tokens: SampledTokens, low: float, high: float) -> Weighting:
    """Weight 1."""
    return _weighting(torch.ones_like(tokens.log_ratio))


def token_tis(tokens: SampledTokens, low: float, high: float) -> Weighting:
    """Truncated importance sampling: clamp(r, low, high)."""
    ratio = bounded_ratio(tokens.log_ratio)
    return _weighting(ratio.clamp(low, high), capped=_outside(ratio, low, high))


def icepop(tokens: SampledTokens, low: float, high: float) -> Weighting:
    """r where low <= r <= high, else the token is popped. arXiv 2510.18855."""
    ratio = bounded_ratio(tokens.log_ratio)
    return _weighting(ratio, popped=_outside(ratio, low, high))


def sequence_tis(tokens: SampledTokens, low: float, high: float) -> Weighting:
    """min(exp(sum of d), high) for all tokens of the trajectory."""
    sums, _ = tokens.sequence_sums()
    ratio = bounded_ratio(sums)[tokens.sequence]
    return _weighting(ratio.clamp(max=high), capped=ratio > high)


def sequence_mis(tokens: SampledTokens, low: float, high: float) -> Weighting:
    """exp(sum of d) where it is in [low, high], else the trajectory is dropped."""
    sums, _ = tokens.sequence_sums()
    ratio = bounded_ratio(sums)[tokens.sequence]
    return _weighting(ratio, vetoed=_outside(ratio, low, high))


def geometric_rs(tokens: SampledTokens, low: float, high: float) -> Weighting:
    """Weight 1; the trajectory is dropped unless exp(mean of d) is in [low, high]. A gate: no importance weight."""
    sums, counts = tokens.sequence_sums()
    ratio = bounded_ratio(sums / counts.clamp(min=1))[tokens.sequence]
    return _weighting(torch.ones_like(ratio), vetoed=_outside(ratio, low, high))


CORRECTIONS: dict[Correction, Callable[[SampledTokens, float, float], Weighting]] = {
    Correction.NONE: none,
    Correction.TOKEN_TIS: token_tis,
    Correction.ICEPOP: icepop,
    Correction.SEQUENCE_TIS: sequence_tis,
    Correction.SEQUENCE_MIS: sequence_mis,
    Correction.GEOMETRIC_RS: geometric_rs,
}


def vetoed_by(tokens: SampledTokens, threshold: float) -> torch.Tensor:
    """Bool [N]: tokens of the trajectories in which any token has log r < log threshold."""
    catastrophic = tokens.log_ratio < math.log(threshold)
    vetoed = torch.bincount(tokens.sequence[catastrophic], minlength=tokens.sequences) > 0
    return vetoed[tokens.sequence]


def mean_weight(weights: torch.Tensor, tokens: SampledTokens, counted: torch.Tensor, by_sequence: bool) -> float:
    """Mean weight over the tokens that count or, `by_sequence`, over the trajectories that have such tokens."""
    share = counted.to(torch.float64)
    if by_sequence:
        counts = torch.bincount(tokens.sequence[counted], minlength=tokens.sequences)
        share = share / counts.clamp(min=1)[tokens.sequence]
    total = float(share.sum())
    return float((weights * share).sum()) / total if total else 0.0


def weigh(config: ObjectiveConfig, tokens: SampledTokens) -> Weighting:
    """The configured correction, then the veto, then the normalisation.

    The mean weight is taken over what the loss's denominator counts, all tokens or the kept ones: with token weights
    and the token mean, the normalised loss is then sum(w l) / sum(w) under either convention.
    """
    weighting = CORRECTIONS[config.correction](tokens, config.correction_low, config.correction_high)
    if config.veto is not None:
        vetoed = weighting.vetoed | vetoed_by(tokens, config.veto)
        weighting = replace(weighting, weights=weighting.weights.masked_fill(vetoed, 0), vetoed=vetoed)
    if config.batch_normalise:
        rejected = weighting.popped | weighting.vetoed
        everything = config.rejection_denominator is RejectionDenominator.ALL
        counted = torch.ones_like(rejected) if everything else ~rejected
        mean = mean_weight(weighting.weights, tokens, counted, config.correction in SEQUENCE_FORMS)
        if mean > SMALLEST_MEAN_WEIGHT:
            weighting = replace(weighting, weights=weighting.weights / mean)
    return weighting

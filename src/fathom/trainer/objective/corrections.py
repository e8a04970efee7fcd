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
from fathom.trainer.objective.policy_loss import LOG_RATIO_LIMIT, bounded_ratio

SMALLEST_MEAN_WEIGHT = 1e-8
"""Weights with a smaller mean are not normalised."""
SEQUENCE_FORMS = frozenset(
    {
        Correction.SEQUENCE_TIS,
        Correction.SEQUENCE_MIS,
        Correction.GEOMETRIC_RS,
        Correction.K2_RS,
        Correction.K3_RS,
    }
)
"""Corrections by a whole trajectory: all its tokens share one weight."""
LARGEST_PROBABILITY = 1 - 1e-7
"""Probabilities are at most this where 1 - p is divided by or taken the logarithm of."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What a correction looks at."""

    log_ratio: torch.Tensor
    """[N], finite, detached: d."""
    logp_behaviour: torch.Tensor
    """[N], finite: the behaviour's half of d."""
    sequence: torch.Tensor
    """Int64 [N]: the trajectory of each token, in [0, B)."""
    sequences: int
    """B."""

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [B]: sums of [N] values over trajectories; 0 for one without tokens."""
        sums = torch.zeros(self.sequences, dtype=torch.float64, device=values.device)
        return sums.index_add(0, self.sequence, values.to(torch.float64))

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """float64 [B]: the same, means."""
        counts = torch.bincount(self.sequence, minlength=self.sequences)
        return self.sequence_sums(values) / counts.clamp(min=1)


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
    ratio = bounded_ratio(tokens.sequence_sums(tokens.log_ratio))[tokens.sequence].to(tokens.log_ratio.dtype)
    return _weighting(ratio.clamp(max=high), capped=ratio > high)


def sequence_mis(tokens: SampledTokens, low: float, high: float) -> Weighting:
    """exp(sum of d) where it is in [low, high], else the trajectory is dropped."""
    ratio = bounded_ratio(tokens.sequence_sums(tokens.log_ratio))[tokens.sequence].to(tokens.log_ratio.dtype)
    return _weighting(ratio, vetoed=_outside(ratio, low, high))


def geometric_rs(tokens: SampledTokens, low: float, high: float) -> Weighting:
    """Weight 1; the trajectory is dropped unless exp(mean of d) is in [low, high]. A gate: no importance weight."""
    ratio = bounded_ratio(tokens.sequence_means(tokens.log_ratio))[tokens.sequence]
    return _weighting(torch.ones_like(tokens.log_ratio), vetoed=_outside(ratio, low, high))


def token_rs(tokens: SampledTokens, low: float, high: float) -> Weighting:
    """Weight 1 where low <= r <= high, else the token is popped. A gate: no importance weight."""
    ratio = bounded_ratio(tokens.log_ratio)
    return _weighting(torch.ones_like(ratio), popped=_outside(ratio, low, high))


def k2_rs(tokens: SampledTokens, low: float, high: float) -> Weighting:
    """Weight 1; the trajectory is dropped when the mean of d^2 / 2 over its tokens is above `high`."""
    divergence = tokens.sequence_means(tokens.log_ratio.square() / 2)[tokens.sequence]
    return _weighting(torch.ones_like(tokens.log_ratio), vetoed=divergence > high)


def k3_rs(tokens: SampledTokens, low: float, high: float) -> Weighting:
    """Weight 1; the trajectory is dropped when the mean of e^d - 1 - d over its tokens is above `high`."""
    bounded = tokens.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    divergence = tokens.sequence_means(torch.expm1(bounded) - bounded)[tokens.sequence]
    return _weighting(torch.ones_like(tokens.log_ratio), vetoed=divergence > high)


def binary_kl(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    """[N]: KL of two coins that show the token with probability p and q; finite for all finite log-probabilities."""
    p, q = (x.exp().clamp(max=LARGEST_PROBABILITY) for x in (logp, logq))
    return p * (logp - logq) + (1 - p) * (torch.log1p(-p) - torch.log1p(-q))


def kpop(tokens: SampledTokens, low: float, high: float) -> Weighting:
    """Weight 1; the token is popped when the larger of both binary KLs, trainer and behaviour, is above `high`."""
    behaviour = tokens.logp_behaviour
    trainer = behaviour + tokens.log_ratio
    divergence = torch.maximum(binary_kl(trainer, behaviour), binary_kl(behaviour, trainer))
    return _weighting(torch.ones_like(tokens.log_ratio), popped=divergence > high)


CORRECTIONS: dict[Correction, Callable[[SampledTokens, float, float], Weighting]] = {
    Correction.NONE: none,
    Correction.TOKEN_TIS: token_tis,
    Correction.ICEPOP: icepop,
    Correction.SEQUENCE_TIS: sequence_tis,
    Correction.SEQUENCE_MIS: sequence_mis,
    Correction.GEOMETRIC_RS: geometric_rs,
    Correction.TOKEN_RS: token_rs,
    Correction.K2_RS: k2_rs,
    Correction.K3_RS: k3_rs,
    Correction.KPOP: kpop,
}


def vetoed_by(tokens: SampledTokens, threshold: float) -> torch.Tensor:
    """Bool [N]: tokens of the trajectories in which any token has log r < log threshold."""
    catastrophic = tokens.log_ratio < math.log(threshold)
    vetoed = torch.bincount(tokens.sequence[catastrophic], minlength=tokens.sequences) > 0
    return vetoed[tokens.sequence]


def off_policy_mask(
    log_ratio: torch.Tensor, advantage: torch.Tensor, sequence: torch.Tensor, sequences: int, threshold: float
) -> torch.Tensor:
    """Bool [N]: tokens of trajectories whose mean advantage is negative and whose mean of `log_ratio` is above this.

    `log_ratio`, [N]: log behaviour - log policy, of the policy before the step. DeepSeek-V3.2, `algorithms.md` C.1.
    """

    def means(values: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(sequences, dtype=torch.float64, device=values.device)
        counts = torch.bincount(sequence, minlength=sequences).clamp(min=1)
        return sums.index_add(0, sequence, values.to(torch.float64)) / counts

    return ((means(advantage) < 0) & (means(log_ratio) > threshold))[sequence]


def mean_weight(weights: torch.Tensor, tokens: SampledTokens, counted: torch.Tensor, by_sequence: bool) -> float:
    """Mean weight over the tokens that count or, `by_sequence`, over the trajectories that have such tokens."""
    share = counted.to(torch.float64)
    if by_sequence:
        counts = torch.bincount(tokens.sequence[counted], minlength=tokens.sequences)
        share = share / counts.clamp(min=1)[tokens.sequence]
    total = float(share.sum())
    return float((weights * share).sum()) / total if total else 0.0


def weigh(config: ObjectiveConfig, tokens: SampledTokens, off_policy: torch.Tensor | None = None) -> Weighting:
    """The configured correction, then the vetoes, then the normalisation.

    `off_policy`, bool [N]: tokens of trajectories that `off_policy_mask` drops. None: it is off.

    The mean weight is taken over what the loss's denominator counts, all tokens or the kept ones: with token weights
    and the token mean, the normalised loss is then sum(w l) / sum(w) under either convention.
    """
    weighting = CORRECTIONS[config.correction](tokens, config.correction_low, config.correction_high)
    if config.veto is not None:
        vetoed = weighting.vetoed | vetoed_by(tokens, config.veto)
        weighting = replace(weighting, weights=weighting.weights.masked_fill(vetoed, 0), vetoed=vetoed)
    if off_policy is not None:
        vetoed = weighting.vetoed | off_policy
        weighting = replace(weighting, weights=weighting.weights.masked_fill(vetoed, 0), vetoed=vetoed)
    if config.batch_normalise:
        rejected = weighting.popped | weighting.vetoed
        everything = config.rejection_denominator is RejectionDenominator.ALL
        counted = torch.ones_like(rejected) if everything else ~rejected
        mean = mean_weight(weighting.weights, tokens, counted, config.correction in SEQUENCE_FORMS)
        if mean > SMALLEST_MEAN_WEIGHT:
            weighting = replace(weighting, weights=weighting.weights / mean)
    return weighting

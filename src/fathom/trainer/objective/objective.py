"""The loss of one micro-batch, as its share of the optimizer step's loss. Letters: N tokens with loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from fathom.config.objective import ObjectiveConfig
from fathom.core.records.step import MaskReason
from fathom.trainer.objective.aggregation import AGGREGATIONS
from fathom.trainer.objective.kl import kl_loss
from fathom.trainer.objective.plan import Gate, StepPlan, gate_tokens
from fathom.trainer.objective.policy_loss import PROXIMALS, beyond_limit, clipped_policy_loss


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums and counts of some tokens. Those of the micro-batches add up to those of the step."""

    loss: float = 0.0
    """The number differentiated."""
    tokens: int = 0
    """Tokens in the gradient."""
    clipped: int = 0
    """Tokens of these whose clipped term was larger than the unclipped one."""
    kl: float = 0.0
    """Sum over these of the KL estimate, neither weighted nor scaled. 0 without a reference."""
    neg_logp: float = 0.0
    """Sum over these of -log-probability: the sample estimate of the entropy."""
    log_ratios_clamped: int = 0
    """Tokens one of whose log ratios left [-20, 20], rejected tokens included."""
    non_finite: int = 0
    """Tokens refused for a log-probability that is not finite."""

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            loss=self.loss + other.loss,
            tokens=self.tokens + other.tokens,
            clipped=self.clipped + other.clipped,
            kl=self.kl + other.kl,
            neg_logp=self.neg_logp + other.neg_logp,
            log_ratios_clamped=self.log_ratios_clamped + other.log_ratios_clamped,
            non_finite=self.non_finite + other.non_finite,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What a micro-batch contributes to its optimizer step."""

    loss: torch.Tensor
    """Scalar to call `backward` on; gradients of micro-batches are summed, never averaged."""
    sums: LossSums
    """Its numbers."""
    gate: Gate
    """What became of each of its tokens."""


def micro_batch_loss(config: ObjectiveConfig, plan: StepPlan, logp: torch.Tensor) -> LossTerms:
    """Contribution of the tokens of `plan` to the loss of the step, given their log-probabilities with gradient.

    Token loss: weight * clipped policy loss + kl_coefficient * importance * KL estimate. Tokens were sampled by the
    behaviour policy, so the KL needs an importance weight too: the correction's weight times the policy ratio, the
    latter capped at 1 + clip_high, both constants.

    Only tokens in the gradient enter any arithmetic: the others have gradient exactly 0. Without a single such token
    the loss is 0 and still part of the graph, so that `backward` works.
    """
    tokens = plan.tokens
    logp_old = logp.detach() if tokens.logp_old is None else tokens.logp_old
    gate = plan.gate if plan.gate is not None else gate_tokens(config, tokens, logp_old)
    gate = gate.refusing_non_finite(logp)

    kept = gate.in_gradient.nonzero().squeeze(1)
    kept_logp, weights = logp[kept], gate.weights[kept]
    log_ratio = kept_logp - PROXIMALS[config.proximal](logp_old, tokens.logp_behaviour)[kept]
    policy = clipped_policy_loss(
        log_ratio,
        tokens.advantage[kept],
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    token_loss = weights * policy.loss
    beyond = beyond_limit(log_ratio.detach())
    kl_sum = 0.0
    if tokens.logp_ref is not None:
        logp_ref = tokens.logp_ref[kept]
        importance = weights * policy.ratio.clamp(max=1 + config.clip_high)
        kl = kl_loss(config.kl_estimator, kept_logp, logp_ref, importance)
        token_loss = token_loss + config.kl_coefficient * kl
        beyond |= beyond_limit(kept_logp.detach() - logp_ref)
        kl_sum = float(kl_loss(config.kl_estimator, kept_logp.detach(), logp_ref).sum())

    coefficients = AGGREGATIONS[config.aggregation](plan.denominators, tokens.sequence[kept], config.constant_length)
    loss = (coefficients.to(token_loss.dtype) * token_loss).sum()
    return LossTerms(
        loss=loss,
        gate=gate,
        sums=LossSums(
            loss=float(loss.detach()),
            tokens=len(kept),
            clipped=int(policy.clipped.sum()),
            kl=kl_sum,
            neg_logp=-float(kept_logp.detach().sum()),
            log_ratios_clamped=int(gate.clamped.index_put((kept,), gate.clamped[kept] | beyond).sum()),
            non_finite=int(gate.masked_for(MaskReason.NON_FINITE).sum()),
        ),
    )

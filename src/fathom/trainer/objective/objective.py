"""The loss of one micro-batch, as its share of the optimizer step's loss. Letters: N tokens with loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from fathom.config.families import KlPlacement
from fathom.config.objective import ObjectiveConfig
from fathom.core.records.step import MaskReason
from fathom.trainer.objective.aggregation import AGGREGATIONS
from fathom.trainer.objective.distillation import reverse_kl
from fathom.trainer.objective.kl import kl_loss
from fathom.trainer.objective.outputs import TokenOutputs
from fathom.trainer.objective.plan import Gate, StepPlan, StepTokens, gate_tokens, proximal_logprobs
from fathom.trainer.objective.policy_loss import POLICY_LOSSES, PolicyTokens, beyond_limit


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums and counts of some tokens. Those of the micro-batches add up to those of the step."""

    loss: float = 0.0
    """The number differentiated."""
    tokens: int = 0
    """Tokens in the gradient."""
    clipped: int = 0
    """Tokens of these for which a bound of the ratio decided (`PolicyLoss.clipped`)."""
    kl: float = 0.0
    """Sum over these of the KL estimate, neither weighted nor scaled. 0 without a reference."""
    neg_logp: float = 0.0
    """Sum over these of -log-probability: the sample estimate of the entropy."""
    entropy: float = 0.0
    """Sum over these of the entropy over the vocabulary. 0 where it was not asked for."""
    reverse_kl: float = 0.0
    """Sum over these of log student - log teacher at the sampled token, before the step. 0 without a teacher."""
    compared: float = 0.0
    """Sum over these of the sum over the ids compared with a teacher. 0 where none are."""
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
            entropy=self.entropy + other.entropy,
            reverse_kl=self.reverse_kl + other.reverse_kl,
            compared=self.compared + other.compared,
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


def micro_batch_loss(config: ObjectiveConfig, plan: StepPlan, outputs: TokenOutputs) -> LossTerms:
    """Contribution of the tokens of `plan` to the loss of the step, given what a forward tells of them.

    Token loss: weight * policy loss + kl_coefficient * importance * KL estimate - entropy_coefficient * entropy.
    Tokens were sampled by the behaviour policy, so the KL needs an importance weight too: the correction's weight times
    the policy ratio, the latter capped at 1 + clip_high, both constants. A KL in the reward is in the advantages.
    Sampled tokens of a teacher are in the advantages too; ids compared with one are a term of their own, without a
    weight, since the sum over them does not rest on the token that was sampled.

    Only tokens in the gradient enter any arithmetic: the others have gradient exactly 0. Without a single such token
    the loss is 0 and still part of the graph, so that `backward` works.
    """
    tokens, logp = plan.tokens, outputs.logprobs
    gate = plan.gate if plan.gate is not None else gate_tokens(config, tokens, logp.detach())
    gate = gate.refusing_non_finite(logp)
    if config.entropy_coefficient > 0:
        if outputs.entropy is None:
            raise ValueError("objective.entropy_coefficient > 0 needs the entropy: ask the backend for it")
        gate = gate.refusing_non_finite(outputs.entropy)

    if tokens.taught is not None:
        gate = gate.refusing_non_finite(tokens.taught.finite(outputs.ids))

    kept = gate.in_gradient.nonzero().squeeze(1)
    kept_logp, weights, kept_tokens = logp[kept], gate.weights[kept], tokens.take(kept)
    policy = POLICY_LOSSES[config.declaration.loss](
        config,
        PolicyTokens(
            logp=kept_logp,
            logp_proximal=proximal_logprobs(config, kept_tokens, kept_logp.detach()),
            logp_behaviour=kept_tokens.logp_behaviour,
            advantage=_advantage(kept_tokens, kept_logp.detach()),
            sequence_log_ratio=None if plan.sequence_log_ratio is None else plan.sequence_log_ratio[kept],
        ),
    )
    token_loss = weights * policy.loss
    beyond = policy.beyond
    kl_sum, entropy_sum = 0.0, 0.0
    if kept_tokens.logp_ref is not None:
        if config.kl_placement is KlPlacement.LOSS:
            importance = weights * policy.ratio.clamp(max=1 + config.clip_high)
            kl = kl_loss(config.kl_estimator, kept_logp, kept_tokens.logp_ref, importance)
            token_loss = token_loss + config.kl_coefficient * kl
        beyond = beyond | beyond_limit(kept_logp.detach() - kept_tokens.logp_ref)
        kl_sum = float(kl_loss(config.kl_estimator, kept_logp.detach(), kept_tokens.logp_ref).sum())
    if config.entropy_coefficient > 0 and outputs.entropy is not None:
        entropy = outputs.entropy[kept]
        token_loss = token_loss - config.entropy_coefficient * entropy
        entropy_sum = float(entropy.detach().sum())

    reverse_kl_sum, compared_sum = 0.0, 0.0
    if tokens.taught is not None and kept_tokens.taught is not None:
        taught = kept_tokens.taught
        reverse_kl_sum = float(reverse_kl(_logp_old(kept_tokens, kept_logp.detach()), taught.logp_teacher).sum())
        terms = tokens.taught.terms(outputs.ids, kept)
        if terms is not None:
            token_loss = token_loss + taught.config.coefficient * terms
            compared_sum = float(terms.detach().sum())

    sequence = tokens.sequence[kept]
    coefficients = AGGREGATIONS[config.aggregation](plan.denominators, sequence, config.constant_length)
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
            entropy=entropy_sum,
            reverse_kl=reverse_kl_sum,
            compared=compared_sum,
            log_ratios_clamped=int(gate.clamped.index_put((kept,), gate.clamped[kept] | beyond).sum()),
            non_finite=int(gate.masked_for(MaskReason.NON_FINITE).sum()),
        ),
    )


def _logp_old(tokens: StepTokens, logp: torch.Tensor) -> torch.Tensor:
    return logp if tokens.logp_old is None else tokens.logp_old


def _advantage(tokens: StepTokens, logp: torch.Tensor) -> torch.Tensor:
    """[N] advantages, those of a teacher included."""
    if tokens.taught is None:
        return tokens.advantage
    return tokens.taught.advantage(tokens.advantage, _logp_old(tokens, logp))

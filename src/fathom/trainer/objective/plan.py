"""What an optimizer step trains on, decided before its first micro-batch. Letters: N tokens with loss, B trajectories.

A plan covers any set of tokens: `prepare_step` makes the plan of the whole step, `StepPlan.take` that of a
micro-batch. Denominators, and weights that depend on other tokens, are those of the whole step in both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch

from fathom.config.families import RejectionDenominator
from fathom.config.objective import ObjectiveConfig
from fathom.core.records.step import MaskReason
from fathom.trainer.objective.aggregation import Denominators, count
from fathom.trainer.objective.corrections import SEQUENCE_FORMS, SampledTokens, weigh
from fathom.trainer.objective.policy_loss import beyond_limit

IN_GRADIENT = -1
"""Mask code of a token that has a gradient."""
MASK_CODES = {reason: code for code, reason in enumerate(MaskReason)}
"""Mask code of every reason, as `RowOutcome.mask_codes` records it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The tokens with loss of an optimizer step, or some of them. Floats share one dtype; nothing has a gradient."""

    sequence: torch.Tensor
    """Int64 [N]: the token's trajectory in the whole step, in [0, B); rows of one trajectory share it."""
    sequences: int
    """B of the whole step, trajectories without a token included."""
    advantage: torch.Tensor
    """[N]: advantage of its trajectory."""
    truncated: torch.Tensor
    """Bool [N]: its trajectory ended as truncated. Masked only if the config says so."""
    logp_behaviour: torch.Tensor
    """[N]: log-probability under the distribution it was sampled from."""
    logp_old: torch.Tensor | None = None
    """[N]: trainer's log-probability before the first step on the batch. None: there was no pass for it, and each
    micro-batch uses its own forward, before the step (see `needs_old_pass`)."""
    logp_ref: torch.Tensor | None = None
    """[N]: log-probability under the reference policy. None: there is none."""

    def __post_init__(self) -> None:
        columns = (self.advantage, self.truncated, self.logp_behaviour, self.logp_old, self.logp_ref)
        for column in columns:
            if column is not None and column.shape != self.sequence.shape:
                raise ValueError(f"a column of shape {tuple(column.shape)} beside {len(self.sequence)} tokens")

    def take(self, index: torch.Tensor) -> StepTokens:
        """The tokens at `index`, int64 [n]."""
        return replace(
            self,
            sequence=self.sequence[index],
            advantage=self.advantage[index],
            truncated=self.truncated[index],
            logp_behaviour=self.logp_behaviour[index],
            logp_old=None if self.logp_old is None else self.logp_old[index],
            logp_ref=None if self.logp_ref is None else self.logp_ref[index],
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Which tokens have a gradient, why the others have none, and the weight of each."""

    mask_codes: torch.Tensor
    """Int8 [N]: IN_GRADIENT, else the code of the MaskReason."""
    weights: torch.Tensor
    """[N]: correction weights; 0 for tokens without a gradient."""
    capped: torch.Tensor
    """Bool [N]: the weight is a bound instead of the ratio."""
    clamped: torch.Tensor
    """Bool [N]: the log ratio of trainer and behaviour left [-20, 20]."""

    @property
    def in_gradient(self) -> torch.Tensor:
        """Bool [N]."""
        return self.mask_codes == IN_GRADIENT

    @property
    def rejected(self) -> torch.Tensor:
        """Bool [N]: weight set to 0 by the correction, the veto or a sequence gate (`Mismatch.popped_share`)."""
        return self.masked_for(MaskReason.POPPED) | self.masked_for(MaskReason.VETO)

    def masked_for(self, reason: MaskReason) -> torch.Tensor:
        """Bool [N]: tokens masked for `reason`."""
        return self.mask_codes == MASK_CODES[reason]

    def refusing_non_finite(self, logp: torch.Tensor) -> Gate:
        """Mask what was still in the gradient and has a log-probability in `logp` that is not finite."""
        refused = self.in_gradient & ~logp.isfinite()
        return replace(
            self,
            mask_codes=self.mask_codes.masked_fill(refused, MASK_CODES[MaskReason.NON_FINITE]),
            weights=self.weights.masked_fill(refused, 0),
        )

    def take(self, index: torch.Tensor) -> Gate:
        """The gate of the tokens at `index`, int64 [n]."""
        return Gate(
            mask_codes=self.mask_codes[index],
            weights=self.weights[index],
            capped=self.capped[index],
            clamped=self.clamped[index],
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything but the forward."""

    tokens: StepTokens
    """The tokens."""
    gate: Gate | None
    """Their gate. None: each micro-batch makes it from its own forward."""
    denominators: Denominators
    """Of the whole step, whatever tokens this plan covers."""

    def take(self, index: torch.Tensor) -> StepPlan:
        """The plan of a micro-batch: the tokens at `index`, int64 [n]."""
        gate = None if self.gate is None else self.gate.take(index)
        return replace(self, tokens=self.tokens.take(index), gate=gate)


def needs_whole_step(config: ObjectiveConfig) -> bool:
    """Whether a token's weight, or a denominator, depends on the ratios of tokens in other micro-batches."""
    return (
        config.correction in SEQUENCE_FORMS
        or config.veto is not None
        or config.batch_normalise
        or config.rejection_denominator is RejectionDenominator.KEPT
    )


def needs_old_pass(config: ObjectiveConfig, steps_on_a_batch: int) -> bool:
    """Whether the batch needs a forward for `logp_old` before its first step.

    If not, each micro-batch's own forward, detached, is the same number: it runs before the only step on the batch.
    """
    return steps_on_a_batch > 1 or needs_whole_step(config)


def gate_tokens(config: ObjectiveConfig, tokens: StepTokens, logp_old: torch.Tensor) -> Gate:
    """Mask and weigh tokens by trainer against behaviour. Masked tokens enter no arithmetic.

    A token masked for several reasons has the first of: truncated, non_finite, veto, popped.
    """
    finite = logp_old.isfinite() & tokens.logp_behaviour.isfinite()
    if tokens.logp_ref is not None:
        finite &= tokens.logp_ref.isfinite()
    codes = torch.full(finite.shape, IN_GRADIENT, dtype=torch.int8, device=finite.device)
    codes[~finite] = MASK_CODES[MaskReason.NON_FINITE]
    if config.mask_truncated:
        codes[tokens.truncated] = MASK_CODES[MaskReason.TRUNCATED]

    valid = (codes == IN_GRADIENT).nonzero().squeeze(1)
    log_ratio = (logp_old[valid] - tokens.logp_behaviour[valid]).detach()
    weighting = weigh(
        config, SampledTokens(log_ratio=log_ratio, sequence=tokens.sequence[valid], sequences=tokens.sequences)
    )
    codes[valid[weighting.popped]] = MASK_CODES[MaskReason.POPPED]
    codes[valid[weighting.vetoed]] = MASK_CODES[MaskReason.VETO]
    nowhere = torch.zeros_like(finite)
    return Gate(
        mask_codes=codes,
        weights=torch.zeros_like(tokens.logp_behaviour).index_copy(0, valid, weighting.weights),
        capped=nowhere.index_copy(0, valid, weighting.capped),
        clamped=nowhere.index_copy(0, valid, beyond_limit(log_ratio)),
    )


def prepare_step(config: ObjectiveConfig, tokens: StepTokens) -> StepPlan:
    """The plan of a whole optimizer step.

    Denominators count every token that `mask_truncated` leaves (`ALL`) or only those in the gradient (`KEPT`). Under
    `ALL` a token that is not finite counts too, so that the loss does not depend on whether there was an old pass. B
    counts all trajectories under both.

    Raises:
        ValueError: an array that the config calls for is missing, or the tokens' trajectories are out of range.
    """
    if tokens.logp_old is None and needs_whole_step(config):
        raise ValueError("this objective needs logp_old for the whole step: ask needs_old_pass before the step")
    if tokens.logp_ref is None and config.kl_coefficient > 0:
        raise ValueError("objective.kl_coefficient > 0 needs logp_ref: score the rows with the reference policy")
    if len(tokens.sequence) and not 0 <= int(tokens.sequence.min()) <= int(tokens.sequence.max()) < tokens.sequences:
        raise ValueError(f"a token belongs to a trajectory outside [0, {tokens.sequences})")
    gate = None if tokens.logp_old is None else gate_tokens(config, tokens, tokens.logp_old)
    if config.rejection_denominator is RejectionDenominator.KEPT:
        assert gate is not None, "kept tokens are only known with logp_old, checked above"
        counted = gate.in_gradient
    else:
        counted = ~tokens.truncated if config.mask_truncated else torch.ones_like(tokens.truncated)
    return StepPlan(tokens=tokens, gate=gate, denominators=count(tokens.sequence, counted, tokens.sequences))

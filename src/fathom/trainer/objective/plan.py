"""What an optimizer step trains on, decided before its first micro-batch. Letters: N tokens with loss, B trajectories.

A plan covers any set of tokens: `prepare_step` makes the plan of the whole step, `StepPlan.take` that of a
micro-batch. Denominators, and weights that depend on other tokens, are those of the whole step in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import torch

from fathom.config.families import AdvantageSource, KlPlacement, PolicyLossKind, Proximal, RejectionDenominator
from fathom.config.objective import ObjectiveConfig
from fathom.config.objectives.declaration import RecordField
from fathom.core.records.step import MaskReason
from fathom.trainer.objective.aggregation import Denominators, count
from fathom.trainer.objective.corrections import SEQUENCE_FORMS, SampledTokens, off_policy_mask, weigh
from fathom.trainer.objective.distillation import TaughtTokens
from fathom.trainer.objective.policy_loss import PROXIMALS, ProximalInputs, beyond_limit

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
    """[N]: advantage of its trajectory, or its own."""
    truncated: torch.Tensor
    """Bool [N]: its trajectory ended as truncated. Masked only if the config says so."""
    logp_behaviour: torch.Tensor
    """[N]: log-probability under the distribution it was sampled from."""
    logp_old: torch.Tensor | None = None
    """[N]: trainer's log-probability before the first step on the batch. None: there was no pass for it, and each
    micro-batch uses its own forward, before the step (see `needs_old_pass`)."""
    logp_now: torch.Tensor | None = None
    """[N]: trainer's log-probability before this step, whatever micro-batch the token is in. None: there was no pass
    for it, and each micro-batch uses its own forward (see `needs_now_pass`)."""
    logp_ref: torch.Tensor | None = None
    """[N]: log-probability under the reference policy. None: there is none."""
    blend: torch.Tensor | None = None
    """[N]: how far the proximal policy is from the behaviour policy on the way to the current one
    (`loglinear_blend`). None: the proximal policy is another."""
    values: torch.Tensor | None = None
    """[N]: the critic's value before the first step on the batch. None: there is no critic."""
    returns: torch.Tensor | None = None
    """[N]: what the critic should have said. None: there is no critic."""
    taught: TaughtTokens | None = None
    """What teachers say of the tokens. None: there are no teachers."""

    def __post_init__(self) -> None:
        for column in (self.truncated, *self._figures()):
            if column.shape != self.sequence.shape:
                raise ValueError(f"a column of shape {tuple(column.shape)} beside {len(self.sequence)} tokens")

    def take(self, index: torch.Tensor) -> StepTokens:
        """The tokens at `index`, int64 [n]."""

        def taken(column: torch.Tensor | None) -> torch.Tensor | None:
            return None if column is None else column[index]

        return StepTokens(
            sequence=self.sequence[index],
            sequences=self.sequences,
            advantage=self.advantage[index],
            truncated=self.truncated[index],
            logp_behaviour=self.logp_behaviour[index],
            logp_old=taken(self.logp_old),
            logp_now=taken(self.logp_now),
            logp_ref=taken(self.logp_ref),
            blend=taken(self.blend),
            values=taken(self.values),
            returns=taken(self.returns),
            taught=None if self.taught is None else self.taught.take(index),
        )

    @property
    def finite(self) -> torch.Tensor:
        """Bool [N]: every figure of the token is a finite number."""
        found = torch.ones_like(self.truncated)
        for column in self._figures():
            found &= column.isfinite()
        return found

    def _figures(self) -> Iterator[torch.Tensor]:
        optional = (self.logp_old, self.logp_now, self.logp_ref, self.blend, self.values, self.returns)
        yield from (self.advantage, self.logp_behaviour)
        yield from (column for column in optional if column is not None)
        if self.taught is not None:
            yield self.taught.logp_teacher


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
    sequence_log_ratio: torch.Tensor | None = None
    """[N]: mean of log policy - log proximal over the tokens in the gradient of the token's trajectory, before this
    step. None: the objective has no use for it."""

    def take(self, index: torch.Tensor) -> StepPlan:
        """The plan of a micro-batch: the tokens at `index`, int64 [n]."""
        gate = None if self.gate is None else self.gate.take(index)
        ratio = None if self.sequence_log_ratio is None else self.sequence_log_ratio[index]
        return replace(self, tokens=self.tokens.take(index), gate=gate, sequence_log_ratio=ratio)


def needs_whole_step(config: ObjectiveConfig) -> bool:
    """Whether a token's weight, or a denominator, depends on the ratios of tokens in other micro-batches."""
    return (
        config.correction in SEQUENCE_FORMS
        or config.veto is not None
        or config.batch_normalise
        or config.rejection_denominator is RejectionDenominator.KEPT
        or _by_current_sequences(config)
    )


def needs_now_pass(config: ObjectiveConfig) -> bool:
    """Whether a step needs the trainer's log-probabilities of all its tokens before its first micro-batch.

    Before the first step on a batch they are `logp_old`; before a later one they take a pass of their own.
    """
    interpolated = config.proximal is Proximal.LOGLINEAR
    critic = config.declaration.advantages is AdvantageSource.CRITIC
    return _by_current_sequences(config) or (interpolated and (needs_whole_step(config) or critic))


def needs_old_pass(config: ObjectiveConfig, steps_on_a_batch: int) -> bool:
    """Whether the batch needs a forward for `logp_old` before its first step.

    If not, each micro-batch's own forward, detached, is the same number: it runs before the only step on the batch.
    """
    in_reward = config.reference and config.kl_placement is KlPlacement.REWARD
    critic = config.declaration.advantages is AdvantageSource.CRITIC
    return steps_on_a_batch > 1 or needs_whole_step(config) or in_reward or critic


def _by_current_sequences(config: ObjectiveConfig) -> bool:
    return config.declaration.loss is PolicyLossKind.SEQUENCE_CLIP or config.off_policy_mask is not None


def proximal_logprobs(config: ObjectiveConfig, tokens: StepTokens, logp_now: torch.Tensor) -> torch.Tensor:
    """[N]: what the ratio is centred on. `logp_now`, [N], detached: stands in where there was no pass."""
    inputs = ProximalInputs(
        logp_behaviour=tokens.logp_behaviour,
        logp_old=logp_now if tokens.logp_old is None else tokens.logp_old,
        logp_now=logp_now if tokens.logp_now is None else tokens.logp_now,
        blend=tokens.blend,
    )
    return PROXIMALS[config.proximal](inputs)


def gate_tokens(config: ObjectiveConfig, tokens: StepTokens, logp_now: torch.Tensor) -> Gate:
    """Mask and weigh tokens by trainer against behaviour. Masked tokens enter no arithmetic.

    The trainer's side is `logp_old`, or the proximal policy where that is interpolated; `logp_now`, [N], stands in
    where there was no pass. A token masked for several reasons has the first of: truncated, non_finite, veto, popped.
    """
    trainer = logp_now if tokens.logp_old is None else tokens.logp_old
    if config.proximal is Proximal.LOGLINEAR:
        trainer = proximal_logprobs(config, tokens, logp_now)
    finite = trainer.isfinite() & tokens.finite
    codes = torch.full(finite.shape, IN_GRADIENT, dtype=torch.int8, device=finite.device)
    codes[~finite] = MASK_CODES[MaskReason.NON_FINITE]
    if config.mask_truncated:
        codes[tokens.truncated] = MASK_CODES[MaskReason.TRUNCATED]

    valid = (codes == IN_GRADIENT).nonzero().squeeze(1)
    behaviour, sequence = tokens.logp_behaviour[valid], tokens.sequence[valid]
    log_ratio = (trainer[valid] - behaviour).detach()
    sampled = SampledTokens(
        log_ratio=log_ratio, logp_behaviour=behaviour, sequence=sequence, sequences=tokens.sequences
    )
    weighting = weigh(config, sampled, _off_policy(config, tokens, valid))
    codes[valid[weighting.popped]] = MASK_CODES[MaskReason.POPPED]
    codes[valid[weighting.vetoed]] = MASK_CODES[MaskReason.VETO]
    nowhere = torch.zeros_like(finite)
    return Gate(
        mask_codes=codes,
        weights=torch.zeros_like(tokens.logp_behaviour).index_copy(0, valid, weighting.weights),
        capped=nowhere.index_copy(0, valid, weighting.capped),
        clamped=nowhere.index_copy(0, valid, beyond_limit(log_ratio)),
    )


def _off_policy(config: ObjectiveConfig, tokens: StepTokens, valid: torch.Tensor) -> torch.Tensor | None:
    """Bool [n], of the tokens at `valid`: trajectories that `off_policy_mask` drops. None: it is off."""
    if config.off_policy_mask is None:
        return None
    assert tokens.logp_now is not None, "prepare_step requires it for this mask"
    return off_policy_mask(
        tokens.logp_behaviour[valid] - tokens.logp_now[valid],
        tokens.advantage[valid],
        tokens.sequence[valid],
        tokens.sequences,
        config.off_policy_mask,
    )


def prepare_step(config: ObjectiveConfig, tokens: StepTokens) -> StepPlan:
    """The plan of a whole optimizer step.

    Denominators count every token that `mask_truncated` leaves (`ALL`) or only those in the gradient (`KEPT`). Under
    `ALL` a token that is not finite counts too, so that the loss does not depend on whether there was an old pass. B
    counts all trajectories under both.

    Raises:
        ValueError: an array that the config calls for is missing, or the tokens' trajectories are out of range.
    """
    _require_columns(config, tokens)
    if len(tokens.sequence) and not 0 <= int(tokens.sequence.min()) <= int(tokens.sequence.max()) < tokens.sequences:
        raise ValueError(f"a token belongs to a trajectory outside [0, {tokens.sequences})")
    before = tokens.logp_now if config.proximal is Proximal.LOGLINEAR else tokens.logp_old
    gate = None if before is None else gate_tokens(config, tokens, before)
    if config.rejection_denominator is RejectionDenominator.KEPT:
        assert gate is not None, "kept tokens are only known with logp_old, checked above"
        counted = gate.in_gradient
    else:
        counted = ~tokens.truncated if config.mask_truncated else torch.ones_like(tokens.truncated)
    return StepPlan(
        tokens=tokens,
        gate=gate,
        denominators=count(tokens.sequence, counted, tokens.sequences),
        sequence_log_ratio=_sequence_log_ratio(config, tokens, gate),
    )


def _require_columns(config: ObjectiveConfig, tokens: StepTokens) -> None:
    interpolated = config.proximal is Proximal.LOGLINEAR
    if tokens.logp_old is None and needs_whole_step(config) and not interpolated:
        raise ValueError("this objective needs logp_old for the whole step: ask needs_old_pass before the step")
    if tokens.logp_now is None and needs_now_pass(config):
        raise ValueError("this objective needs logp_now for the whole step: ask needs_now_pass before the step")
    if tokens.blend is None and interpolated:
        raise ValueError("objective.proximal = 'loglinear' needs blend: the ages of the tokens (loglinear_blend)")
    if tokens.logp_ref is None and config.reference:
        raise ValueError("objective.kl_coefficient > 0 needs logp_ref: score the rows with the reference policy")
    if (tokens.values is None or tokens.returns is None) and RecordField.VALUES in config.declaration.needs:
        raise ValueError(f"objective.kind = '{config.kind}' needs values and returns: score the rows with the critic")


def _sequence_log_ratio(config: ObjectiveConfig, tokens: StepTokens, gate: Gate | None) -> torch.Tensor | None:
    """Sums are in float64, so that the order of the rows does not matter."""
    if config.declaration.loss is not PolicyLossKind.SEQUENCE_CLIP:
        return None
    assert gate is not None, "this loss needs the whole step, checked before"
    assert tokens.logp_now is not None, "the same"
    kept = gate.in_gradient.nonzero().squeeze(1)
    now, proximal = tokens.logp_now[kept], proximal_logprobs(config, tokens.take(kept), tokens.logp_now[kept])
    sequence = tokens.sequence[kept]
    sums = torch.zeros(tokens.sequences, dtype=torch.float64, device=now.device)
    sums = sums.index_add(0, sequence, now.to(torch.float64) - proximal.to(torch.float64))
    means = sums / torch.bincount(sequence, minlength=tokens.sequences).clamp(min=1)
    return means.to(now.dtype)[tokens.sequence]

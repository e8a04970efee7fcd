"""What an optimizer step trained on and what it measured. N tokens with loss of a row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from fathom.core.ids import GroupId, TrajectoryId
from fathom.core.records.row import Row
from fathom.core.records.scores import DistillationMetrics


class MaskReason(StrEnum):
    """Why a sampled token had no gradient. Order fixes the numeric code in `RowOutcome.mask_codes`."""

    VETO = "veto"
    """Its trajectory was dropped by the veto or by a sequence gate."""
    POPPED = "popped"
    """Its ratio was outside the correction's bounds."""
    TRUNCATED = "truncated"
    """Its trajectory was cut and `mask_truncated` is on."""
    NON_FINITE = "non_finite"
    """The trainer's log-probability was not a finite number."""
    AGE = "age"
    """Its row was removed because a token was over the bound at the step."""
    NOT_TRAINED = "not_trained"
    """Its trajectory ended in another state than trained; the attempts book says which."""
    NO_LOSS = "no_loss"
    """It was sampled without loss (an abandoned branch, or the environment's choice) in a trained trajectory."""
    ROUTES = "routes"
    """Its row had no complete expert routes, and they were to be replayed."""
    NO_TEACHER = "no_teacher"
    """Its row had no scores of a teacher at its own temperatures, and it was to be distilled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBatch:
    """A group as the trainer sees it."""

    group: GroupId
    """The group."""
    rewards: dict[TrajectoryId, float]
    """Reward of every graded member, those without rows included: the baseline's support."""
    truncated: frozenset[TrajectoryId]
    """Members that ended as truncated."""
    rows: tuple[Row, ...]
    """Rows to train, within the bound at this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What one or several optimizer steps train on."""

    groups: tuple[GroupBatch, ...]
    """Groups, oldest first."""


class Mismatch(msgspec.Struct, frozen=True, tag="mismatch.1"):
    """Ratio r = trainer's probability before the first step on the batch / behaviour probability, over some tokens."""

    tokens: int
    """How many; the rest is only meaningful when > 0."""
    abs_log_ratio_mean: float
    """Mean |log r|."""
    abs_log_ratio_max: float
    """Maximum |log r|."""
    k1: float
    """Mean of -log r."""
    k2: float
    """Mean of (log r)^2 / 2."""
    k3: float
    """Mean of r - 1 - log r."""
    ratio_mean: float
    """Mean r."""
    ratio_p01: float
    """1st percentile of r."""
    ratio_p50: float
    """Median of r."""
    ratio_p99: float
    """99th percentile of r."""
    ratio_max: float
    """Maximum r."""
    ess: float
    """Effective sample size of r as a share of the tokens."""
    clipped_share: float
    """Share of tokens whose correction weight was capped."""
    popped_share: float
    """Share of tokens whose correction weight was set to 0."""


class MismatchSlice(msgspec.Struct, frozen=True, tag="mismatch_slice.1"):
    """The mismatch of the tokens of one age."""

    age: int
    """Trainer's version at the step minus the token's."""
    kv_age: int
    """The same for the oldest version behind its context."""
    mismatch: Mismatch
    """Over those tokens."""


class RouteMetrics(msgspec.Struct, frozen=True, tag="route_metrics.1"):
    """Recorded expert routes beside the trainer's own choice, over the input tokens of a step, context included.

    Routes are compared as sets. Where routes are replayed, the trainer's choice in a layer is the one it would have
    made after the layers before it were forced.
    """

    tokens: int
    """Input tokens compared; the rest is only meaningful when > 0."""
    agreement: float
    """Share of tokens for which every layer agrees."""
    layer_agreement: tuple[float, ...]
    """Share of tokens that agree, layer by layer."""
    overlap: float
    """Mean share of the recorded experts that the trainer chose too."""
    forced_share: float
    """Share of tokens whose recorded experts were used."""
    mixed_share: float
    """Share of the tokens with loss before which routes were recorded under an older version than their own."""
    margin_mean: float | None
    """Mean score by which the trainer's choice was made. None: there was nothing left to choose from."""
    margin_p01: float | None
    """1st percentile of the same."""
    size_bytes: int
    """Bytes of the recorded routes of the step's rows."""
    seconds: float
    """Seconds the trainer spent on recording, comparing and replaying routes."""


class RowOutcome(msgspec.Struct, frozen=True, tag="row_outcome.1"):
    """What happened to one row at the step."""

    trajectory: TrajectoryId
    """The trajectory."""
    branch: int
    """Its branch."""
    positions: np.ndarray
    """int64 [N]: tokens with loss."""
    trainer_logprobs: np.ndarray
    """float32 [N]: trainer's log-probabilities before the first step on the batch. NaN: never computed (over age)."""
    weights: np.ndarray
    """float32 [N]: correction weights."""
    mask_codes: np.ndarray
    """int8 [N]: -1 in the gradient, else the index of the MaskReason."""
    advantage: float
    """Advantage of the trajectory; the mean over the row's tokens where `advantages` has those."""
    route_changes: np.ndarray | None = None
    """int16 [N]: layers in which the trainer's choice for the input before the token differs from the recorded one.
    None: the row has no routes."""
    advantages: np.ndarray | None = None
    """float32 [N]: advantages of the tokens, what a teacher says of the sampled one included. None: all have the
    trajectory's."""
    reference_logprobs: np.ndarray | None = None
    """float32 [N]: the reference's log-probabilities (`StepOutcome.reference`). None: none were taken."""


class StepMetrics(msgspec.Struct, frozen=True, tag="step_metrics.1"):
    """Numbers of one optimizer step. Means are over its tokens in the gradient, and 0 where `tokens` is 0."""

    loss: float
    """The number differentiated."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate used."""
    clip_fraction: float
    """Share of tokens whose clipped term was larger than the unclipped one."""
    entropy: float
    """Mean of -log-probability of the trained tokens under the trainer (a sample estimate of the entropy)."""
    kl: float | None
    """Mean KL estimate to the reference. None: no reference."""
    log_ratios_clamped: int
    """Tokens whose log ratio left [-20, 20]."""
    non_finite_tokens: int
    """Tokens refused for a non-finite log-probability."""
    tokens: int
    """Tokens in the gradient."""
    rows: int
    """Rows trained."""
    forward_tokens: int
    """Tokens of the rows trained, context included; each counted once, however many forwards it took."""
    step_s: float
    """Seconds the step took."""
    vocabulary_entropy: float | None = None
    """Mean entropy over the whole vocabulary. None: the objective has no entropy bonus."""
    value_loss: float | None = None
    """The critic's number differentiated. None: there is no critic."""
    value_clip_fraction: float | None = None
    """Share of tokens whose value was held back by `objective.value_clip`. None: there is no critic."""
    explained_variance: float | None = None
    """1 - var(returns - values) / var(returns). None: there is no critic, or the returns do not vary."""
    critic_grad_norm: float | None = None
    """Global norm of the critic's gradient before clipping. None: there is no critic, or it was not asked."""


class StepOutcome(msgspec.Struct, frozen=True, tag="step_outcome.1"):
    """One optimizer step: v -> v + 1."""

    number: int
    """The step's number: the version it made, v + 1."""
    stepped: bool
    """False: not a single usable token, or a non-finite gradient; weights and optimizer unchanged, and reported."""
    why_not: str
    """Why the weights did not change. Empty when `stepped`."""
    metrics: StepMetrics
    """Its numbers."""
    mismatch: Mismatch | None
    """Mismatch over all its tokens before any rejection. None: no tokens."""
    slices: tuple[MismatchSlice, ...]
    """The same by (age, KV age)."""
    routes: RouteMetrics | None
    """Expert routes. None: no row trained has any."""
    rows: tuple[RowOutcome, ...]
    """Every row, in batch order."""
    reference: str | None = None
    """Root digest (hex) of the weights of the KL reference that the step used. None: it used none."""
    distillation: DistillationMetrics | None = None
    """What was learned from teachers. None: there are none."""

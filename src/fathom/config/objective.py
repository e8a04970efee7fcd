"""The objective: advantages, loss, KL, and correction of the train/rollout mismatch."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from fathom.config.families import Advantage, Aggregation, Correction, KlEstimator, Proximal, RejectionDenominator
from fathom.config.section import Section


class ObjectiveConfig(Section):
    """A clipped policy gradient on group advantages. Defaults: GRPO with token-mean loss and token TIS at 2."""

    advantage: Advantage = Advantage.GRPO
    """How rewards of a group become advantages."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high (clip-higher when larger than clip_low)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the loss for negative advantages, as a multiple of |A|. None: no bound."""
    proximal: Proximal = Proximal.DECOUPLED
    """What the ratio is centred on."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How token losses become one number."""
    constant_length: int | None = Field(default=None, gt=0)
    """L of `seq_mean_token_sum_norm`; required by it and refused elsewhere."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty to the reference policy (the weights RL started from). 0: no reference is kept."""
    kl_estimator: KlEstimator = KlEstimator.K2
    """Estimator of that penalty. As a loss only k2 has the gradient of KL(policy || reference)."""
    correction: Correction = Correction.TOKEN_TIS
    """Weight or gate for the mismatch between behaviour and trainer log-probabilities."""
    correction_low: float = Field(default=0.0, ge=0)
    """Lower bound of the correction's ratio (token_tis clamps to it; icepop, sequence_mis, geometric_rs gate by it)."""
    correction_high: float = Field(default=2.0, gt=0)
    """Upper bound of the correction's ratio."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Drop a trajectory when any token's ratio is below this. None: no veto."""
    batch_normalise: bool = False
    """Divide correction weights by their mean over the step."""
    rejection_denominator: RejectionDenominator = RejectionDenominator.ALL
    """Whether rejected tokens still count in the denominator."""
    mask_truncated: bool = False
    """Leave truncated trajectories out of the gradient; their reward stays in the baseline."""
    filter_zero_variance: bool = False
    """Do not train groups whose rewards are all equal (counted as filtered); others take their place."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM) != (self.constant_length is not None):
            raise ValueError("constant_length belongs to aggregation = 'seq_mean_token_sum_norm': set both or neither")
        if self.correction_low >= self.correction_high:
            raise ValueError(
                f"correction_low {self.correction_low} must be below correction_high {self.correction_high}"
            )
        uncorrected = {"correction_low", "correction_high", "batch_normalise"} & self.model_fields_set
        if self.correction is Correction.NONE and uncorrected:
            raise ValueError(f"{', '.join(sorted(uncorrected))} changes nothing while correction = 'none'; remove it")
        if self.correction is Correction.SEQUENCE_TIS and self.correction_low > 0:
            raise ValueError("correction_low changes nothing with correction = 'sequence_tis'; remove it")
        if self.proximal is Proximal.BYPASS and self.correction is not Correction.NONE:
            raise ValueError(
                "proximal = 'bypass' already has the behaviour policy in its ratio; a correction would count it "
                "twice: set correction = 'none'"
            )
        if self.kl_coefficient == 0 and "kl_estimator" in self.model_fields_set:
            raise ValueError("kl_estimator changes nothing while kl_coefficient = 0; remove it")
        return self

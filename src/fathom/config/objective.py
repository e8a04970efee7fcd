"""The objective: advantages, loss, KL, and correction of the train/rollout mismatch."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from fathom.config.families import (
    Advantage,
    Aggregation,
    Correction,
    KlEstimator,
    KlPlacement,
    ObjectiveKind,
    PolicyLossKind,
    Proximal,
    RejectionDenominator,
)
from fathom.config.objectives import OBJECTIVES
from fathom.config.objectives.declaration import ADVANTAGE_OPTIONS, LOSS_OPTIONS, Declaration, RecordField
from fathom.config.section import Section

_REGIONS = frozenset({PolicyLossKind.SIGNED_REGION, PolicyLossKind.REGION})
_TOKEN_CORRECTIONS = frozenset({Correction.TOKEN_TIS, Correction.ICEPOP, Correction.TOKEN_RS, Correction.KPOP})
_UPPER_ONLY = frozenset({Correction.SEQUENCE_TIS, Correction.K2_RS, Correction.K3_RS, Correction.KPOP})
_DIVERGENCES = frozenset({Correction.K2_RS, Correction.K3_RS, Correction.KPOP})


class ObjectiveConfig(Section):
    """A policy gradient. Defaults: GRPO with token-mean loss and token TIS at 2."""

    kind: ObjectiveKind = ObjectiveKind.GRPO
    """The objective by name (`docs/concepts/objectives.md`). It has defaults of its own for the options below, which
    can still be set; an option that it has no use for is refused."""
    advantage: Advantage = Advantage.GRPO
    """How rewards of a group become advantages."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a return from token to token. Kinds with returns or a critic."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation: 1 trusts returns, 0 trusts the critic. Kinds with a critic."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a step may move a value before its loss stops paying for more. None: no bound. Kinds with a critic."""
    whiten: bool = False
    """Shift and scale advantages to mean 0 and variance 1 over all tokens with loss of the batch."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped below at 1 - clip_low; 1: no lower bound. For `dppo`, how far a probability may fall."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high (clip-higher when larger than clip_low). For `dppo` and `ipo`, how
    far a probability may rise."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the loss for negative advantages, as a multiple of |A|. None: no bound."""
    ratio_penalty: float = Field(default=0.0, ge=0)
    """Weight of the squared log ratio to the behaviour policy. For `dppo` and `ipo`."""
    proximal: Proximal = Proximal.DECOUPLED
    """What the ratio is centred on."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How token losses become one number."""
    constant_length: int | None = Field(default=None, gt=0)
    """L of `seq_mean_token_sum_norm`; required by it and refused elsewhere."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty to the reference policy. 0: no reference is kept."""
    kl_placement: KlPlacement = KlPlacement.LOSS
    """Whether that penalty is differentiated as a loss or subtracted from the rewards."""
    kl_estimator: KlEstimator = KlEstimator.K2
    """Estimator of that penalty. As a loss only k2 has the gradient of KL(policy || reference), and k1, which has none,
    is refused; in the reward k1 and k3 have its value, and k1 is the default there."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy over the whole vocabulary, at the sampling temperature, as a bonus. 0: not computed."""
    correction: Correction = Correction.TOKEN_TIS
    """Weight or gate for the mismatch between behaviour and trainer log-probabilities."""
    correction_low: float = Field(default=0.0, ge=0)
    """Lower bound of the correction's ratio (token_tis clamps to it; icepop, sequence_mis, geometric_rs, token_rs gate
    by it)."""
    correction_high: float = Field(default=2.0, gt=0)
    """Upper bound of the correction's ratio; of the divergence for k2_rs, k3_rs and kpop."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Drop a trajectory when any token's ratio is below this. None: no veto."""
    off_policy_mask: float | None = Field(default=None, ge=0)
    """Drop a trajectory with a negative advantage when the mean of log behaviour - log policy over its tokens is above
    this (DeepSeek-V3.2). None: none is."""
    batch_normalise: bool = False
    """Divide correction weights by their mean over the step."""
    rejection_denominator: RejectionDenominator = RejectionDenominator.ALL
    """Whether rejected tokens still count in the denominator."""
    mask_truncated: bool = False
    """Leave truncated trajectories out of the gradient; their reward stays in the baseline."""
    overlong_limit: int | None = Field(default=None, gt=0)
    """Length in sampled tokens from which a trajectory's reward has 1 less (usually rollout.max_new_tokens), as a
    component named `overlong`. None: lengths are not rewarded."""
    overlong_buffer: int | None = Field(default=None, gt=0)
    """Tokens before that limit over which the penalty grows from 0 to 1. Set with the limit."""
    filter_zero_variance: bool = False
    """Do not train groups whose rewards are all equal (counted as filtered); others take their place."""

    @property
    def declaration(self) -> Declaration:
        """What its kind says of itself."""
        return OBJECTIVES[self.kind]

    @property
    def reference(self) -> bool:
        """A KL penalty to a reference is asked for, wherever it enters."""
        return self.kl_coefficient > 0

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        for option, value in self.declaration.defaults.items():
            if option not in self.model_fields_set:
                object.__setattr__(self, option, value)
        if self.kl_placement is KlPlacement.REWARD and "kl_estimator" not in self.model_fields_set:
            object.__setattr__(self, "kl_estimator", KlEstimator.K1)
        _check_kind(self)
        _check_correction(self)
        _check_penalties(self)
        return self


def check_run(
    objective: ObjectiveConfig, *, group_size: int, steps_on_a_batch: int, critic: bool, rewarded: bool
) -> None:
    """Raise ValueError, with the fix, unless a run records what the objective needs and uses all it records.

    Args:
        objective: the objective.
        group_size: members of a group.
        steps_on_a_batch: optimizer steps that share a batch.
        critic: the run has a value model.
        rewarded: the objective trains on rewards; False where a teacher alone is followed.
    """
    kind, needs = objective.kind, objective.declaration.needs
    if RecordField.GROUP in needs and rewarded and group_size < 2:
        raise ValueError(
            f"objective.kind = '{kind}' compares the members of a group, and rollout.group_size = {group_size} leaves "
            "nobody to compare with; raise it to 2 or more, or use objective.kind = 'reinforce_pp'"
        )
    if RecordField.ONE_STEP in needs and steps_on_a_batch > 1:
        raise ValueError(
            f"objective.kind = '{kind}' has no ratio to the policy that a batch began with; set "
            "trainer.steps_on_a_batch = 1, or use objective.kind = 'grpo' with objective.advantage = 'rloo'"
        )
    if RecordField.VALUES in needs and not critic:
        raise ValueError(f"objective.kind = '{kind}' needs a value of every token: add [trainer.critic]")
    if critic and RecordField.VALUES not in needs:
        raise ValueError(f"trainer.critic has no use with objective.kind = '{kind}'; remove it, or use kind = 'ppo'")


def _refuse_unused(config: ObjectiveConfig, options: set[str], reason: str) -> None:
    if unused := sorted(options & config.model_fields_set):
        raise ValueError(f"{', '.join(unused)} changes nothing {reason}; remove it")


def _check_kind(config: ObjectiveConfig) -> None:
    declaration, kind = config.declaration, f"with kind = '{config.kind}'"
    _refuse_unused(config, {name for name, users in LOSS_OPTIONS.items() if declaration.loss not in users}, kind)
    sources = {name for name, users in ADVANTAGE_OPTIONS.items() if declaration.advantages not in users}
    _refuse_unused(config, sources, kind)
    for option in sorted(declaration.decides & config.model_fields_set):
        value = declaration.defaults[option]
        if config.model_dump()[option] != value:
            raise ValueError(f"{option} is decided by kind = '{config.kind}', which stands for '{value}'; remove it")
    if (config.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM) != (config.constant_length is not None):
        raise ValueError("constant_length belongs to aggregation = 'seq_mean_token_sum_norm': set both or neither")
    if (config.overlong_limit is None) != (config.overlong_buffer is None):
        raise ValueError("overlong_limit and overlong_buffer belong together: set both or neither")
    if config.overlong_limit is None and RecordField.LENGTH_LIMIT in declaration.needs:
        raise ValueError(
            f"kind = '{config.kind}' shapes the rewards of long answers: set overlong_limit (usually "
            "rollout.max_new_tokens) and overlong_buffer (a fifth of it in the paper)"
        )
    if config.overlong_limit is not None and (config.overlong_buffer or 0) > config.overlong_limit:
        raise ValueError(f"overlong_buffer must be at most overlong_limit = {config.overlong_limit}; lower it")


def _check_correction(config: ObjectiveConfig) -> None:
    declaration = config.declaration
    if config.correction in _DIVERGENCES and "correction_high" not in config.model_fields_set:
        raise ValueError(
            f"correction = '{config.correction}' gates by a divergence: set correction_high to its upper bound (k3_rs: "
            "0.001 to 0.01)"
        )
    if config.correction_low >= config.correction_high:
        raise ValueError(
            f"correction_low {config.correction_low} must be below correction_high {config.correction_high}"
        )
    if config.correction is Correction.NONE:
        unused = {"correction_low", "correction_high", "batch_normalise"}
        _refuse_unused(config, unused, "while correction = 'none'")
    if config.correction in _UPPER_ONLY and config.correction_low > 0:
        raise ValueError(f"correction_low changes nothing with correction = '{config.correction}'; remove it")
    if declaration.loss in _REGIONS and config.correction is not Correction.NONE:
        raise ValueError(
            f"kind = '{config.kind}' already has the behaviour policy in its ratio; a correction would count it twice: "
            "remove it"
        )
    if config.proximal is Proximal.BYPASS and config.correction is not Correction.NONE:
        raise ValueError(
            "proximal = 'bypass' already has the behaviour policy in its ratio; a correction would count it "
            "twice: set correction = 'none'"
        )
    if declaration.loss is PolicyLossKind.SEQUENCE_CLIP and config.correction in _TOKEN_CORRECTIONS:
        raise ValueError(
            f"kind = '{config.kind}' has one ratio for a whole trajectory, and correction = '{config.correction}' one "
            "for each token; use 'sequence_tis', 'sequence_mis', a gate of trajectories, or 'none'"
        )


def _check_penalties(config: ObjectiveConfig) -> None:
    if not config.reference:
        _refuse_unused(config, {"kl_estimator", "kl_placement"}, "while kl_coefficient = 0")
    if config.kl_placement is KlPlacement.REWARD and config.kl_estimator is KlEstimator.K2:
        raise ValueError("kl_estimator = 'k2' is biased as a reward; use 'k1' or 'k3', or kl_placement = 'loss'")
    if config.kl_placement is KlPlacement.LOSS and config.kl_estimator is KlEstimator.K1:
        raise ValueError(
            "kl_estimator = 'k1' as a loss has gradient 0 in expectation: it would hold nothing back; use "
            "'k2', or kl_placement = 'reward'"
        )

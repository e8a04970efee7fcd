"""What a named objective says of itself, before any tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import final

from fathom.config.families import AdvantageSource, PolicyLossKind

Value = bool | int | float | StrEnum | None
"""Value of an option."""


class RecordField(StrEnum):
    """What an objective may need of the records of a run, besides tokens, behaviour log-probabilities and rewards."""

    GROUP = "group"
    """Rewards of at least two members of a group."""
    OLD_LOGPROBS = "old_logprobs"
    """The trainer's log-probabilities of whole trajectories, from a forward of their own before the step."""
    ONE_STEP = "one_step"
    """Tokens trained once, by the weights that a batch began with: it has no ratio to older ones."""
    LENGTH_LIMIT = "length_limit"
    """The length at which answers are cut."""
    CONSTANT_LENGTH = "constant_length"
    """A constant length to divide by."""
    VALUES = "values"
    """A value of every token, from a critic."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A named objective. The options it has no use for are refused."""

    sentence: str
    """What it is, in one sentence."""
    source: str
    """Where it was published."""
    formula: str
    """Loss of a token, or of a trajectory."""
    denominators: str
    """What sums are divided by, in words."""
    use: str
    """When to use it."""
    loss: PolicyLossKind
    """Its policy loss."""
    advantages: AdvantageSource
    """Where its advantages come from."""
    needs: frozenset[RecordField] = frozenset()
    """What a run must record for it."""
    defaults: Mapping[str, Value] = field(default_factory=lambda: MappingProxyType({}))
    """Its own defaults of options; the others have theirs."""
    decides: frozenset[str] = frozenset()
    """Options that it decides by itself, though others of its family leave them open."""


LOSS_OPTIONS: Mapping[str, frozenset[PolicyLossKind]] = MappingProxyType(
    {
        "clip_low": frozenset(
            {
                PolicyLossKind.CLIP,
                PolicyLossKind.SEQUENCE_CLIP,
                PolicyLossKind.CLIPPED_WEIGHT,
                PolicyLossKind.SIGNED_REGION,
            }
        ),
        "clip_high": frozenset(PolicyLossKind) - {PolicyLossKind.REINFORCE},
        "dual_clip": frozenset({PolicyLossKind.CLIP, PolicyLossKind.SEQUENCE_CLIP}),
        "proximal": frozenset({PolicyLossKind.CLIP, PolicyLossKind.SEQUENCE_CLIP, PolicyLossKind.CLIPPED_WEIGHT}),
        "ratio_penalty": frozenset({PolicyLossKind.SIGNED_REGION, PolicyLossKind.REGION}),
    }
)
"""Options that only some policy losses use."""

ADVANTAGE_OPTIONS: Mapping[str, frozenset[AdvantageSource]] = MappingProxyType(
    {
        "advantage": frozenset({AdvantageSource.GROUP}),
        "gamma": frozenset({AdvantageSource.RETURNS, AdvantageSource.CRITIC}),
        "gae_lambda": frozenset({AdvantageSource.CRITIC}),
        "value_clip": frozenset({AdvantageSource.CRITIC}),
    }
)
"""Options that only some sources of advantages use."""

"""REINFORCE++ with a baseline."""

from __future__ import annotations

from types import MappingProxyType

from fathom.config.families import Advantage, AdvantageSource, PolicyLossKind
from fathom.config.objectives.declaration import Declaration, RecordField

REINFORCE_PP_BASELINE = Declaration(
    sentence="The reward beyond the mean of its group, whitened over the whole batch, under a clipped ratio.",
    source="arXiv 2501.03262",
    formula="clip loss as in GRPO; A = (a - mean) / sqrt(var + 1e-8), a = R - mean of the group",
    denominators=(
        "Mean and variance are over all valid tokens of the batch, the variance with N - 1: long answers weigh more. "
        "The loss is divided by the tokens of the step."
    ),
    use="Groups with few different rewards, whose own standard deviation would be noise.",
    loss=PolicyLossKind.CLIP,
    advantages=AdvantageSource.GROUP,
    needs=frozenset({RecordField.GROUP}),
    defaults=MappingProxyType({"advantage": Advantage.DR_GRPO, "clip_low": 0.2, "clip_high": 0.2, "whiten": True}),
    decides=frozenset({"advantage"}),
)

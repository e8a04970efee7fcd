"""DAPO."""

from __future__ import annotations

from types import MappingProxyType

from fathom.config.families import AdvantageSource, Aggregation, PolicyLossKind
from fathom.config.objectives.declaration import Declaration, RecordField

DAPO = Declaration(
    sentence=(
        "GRPO with a higher upper clip, a bound for negative advantages, a penalty for answers near the length limit, "
        "and groups of equal rewards replaced by others."
    ),
    source="arXiv 2503.14476; dual clip: arXiv 1912.09729",
    formula="as GRPO on shaped rewards; for A < 0: min(max(-rho A, -clip(rho, 0.8, 1.28) A), -dual_clip A)",
    denominators=(
        "The standard deviation has G - 1 in its denominator. The loss is divided by the tokens of the step. Groups "
        "left out for equal rewards count nowhere; the books count them as filtered."
    ),
    use="Long reasoning: keeps exploring, and spends no step on prompts that are solved or hopeless.",
    loss=PolicyLossKind.CLIP,
    advantages=AdvantageSource.GROUP,
    needs=frozenset({RecordField.GROUP, RecordField.LENGTH_LIMIT}),
    defaults=MappingProxyType(
        {
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": 3.0,
            "aggregation": Aggregation.TOKEN_MEAN,
            "filter_zero_variance": True,
        }
    ),
)

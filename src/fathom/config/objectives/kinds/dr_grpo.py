"""Dr. GRPO."""

from __future__ import annotations

from types import MappingProxyType

from fathom.config.families import Advantage, AdvantageSource, Aggregation, PolicyLossKind
from fathom.config.objectives.declaration import Declaration, RecordField

DR_GRPO = Declaration(
    sentence="GRPO without the two divisions that favour some lengths and some groups.",
    source="arXiv 2503.20783",
    formula="max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A), A = R - mean",
    denominators=(
        "No standard deviation. The sum over all tokens is divided by B times constant_length, B the trajectories of "
        "the step, those without a token that counts included."
    ),
    use="Answers that grow long for no good reason, or groups of very different difficulty.",
    loss=PolicyLossKind.CLIP,
    advantages=AdvantageSource.GROUP,
    needs=frozenset({RecordField.GROUP, RecordField.CONSTANT_LENGTH}),
    defaults=MappingProxyType(
        {
            "advantage": Advantage.DR_GRPO,
            "aggregation": Aggregation.SEQ_MEAN_TOKEN_SUM_NORM,
            "clip_low": 0.2,
            "clip_high": 0.2,
        }
    ),
    decides=frozenset({"advantage", "aggregation"}),
)

"""CISPO."""

from __future__ import annotations

from types import MappingProxyType

from fathom.config.families import AdvantageSource, Aggregation, PolicyLossKind
from fathom.config.objectives.declaration import Declaration, RecordField

CISPO = Declaration(
    sentence="REINFORCE weighted by a clipped ratio that is a constant: no token loses its gradient.",
    source="arXiv 2506.13585",
    formula="-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log policy",
    denominators="As in GRPO; the loss is divided by the tokens of the step.",
    use="Rare decisive tokens that a clipped loss would silence. Its loss has no meaning as a number.",
    loss=PolicyLossKind.CLIPPED_WEIGHT,
    advantages=AdvantageSource.GROUP,
    needs=frozenset({RecordField.GROUP}),
    defaults=MappingProxyType({"clip_low": 1.0, "clip_high": 2.0, "aggregation": Aggregation.TOKEN_MEAN}),
)

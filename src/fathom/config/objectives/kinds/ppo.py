"""PPO with a critic."""

from __future__ import annotations

from types import MappingProxyType

from fathom.config.families import AdvantageSource, PolicyLossKind
from fathom.config.objectives.declaration import Declaration, RecordField

PPO = Declaration(
    sentence="A clipped ratio on advantages that a value model makes for each token (GAE).",
    source="arXiv 1707.06347, 1506.02438",
    formula="clip loss as in GRPO; A_j = d_j + gamma lambda A_(j+1), d_j = r_j + gamma V_(j+1) - V_j",
    denominators=(
        "Only tokens with loss are transitions; the value after the last one is 0. Advantages are whitened over all "
        "valid tokens of the batch. Policy and value loss are divided by the tokens of the step."
    ),
    use="Long episodes in which single tokens deserve different credit, at the price of a second model.",
    loss=PolicyLossKind.CLIP,
    advantages=AdvantageSource.CRITIC,
    needs=frozenset({RecordField.VALUES}),
    defaults=MappingProxyType({"clip_low": 0.2, "clip_high": 0.2, "whiten": True}),
)

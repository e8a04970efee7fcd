"""REINFORCE++."""

from __future__ import annotations

from types import MappingProxyType

from fathom.config.families import AdvantageSource, PolicyLossKind
from fathom.config.objectives.declaration import Declaration

REINFORCE_PP = Declaration(
    sentence="A clipped ratio on returns of single tokens, whitened over the whole batch; no group, no critic.",
    source="arXiv 2501.03262",
    formula="clip loss as in GRPO; A = (G - mean) / sqrt(var + 1e-8), G_t = r_t + gamma G_(t+1), the reward at the end",
    denominators=(
        "Mean and variance are over all valid tokens of the batch, the variance with N - 1. The loss is divided by "
        "the tokens of the step."
    ),
    use="One answer to a prompt, or groups too small for a baseline of their own.",
    loss=PolicyLossKind.CLIP,
    advantages=AdvantageSource.RETURNS,
    defaults=MappingProxyType({"clip_low": 0.2, "clip_high": 0.2, "whiten": True}),
)

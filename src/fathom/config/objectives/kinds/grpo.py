"""GRPO."""

from __future__ import annotations

from fathom.config.families import AdvantageSource, PolicyLossKind
from fathom.config.objectives.declaration import Declaration, RecordField

GRPO = Declaration(
    sentence="A clipped ratio of each token on advantages from the mean and the standard deviation of a group.",
    source="arXiv 2402.03300; clip-higher: arXiv 2503.14476",
    formula="max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A), A = (R - mean) / (std + 1e-6)",
    denominators=(
        "The standard deviation has G - 1 in its denominator, G the graded members of the group. By default the loss "
        "is divided by the tokens of the step (token_mean); aggregation = 'seq_mean_token_mean' is the paper's."
    ),
    use="The default: verifiable rewards, several answers to a prompt.",
    loss=PolicyLossKind.CLIP,
    advantages=AdvantageSource.GROUP,
    needs=frozenset({RecordField.GROUP}),
)

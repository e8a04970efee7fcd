"""GSPO."""

from __future__ import annotations

from types import MappingProxyType

from fathom.config.families import AdvantageSource, Aggregation, Correction, PolicyLossKind
from fathom.config.objectives.declaration import Declaration, RecordField

GSPO = Declaration(
    sentence="GRPO with one ratio for a whole trajectory, so that all its tokens are clipped together or not at all.",
    source="arXiv 2507.18071",
    formula="max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean of log policy - log proximal)",
    denominators=(
        "The mean in s is over the trajectory's tokens in the gradient, in all its rows. The loss is the mean over the "
        "trajectories that have a token that counts (rejected ones count, unless rejection_denominator = 'kept')."
    ),
    use="Mixtures of experts and long answers, where single ratios are noisy. Clips are narrow: s is a mean.",
    loss=PolicyLossKind.SEQUENCE_CLIP,
    advantages=AdvantageSource.GROUP,
    needs=frozenset({RecordField.GROUP, RecordField.OLD_LOGPROBS}),
    defaults=MappingProxyType(
        {
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "aggregation": Aggregation.SEQ_MEAN_TOKEN_MEAN,
            "correction": Correction.SEQUENCE_TIS,
        }
    ),
    decides=frozenset({"aggregation"}),
)

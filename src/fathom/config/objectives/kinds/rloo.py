"""RLOO."""

from __future__ import annotations

from types import MappingProxyType

from fathom.config.families import Advantage, AdvantageSource, Aggregation, PolicyLossKind
from fathom.config.objectives.declaration import Declaration, RecordField

RLOO = Declaration(
    sentence="REINFORCE with the mean of the others of its group as the baseline of each trajectory.",
    source="arXiv 2402.14740",
    formula="-A log policy, A = R - mean of the others' R",
    denominators="The sum over a trajectory's tokens, averaged over the trajectories that have a token that counts.",
    use="The plain unbiased gradient: one step on a batch, little staleness.",
    loss=PolicyLossKind.REINFORCE,
    advantages=AdvantageSource.GROUP,
    needs=frozenset({RecordField.GROUP, RecordField.ONE_STEP}),
    defaults=MappingProxyType({"advantage": Advantage.RLOO, "aggregation": Aggregation.SEQ_MEAN_TOKEN_SUM}),
    decides=frozenset({"advantage"}),
)

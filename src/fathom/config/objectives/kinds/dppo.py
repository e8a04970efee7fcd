"""DPPO with the binary divergence."""

from __future__ import annotations

from types import MappingProxyType

from fathom.config.families import AdvantageSource, Correction, PolicyLossKind
from fathom.config.objectives.declaration import Declaration, RecordField

DPPO = Declaration(
    sentence="No ratio is clipped; a token is dropped once its probability has moved too far the way it is pushed.",
    source="arXiv 2602.04879; penalty: arXiv 2602.02276",
    formula=(
        "-keep rho A + ratio_penalty (log rho)^2, rho = p / q to the behaviour policy; not kept: A > 0 and "
        "p - q > clip_high, or A <= 0 and p - q < -clip_low"
    ),
    denominators="As in GRPO; the loss is divided by the tokens of the step, dropped ones included.",
    use="Where ratios of rare tokens are large though their probabilities hardly moved.",
    loss=PolicyLossKind.SIGNED_REGION,
    advantages=AdvantageSource.GROUP,
    needs=frozenset({RecordField.GROUP}),
    defaults=MappingProxyType(
        {"clip_low": 0.2, "clip_high": 0.2, "ratio_penalty": 1e-3, "correction": Correction.NONE}
    ),
)

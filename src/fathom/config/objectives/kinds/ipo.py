"""IPO."""

from __future__ import annotations

from types import MappingProxyType

from fathom.config.families import AdvantageSource, Correction, PolicyLossKind
from fathom.config.objectives.declaration import Declaration, RecordField

IPO = Declaration(
    sentence="DPPO with a region of the same size both ways, whatever the sign of the advantage.",
    source="prime-rl",
    formula="-keep rho A + ratio_penalty (log rho)^2, rho = p / q, q the behaviour's; not kept: |p - q| > clip_high",
    denominators="As in GRPO; the loss is divided by the tokens of the step, dropped ones included.",
    use="As DPPO, more careful.",
    loss=PolicyLossKind.REGION,
    advantages=AdvantageSource.GROUP,
    needs=frozenset({RecordField.GROUP}),
    defaults=MappingProxyType({"clip_high": 0.1, "ratio_penalty": 1e-3, "correction": Correction.NONE}),
)

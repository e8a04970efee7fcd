"""What a run learned from teachers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fathom.core.records.scores import DistillationMetrics
from fathom.ledger.events import EngineJoined

_PREFIX = "teacher-"
"""How the engines of teachers are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachingSummary:
    """Distillation over all steps."""

    teachers: tuple[tuple[str, str], ...]
    """Each teacher's name and the root digest (hex) of its weights."""
    reverse_kl: tuple[float, ...]
    """Of each step that trained a token: mean over its tokens of log student - log teacher at the sampled token."""
    compared: tuple[float, ...]
    """Of each such step that compares ids: mean of the sum over them. Empty: only sampled tokens are compared."""
    scored_share: float
    """Share of the tokens with loss that a teacher has scored, over all steps."""
    seconds: float
    """Seconds that teachers took for the rows of all steps."""


def summarise_teaching(
    metrics: Sequence[DistillationMetrics | None], joined: Sequence[EngineJoined]
) -> TeachingSummary | None:
    """Pool the steps. None: there are no teachers."""
    steps = [each for each in metrics if each is not None]
    if not steps:
        return None
    versions = {event.engine: event.version for event in joined if event.engine.startswith(_PREFIX)}
    asked = sum(step.asked for step in steps)
    return TeachingSummary(
        teachers=tuple(
            (engine.removeprefix(_PREFIX), version.digest if version is not None else "")
            for engine, version in versions.items()
        ),
        reverse_kl=tuple(step.reverse_kl for step in steps if step.tokens),
        compared=tuple(step.compared for step in steps if step.tokens and step.compared is not None),
        scored_share=sum(step.asked * step.scored_share for step in steps) / asked if asked else 0.0,
        seconds=sum(step.seconds for step in steps),
    )

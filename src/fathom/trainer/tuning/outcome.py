"""What a step and an evaluation report."""

from __future__ import annotations

from dataclasses import dataclass

from fathom.trainer.backends.port import Update
from fathom.trainer.objective.preference import PreferenceSums
from fathom.trainer.objective.supervised import ImitationSums


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step did and took, whatever was trained."""

    update: Update
    """What the backend did."""
    forward_tokens: int
    """Tokens of the forwards, context included."""
    step_s: float
    """Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationStep:
    """A step on conversations."""

    sums: ImitationSums
    """Of the step."""
    cost: StepCost
    """What it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceStep:
    """A step on pairs."""

    sums: PreferenceSums
    """Of the step."""
    cost: StepCost
    """What it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationScores:
    """Held-out conversations, in their order."""

    logprobs: tuple[float, ...]
    """Sum of log-probabilities of each one's tokens with loss."""
    tokens: tuple[int, ...]
    """Tokens with loss of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceScores:
    """Held-out pairs, in their order; (chosen, rejected) each."""

    logprobs: tuple[tuple[float, float], ...]
    """Sums of log-probabilities."""
    reference: tuple[tuple[float, float], ...]
    """The same under the reference."""
    tokens: tuple[tuple[int, int], ...]
    """Tokens with loss."""

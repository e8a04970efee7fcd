"""What a step and an evaluation report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from fathom.trainer.backends.port import Update


class StepSums(Protocol):
    """What a loss sums over some samples. Those of the micro-batches add up to those of the step."""

    @property
    def loss(self) -> float:
        """The number differentiated."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens in the gradient."""
        ...

    @property
    def non_finite(self) -> int:
        """What was refused for a log-probability that is not finite."""
        ...

    def __add__(self, other: Self, /) -> Self: ...


Sums = TypeVar("Sums", bound=StepSums)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningStep(Generic[Sums]):
    """A step on samples."""

    sums: Sums
    """Of the step."""
    update: Update
    """What the backend did."""
    forward_tokens: int
    """Tokens of the forwards, context included."""
    step_s: float
    """Seconds."""


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

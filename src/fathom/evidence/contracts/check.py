"""A claim, how often it was examined, and where it failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

_EXAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check."""

    name: str
    """Short name."""
    claim: str
    """What holds when it passes."""
    examined: int
    """How many things were looked at. 0: the run has nothing to check this on, which is not a failure."""
    failures: int
    """How many of them contradict the claim."""
    examples: tuple[str, ...]
    """The first few, in words."""

    @property
    def passed(self) -> bool:
        """True when nothing contradicts the claim."""
        return self.failures == 0


@final
class Examiner:
    """Collects the result of one check."""

    def __init__(self, name: str, claim: str) -> None:
        self._name = name
        self._claim = claim
        self._examined = 0
        self._failures = 0
        self._examples: list[str] = []

    def expect(self, holds: bool, failure: str, *, count: int = 1) -> None:
        """Look at `count` things at once; `failure` says what is wrong when it does not hold."""
        self._examined += count
        if not holds:
            self._failures += 1
            if len(self._examples) < _EXAMPLES:
                self._examples.append(failure)

    @property
    def result(self) -> Check:
        """What came out."""
        return Check(
            name=self._name,
            claim=self._claim,
            examined=self._examined,
            failures=self._failures,
            examples=tuple(self._examples),
        )

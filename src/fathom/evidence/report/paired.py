"""The difference of two evaluations of the same tasks, with its uncertainty beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fathom.core.errors import LedgerError

_RESAMPLES = 10_000
_SEED = 0
FEWEST_CHANGED = 6
"""Were nothing changed, so many tasks would all differ in the same direction once in 32 times; with fewer it happens by
chance more often than an interval of 95 % allows, however narrow that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """Mean of (after - before) over tasks graded both times, with a 95 % interval over tasks."""

    tasks: int
    """Tasks graded both times."""
    changed: int
    """Tasks of these with another value after than before."""
    before: float
    """Mean before, over these tasks."""
    after: float
    """Mean after, over these tasks."""
    difference: float
    """Mean difference."""
    before_error: float | None
    """Standard error over tasks of the mean before. None: of a single task there is none."""
    after_error: float | None
    """The same of the mean after."""
    standard_error: float | None
    """The same of the mean difference: small where tasks differ more from each other than they changed."""
    low: float
    """Lower end of the interval: paired percentile bootstrap over tasks, 10,000 resamples from a fixed seed."""
    high: float
    """Upper end."""

    @property
    def is_change(self) -> bool:
        """True when the interval excludes 0, and that not by a handful of tasks."""
        return (self.low > 0 or self.high < 0) and self.changed >= FEWEST_CHANGED

    def sentence(self, what: str, digits: int = 3, *, unit: str = "task") -> str:
        """What the data support, and no more. `unit`: what was paired."""
        if self.is_change:
            verdict = f"it {'rose' if self.difference > 0 else 'fell'}: the interval excludes 0"
        else:
            few = f", too few {unit}s differ ({self.changed})" if 0 < self.changed < FEWEST_CHANGED else ""
            verdict = f"no change can be claimed{few}"
        before, after, difference = (
            _with_error(value, error, digits)
            for value, error in (
                (f"{self.before:.{digits}f}", self.before_error),
                (f"{self.after:.{digits}f}", self.after_error),
                (f"{self.difference:+.{digits}f}", self.standard_error),
            )
        )
        return (
            f"{what}: {before} before, {after} after; after - before, paired by {unit}: {difference}, 95 % interval "
            f"{self.low:+.{digits}f} to {self.high:+.{digits}f} over {self.tasks} {unit}s; {verdict} (one run; "
            "standard errors in brackets)"
        )


def paired_difference(before: Sequence[float], after: Sequence[float]) -> PairedDifference | None:
    """Compare mean rewards per task, in the same task order. NaN: nothing was graded. None: no task was graded twice.

    Raises:
        LedgerError: the two evaluations have different numbers of tasks, so they are not paired.
    """
    if len(before) != len(after):
        raise LedgerError(f"evaluations of {len(before)} and {len(after)} tasks are not paired")
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    both = np.isfinite(first) & np.isfinite(second)
    if not both.any():
        return None
    first, second = first[both], second[both]
    low, high = _interval(second - first)
    return PairedDifference(
        tasks=len(first),
        changed=int((first != second).sum()),
        before=float(first.mean()),
        after=float(second.mean()),
        difference=float((second - first).mean()),
        before_error=_standard_error(first),
        after_error=_standard_error(second),
        standard_error=_standard_error(second - first),
        low=low,
        high=high,
    )


def _with_error(value: str, error: float | None, digits: int) -> str:
    return value if error is None else f"{value} ({error:.{digits}f})"


def _standard_error(values: np.ndarray) -> float | None:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def _interval(differences: np.ndarray) -> tuple[float, float]:
    """Differences take few distinct values, so a resample is a multinomial draw of how often each is taken."""
    values, counts = np.unique(differences, return_counts=True)
    drawn = np.random.default_rng(_SEED).multinomial(len(differences), counts / len(differences), size=_RESAMPLES)
    low, high = np.percentile(drawn @ values / len(differences), (2.5, 97.5))
    return float(low), float(high)

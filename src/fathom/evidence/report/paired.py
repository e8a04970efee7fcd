"""The difference of two evaluations of the same tasks, with its uncertainty beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fathom.core.errors import LedgerError

_RESAMPLES = 10_000
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """Mean of (after - before) over tasks graded both times, with a 95 % interval over tasks."""

    tasks: int
    """Tasks graded both times."""
    before: float
    """Mean before, over these tasks."""
    after: float
    """Mean after, over these tasks."""
    difference: float
    """Mean difference."""
    low: float
    """Lower end of the interval: paired percentile bootstrap over tasks, 10,000 resamples from a fixed seed."""
    high: float
    """Upper end."""

    @property
    def is_change(self) -> bool:
        """True when the interval excludes 0."""
        return self.low > 0 or self.high < 0


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
        before=float(first.mean()),
        after=float(second.mean()),
        difference=float((second - first).mean()),
        low=low,
        high=high,
    )


def _interval(differences: np.ndarray) -> tuple[float, float]:
    """Differences take few distinct values, so a resample is a multinomial draw of how often each is taken."""
    values, counts = np.unique(differences, return_counts=True)
    drawn = np.random.default_rng(_SEED).multinomial(len(differences), counts / len(differences), size=_RESAMPLES)
    low, high = np.percentile(drawn @ values / len(differences), (2.5, 97.5))
    return float(low), float(high)

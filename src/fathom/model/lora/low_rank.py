"""The update of one matrix, or of one matrix of every expert of a layer.

Letters: N rows, I inputs, O outputs, R rank, X experts, S rows sorted by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear, pad

_ALIGNED = 8
"""Grouped products read rows of whole 16 bytes, which are 8 elements of the narrowest type."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """`scale * B (A x)`, computed beside what it is added to: the two are never merged here."""

    a: nn.Parameter
    """[R, I], or [X, R, I]."""
    b: nn.Parameter
    """[O, R], or [X, O, R]. Zero at first, so that the update is."""
    scale: float
    """`AdapterForm.scale`."""

    def update(self, rows: Tensor) -> Tensor:
        """[..., O] of rows [..., I]."""
        return linear(self._scaled(linear(rows, self.a)), self.b)

    def grouped_update(self, rows: Tensor, ends: Tensor) -> Tensor:
        """[S, O] of rows [S, I]; expert x has those up to `ends[x]`, int32 [X], from the end of the one before it."""
        inner = self._scaled(grouped(rows, padded(self.a, 1), ends))
        return grouped(inner, padded(self.b, 2), ends)

    def exact(self, a: Tensor, b: Tensor) -> Tensor:
        """float64 [O, I]: what one matrix's parts [R, I] and [O, R] of this amount to as a matrix."""
        return b.double() @ self._scaled(a.double())

    def _scaled(self, inner: Tensor) -> Tensor:
        """The one place where the scale is applied: to the fewest numbers."""
        return inner * self.scale


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[S, O] of rows [S, I] with matrices [X, O, I]; see `LowRank.grouped_update`."""
    return grouped_mm(rows, weights.transpose(-2, -1), offs=ends)


def padded(weights: Tensor, dim: int) -> Tensor:
    """The tensor [X, ., .] with zeros appended in `dim` up to whole vectors; itself where there are none to append."""
    missing = -weights.shape[dim] % _ALIGNED
    if not missing:
        return weights
    return pad(weights, (0, 0, 0, missing) if dim == 1 else (0, missing))

"""Prefixes that rows have in common, found by comparing tokens, so that each is computed once.

A prefix is whole pages of the attention's memory long, as in the engine's own cache: a page belongs to one prefix.
Letters: R rows, T input tokens of all rows, C tokens that are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self, final

import numpy as np

from fathom.model.kernels.cpu_attention import PAGE_TOKENS


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOrder:
    """Rows in the order of their tokens, so that the longer a prefix two have in common, the nearer they are."""

    rows: np.ndarray
    """int64 [R]: the row at each place."""
    common: np.ndarray
    """int64 [R]: first tokens that the row at each place has in common with the one before it, in whole pages. Of two
    places, the smallest of those after the one up to the other. 0 for the first place."""

    @classmethod
    def of(cls, inputs: Sequence[np.ndarray]) -> Self:
        """Order rows by their input tokens, integers [length] each."""
        # Big-endian bytes of numbers that are not negative compare as the numbers do.
        texts = [row.astype(">i8").tobytes() for row in inputs]
        rows = sorted(range(len(texts)), key=texts.__getitem__)
        common = [_common(inputs[left], inputs[right]) for left, right in pairwise(rows)]
        return cls(rows=np.array(rows, np.int64), common=np.array([0, *common][: len(rows)], np.int64))

    def with_row(self, place: int) -> np.ndarray:
        """int64 [R]: first tokens that the row at each place has in common with the one at `place`; 0 at it itself."""
        found = np.zeros(len(self.rows), np.int64)
        found[place + 1 :] = np.minimum.accumulate(self.common[place + 1 :])
        found[:place] = np.minimum.accumulate(self.common[place:0:-1])[::-1]
        return found


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """What is computed of rows laid end to end: pieces that come after nothing, or after another piece."""

    tokens: np.ndarray
    """int64 [C]: which of the T tokens are computed, piece after piece."""
    computed: np.ndarray
    """int64 [T]: where among the C tokens each token's equal is."""
    lengths: tuple[int, ...]
    """Tokens of each piece; they sum to C."""
    parents: tuple[int, ...]
    """The piece that each comes right after, always an earlier one; -1: it begins a row."""


def segments_of(input_ids: np.ndarray, lengths: Sequence[int]) -> Segments | None:
    """Pieces of the rows `input_ids`, integers [T], of these lengths. None: no two rows begin with the same page.

    Pieces after the same one come longest first, so that equal lengths are neighbours.
    """
    starts = np.cumsum([0, *lengths])
    order = PrefixOrder.of([input_ids[begin:end] for begin, end in pairwise(starts)])
    if not order.common.any():
        return None
    computed = np.zeros(len(input_ids), np.int64)
    tokens: list[np.ndarray] = []
    sizes: list[int] = []
    parents: list[int] = []
    # Rows at the places [low, high), whose first `depth` tokens are those of piece `parent` and all before it.
    waiting = [(0, len(order.rows), 0, -1)]
    while waiting:
        low, high, depth, parent = waiting.pop()
        inner = order.common[low + 1 : high]
        end = int(inner.min()) if len(inner) else lengths[order.rows[low]]
        if end > depth:
            begins = starts[order.rows[low:high]] + depth
            place = sum(sizes) + np.arange(end - depth)
            computed[begins[:, None] + np.arange(end - depth)] = place
            tokens.append(begins[0] + np.arange(end - depth))
            sizes.append(end - depth)
            parents.append(parent)
            parent = len(sizes) - 1
        if len(inner):
            cuts = [low, *(low + 1 + np.flatnonzero(inner == end)).tolist(), high]
            parts = sorted(pairwise(cuts), key=lambda part: _longest(order.rows[slice(*part)], lengths), reverse=True)
            waiting += [(*part, end, parent) for part in reversed(parts)]
    return Segments(tokens=np.concatenate(tokens), computed=computed, lengths=tuple(sizes), parents=tuple(parents))


def _longest(rows: np.ndarray, lengths: Sequence[int]) -> int:
    return max(lengths[row] for row in rows)


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """First tokens that are equal, in whole pages."""
    size = min(len(left), len(right))
    differs = np.flatnonzero(left[:size] != right[:size])
    equal = int(differs[0]) if len(differs) else size
    return equal // PAGE_TOKENS * PAGE_TOKENS

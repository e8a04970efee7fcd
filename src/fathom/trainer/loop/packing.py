"""How a step's rows are cut: into micro-batches by a token budget, and into mini-batches of whole trajectories.

Pure and deterministic. How rows are cut never changes a step's result: its denominators are known before the cut.
Rows are given by their lengths in tokens and by their owners: rows of one trajectory have the same. Letters: R rows,
U units, which are rows that go together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from fathom.trainer.backends.prefixes import PrefixOrder

_HALVINGS = 6
"""How often a smaller size of the micro-batches is tried."""


def micro_batches(
    lengths: Sequence[int], owners: Sequence[Hashable], budget: int, prefixes: PrefixOrder | None = None
) -> list[list[int]]:
    """Indices of the rows in micro-batches of at most `budget` tokens; every row in exactly one.

    They are filled one after the other, each with the longest that fits, which is first fit, longest first. Then the
    same is tried with smaller sizes, as long as there are no more of them: so they get about equally long. The rows of
    an owner stay together where the budget allows it; a row longer than the budget is alone. Rows of a micro-batch come
    longest first, so that equal lengths are neighbours.

    With `prefixes`, tokens that rows of a micro-batch begin with alike are counted once, and what has most in common
    with a micro-batch goes into it first. Nothing is made equally long at the price of more tokens.
    """
    if not lengths:
        return []
    units = _Units(lengths, owners, budget, prefixes)
    alone = [[unit] for unit in range(units.count) if units.tokens[unit] > budget]
    best = units.fill(budget)
    low, high = best.shortest_possible(units), best.longest
    for _ in range(_HALVINGS):
        if low >= high:
            break
        middle = (low + high) // 2
        found = units.fill(middle)
        if len(found.bins) <= len(best.bins) and found.tokens <= best.tokens:
            best, high = found, found.longest
        else:
            low = middle + 1
    rows = [[row for unit in bin_ for row in units.rows[unit]] for bin_ in (*alone, *best.bins)]
    return [sorted(each, key=lambda index: (-lengths[index], index)) for each in rows]


def mini_batches(lengths: Sequence[int], owners: Sequence[Hashable], parts: int) -> list[list[int]]:
    """Indices of the rows in `parts` mini-batches, balanced by tokens; every row in exactly one.

    The rows of an owner stay together, so a part may be empty. Longest owner first, each to the lightest part. Indices
    ascend within a part.
    """
    bins = [_Bin() for _ in range(parts)]
    for unit in _longest_first(_owned(lengths, owners)):
        min(bins, key=lambda bin_: bin_.tokens).add(unit)
    return [sorted(bin_.rows) for bin_ in bins]


@dataclass(slots=True, kw_only=True)
class _Bin:
    """Rows that go together."""

    rows: list[int] = field(default_factory=list[int])
    tokens: int = 0

    def add(self, other: _Bin) -> None:
        self.rows += other.rows
        self.tokens += other.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    """Micro-batches of one size."""

    bins: list[list[int]]
    """The units of each."""
    loads: list[int]
    """Tokens of each."""

    @property
    def tokens(self) -> int:
        return sum(self.loads)

    @property
    def longest(self) -> int:
        return max(self.loads, default=0)

    def shortest_possible(self, units: _Units) -> int:
        """No size below it can give as few micro-batches."""
        if not self.bins:
            return 0
        longest_unit = max(int(units.tokens[unit]) for bin_ in self.bins for unit in bin_)
        return max(longest_unit, -(-self.tokens // len(self.bins)))


@final
class _Units:
    """What moves together, longest first: an owner's rows, or single rows where they exceed the budget."""

    def __init__(
        self, lengths: Sequence[int], owners: Sequence[Hashable], budget: int, prefixes: PrefixOrder | None
    ) -> None:
        order = prefixes or PrefixOrder(rows=np.arange(len(lengths)), common=np.zeros(len(lengths), np.int64))
        self._order = order
        self._shares = bool(order.common.any())
        place = np.argsort(order.rows)

        def tokens(rows: Sequence[int]) -> int:
            return sum(lengths[row] for row in rows) - int(_among(order, place[list(rows)]).sum())

        units: list[_Bin] = []
        for owned in _owned(lengths, owners):
            rows = sorted(owned.rows, key=lambda row: place[row])
            whole = _Bin(rows=rows, tokens=tokens(rows))
            singles = [_Bin(rows=[row], tokens=lengths[row]) for row in owned.rows]
            units += [whole] if whole.tokens <= budget else singles
        units = _longest_first(units)
        self.count = len(units)
        self.rows = [unit.rows for unit in units]
        self.tokens = np.array([unit.tokens for unit in units], np.int64)
        """int64 [U]: of each by itself."""
        self._budget = budget
        # Unit by unit, the rows of each in the order of their tokens.
        laid = np.array([row for unit in units for row in unit.rows], np.int64)
        self._lengths = np.array(lengths, np.int64)[laid]
        self._places = place[laid]
        self._begins = np.cumsum([0, *(len(unit.rows) for unit in units)])
        spans = [slice(*self._begins[unit : unit + 2]) for unit in range(self.count)]
        self._among = np.concatenate([_among(order, self._places[span]) for span in spans])

    def fill(self, size: int) -> _Filling:
        """Micro-batches of at most `size` tokens, of the units that are within the budget."""
        bins: list[list[int]] = []
        loads: list[int] = []
        left = self.tokens <= self._budget
        while left.any():
            bins.append([])
            loads.append(0)
            shared, cost = self._among, self.tokens
            fits = left
            while fits.any():
                unit = int(np.argmax(np.where(fits, self.tokens - cost, -1)))
                bins[-1].append(unit)
                loads[-1] += int(cost[unit])
                left[unit] = False
                if self._shares:
                    shared = self._shared_with(unit, shared)
                    cost = np.add.reduceat(self._lengths - shared, self._begins[:-1])
                fits = left & (loads[-1] + cost <= size)
        return _Filling(bins=bins, loads=loads)

    def _shared_with(self, unit: int, shared: np.ndarray) -> np.ndarray:
        """int64 [R]: first tokens of each row that lie in a micro-batch, once a unit is added to it."""
        for place in self._places[slice(*self._begins[unit : unit + 2])]:
            shared = np.maximum(shared, self._order.with_row(int(place))[self._places])
        return shared


def _among(order: PrefixOrder, places: np.ndarray) -> np.ndarray:
    """int64: first tokens that the row at each of the places, ascending, has in common with those before it."""
    spans = zip(places[:-1].tolist(), places[1:].tolist(), strict=True)
    return np.array([0, *(int(order.common[left + 1 : right + 1].min()) for left, right in spans)], np.int64)


def _longest_first(units: Sequence[_Bin]) -> list[_Bin]:
    return sorted(units, key=lambda unit: (-unit.tokens, unit.rows))


def _owned(lengths: Sequence[int], owners: Sequence[Hashable]) -> list[_Bin]:
    found: dict[Hashable, _Bin] = {}
    for index, (length, owner) in enumerate(zip(lengths, owners, strict=True)):
        found.setdefault(owner, _Bin()).add(_Bin(rows=[index], tokens=length))
    return list(found.values())

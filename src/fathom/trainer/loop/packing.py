"""How a step's rows are cut: into micro-batches by a token budget, and into mini-batches of whole trajectories.

Pure and deterministic. How rows are cut never changes a step's result: its denominators are known before the cut.
Rows are given by their lengths in tokens and by their owners: rows of one trajectory have the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


def micro_batches(lengths: Sequence[int], owners: Sequence[Hashable], budget: int) -> list[list[int]]:
    """Indices of the rows in micro-batches of at most `budget` tokens; every row in exactly one.

    First fit, longest first. The rows of an owner stay together where the budget allows it; a row longer than the
    budget is alone. Rows of a micro-batch come longest first, so that equal lengths are neighbours.
    """
    bins: list[_Bin] = []
    for unit in _longest_first(_units(lengths, owners, budget)):
        target = next((bin_ for bin_ in bins if bin_.tokens + unit.tokens <= budget), None)
        if target is None:
            target = _Bin()
            bins.append(target)
        target.add(unit)
    return [sorted(bin_.rows, key=lambda index: (-lengths[index], index)) for bin_ in bins]


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


def _longest_first(units: Sequence[_Bin]) -> list[_Bin]:
    return sorted(units, key=lambda unit: (-unit.tokens, unit.rows))


def _units(lengths: Sequence[int], owners: Sequence[Hashable], budget: int) -> list[_Bin]:
    """What moves together: an owner's rows, or single rows where they exceed the budget."""
    units: list[_Bin] = []
    for owned in _owned(lengths, owners):
        singles = [_Bin(rows=[index], tokens=lengths[index]) for index in owned.rows]
        units += [owned] if owned.tokens <= budget else singles
    return units


def _owned(lengths: Sequence[int], owners: Sequence[Hashable]) -> list[_Bin]:
    found: dict[Hashable, _Bin] = {}
    for index, (length, owner) in enumerate(zip(lengths, owners, strict=True)):
        found.setdefault(owner, _Bin()).add(_Bin(rows=[index], tokens=length))
    return list(found.values())

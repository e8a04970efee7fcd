"""How a step's rows are cut: into micro-batches by a token budget, and into mini-batches of whole trajectories.

Pure and deterministic. How rows are cut never changes a step's result: its denominators are known before the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fathom.core.records.row import Row


def micro_batches(rows: Sequence[Row], budget: int) -> list[list[int]]:
    """Indices of `rows` in micro-batches of at most `budget` tokens; every row in exactly one.

    First fit, longest first. The rows of a trajectory stay together where the budget allows it; a row longer than the
    budget is alone. Rows of a micro-batch come longest first, so that equal lengths are neighbours.
    """
    bins: list[_Bin] = []
    for unit in sorted(_units(rows, budget), key=lambda unit: (-_tokens(rows, unit), unit)):
        tokens = _tokens(rows, unit)
        target = next((bin_ for bin_ in bins if bin_.tokens + tokens <= budget), None)
        if target is None:
            target = _Bin()
            bins.append(target)
        target.add(unit, tokens)
    return [sorted(bin_.rows, key=lambda index: (-len(rows[index].token_ids), index)) for bin_ in bins]


def mini_batches(rows: Sequence[Row], parts: int) -> list[list[int]]:
    """Indices of `rows` in `parts` mini-batches, balanced by tokens, trajectories whole; some may be empty.

    Longest trajectory first, each to the lightest part. Indices ascend within a part.
    """
    bins = [_Bin() for _ in range(parts)]
    for unit in sorted(_trajectories(rows), key=lambda unit: (-_tokens(rows, unit), unit)):
        min(bins, key=lambda bin_: bin_.tokens).add(unit, _tokens(rows, unit))
    return [sorted(bin_.rows) for bin_ in bins]


@dataclass(slots=True, kw_only=True)
class _Bin:
    rows: list[int] = field(default_factory=list[int])
    tokens: int = 0

    def add(self, unit: Sequence[int], tokens: int) -> None:
        self.rows.extend(unit)
        self.tokens += tokens


def _units(rows: Sequence[Row], budget: int) -> list[list[int]]:
    """What moves together: a trajectory's rows, or single rows where they exceed the budget."""
    units: list[list[int]] = []
    for trajectory in _trajectories(rows):
        fits = _tokens(rows, trajectory) <= budget
        units += [trajectory] if fits else [[index] for index in trajectory]
    return units


def _trajectories(rows: Sequence[Row]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(row.trajectory, []).append(index)
    return list(found.values())


def _tokens(rows: Sequence[Row], indices: Sequence[int]) -> int:
    return sum(len(rows[index].token_ids) for index in indices)

"""Which part of the history survives: resuming from a checkpoint undoes what came after it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Where an incarnation begins."""

    seq: int
    """Its `IncarnationOpened`."""
    parent_seq: int | None
    """Last event of the history it goes on from. None: a fresh run."""


@final
@dataclass(frozen=True, slots=True)
class Lineage:
    """A chain of stretches of events, oldest first, one per incarnation that left something."""

    ranges: tuple[tuple[int, int], ...]
    """Inclusive first and last sequence numbers, ascending and disjoint."""

    def __contains__(self, seq: int) -> bool:
        return any(first <= seq <= last for first, last in self.ranges)

    @classmethod
    def ending_at(cls, openings: Iterable[Opening], last: int) -> Lineage:
        """The history behind event `last` (itself included): its incarnation, that one's parent, and so on."""
        ordered = sorted(openings, key=lambda opening: opening.seq, reverse=True)
        ranges: list[tuple[int, int]] = []
        end: int | None = last
        for opening in ordered:
            if end is not None and opening.seq <= end:
                ranges.append((opening.seq, end))
                end = opening.parent_seq
        return cls(tuple(reversed(ranges)))

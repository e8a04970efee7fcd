"""What the buffer's transitions return: facts for the ledger, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass

from fathom.core.records.step import TrainBatch
from fathom.ledger.events import AttemptMoved, GroupDequeued, OccurrenceClosed, TrajectoryEnded

Fact = AttemptMoved | OccurrenceClosed | GroupDequeued
"""What a transition changed, ready for the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A trajectory ended."""

    ended: TrajectoryEnded
    """The event that goes with its record."""
    facts: tuple[Fact, ...]
    """What became of its group; empty while other members run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A batch for the trainer."""

    batch: TrainBatch
    """Its groups, earliest deadline first."""
    facts: tuple[Fact, ...]
    """Groups dequeued, and what was dropped on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """No batch now: ask again after the next arrival. Facts in it mean that groups left, so another may start."""

    reason: str
    """What is waited for."""
    facts: tuple[Fact, ...]
    """What was dropped on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """No batch ever again: the data are exhausted and everything is decided."""

    facts: tuple[Fact, ...]
    """What was dropped on the way."""

"""What the reader answers with: index entries, without the arrays they point to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from fathom.core.ids import GroupId, Occurrence, TaskId, TrajectoryId
from fathom.core.records.trajectory import Trajectory, TrajectoryStatus
from fathom.ledger.events import Event

E = TypeVar("E", bound=Event, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Generic[E]):
    """An event with its place in the history."""

    seq: int
    """Its number, from 1, without gaps."""
    at_s: float
    """Wall-clock time it was appended, seconds since the epoch."""
    event: E
    """The event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEntry:
    """A trajectory in the index."""

    seq: int
    """Its `TrajectoryEnded`."""
    id: TrajectoryId
    """The trajectory."""
    group: GroupId
    """Its group."""
    member: int
    """Its place there."""
    occurrence: Occurrence
    """The use of the task."""
    attempt: int
    """Attempt at the occurrence."""
    task: TaskId
    """The task."""
    status: TrajectoryStatus
    """How it ended."""
    reward: float | None
    """Its reward. None: ungraded."""
    sampled_tokens: int
    """Sampled tokens."""
    started_s: float
    """When it started, seconds since the epoch."""
    ended_s: float
    """When it ended."""
    content_hash: str
    """BLAKE3 (hex) of its packed record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTrajectory:
    """A trajectory read back and checked against its content hash."""

    entry: TrajectoryEntry
    """Its index entry."""
    trajectory: Trajectory
    """The record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUse:
    """One row of one step, and where it came from."""

    seq: int
    """The `StepTaken`."""
    step: int
    """Number of the step."""
    place: int
    """Place of the row in the batch."""
    trajectory: TrajectoryId
    """The trajectory it was made from."""
    branch: int
    """Its branch."""
    tokens: int
    """Tokens with loss."""
    in_gradient: int
    """Of those, tokens that had a gradient."""
    group: GroupId | None
    """The trajectory's group. None: the ledger holds no such trajectory."""
    occurrence: Occurrence | None
    """Its occurrence. None: as above."""
    task: TaskId | None
    """Its task. None: as above."""

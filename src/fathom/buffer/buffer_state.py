"""The buffer in a checkpoint."""

from __future__ import annotations

import msgspec

from fathom.buffer.books import BooksState
from fathom.buffer.source import SourceState
from fathom.core.ids import GroupId, Occurrence, TrajectoryId


class HeldGroup(msgspec.Struct, frozen=True, tag="held_group.1"):
    """A buffered group in a checkpoint. Its records lie in the ledger."""

    group: GroupId
    """The group."""
    occurrence: Occurrence
    """Its occurrence."""
    version: int
    """Version published when it started."""
    finished_s: float
    """When its last member ended, seconds since the epoch."""
    graded: tuple[TrajectoryId, ...]
    """Its graded members, in member order."""


class BufferState(msgspec.Struct, frozen=True, tag="buffer.1"):
    """Clock, data order, books and buffer at a checkpoint."""

    version: int
    """Optimizer steps taken."""
    source: SourceState
    """The order of the data."""
    books: BooksState
    """The books."""
    held: tuple[HeldGroup, ...]
    """Buffered groups, in order of arrival."""

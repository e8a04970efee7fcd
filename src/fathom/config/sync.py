"""Sync: how weights reach the engines."""

from __future__ import annotations

from pydantic import Field

from fathom.config.families import TransportKind
from fathom.config.section import Section


class SyncConfig(Section):
    """How weights reach the engine."""

    transport: TransportKind = TransportKind.SHARED
    """The transport."""
    min_engines: int = Field(default=1, gt=0)
    """A publication needs at least this many engines to commit; at most `engine.count`."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of each phase."""
    gap_rows: int = Field(default=4, ge=0)
    """Recorded rows scored by engine and trainer at each publication (the same-version gap). 0: not measured."""
    probe_tolerance: float | None = Field(default=None, gt=0)
    """Nats, on average, by which an engine that cannot digest the memory it computes with may differ from the trainer
    when it is probed at each commit. None: 0.001 in float32, 0.15 in bfloat16."""

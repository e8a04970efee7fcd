"""What became of a version that was published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fathom.core.ids import EngineId, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A version was delivered. Times are of the slowest engine that took it."""

    version: PolicyVersion
    """What serves now."""
    parent: PolicyVersion | None
    """What served before. None: nothing did."""
    cast_digest: str | None
    """See `Manifest.cast_digest`."""
    size_bytes: int
    """Bytes of the version."""
    moved_bytes: int
    """Bytes that travelled, to all engines that took it."""
    write_s: float
    """Seconds to digest the version, unless its digest came with it, and to take its bytes: the trainer may go on."""
    stage_s: float
    """Seconds to stage."""
    verify_s: float
    """Seconds to verify."""
    commit_s: float
    """Seconds to commit."""
    pause_s: float
    """Seconds without generation that the commit caused."""
    committed: tuple[EngineId, ...]
    """Engines that serve it."""
    fenced: Mapping[EngineId, str]
    """Engines that failed in this publication, and why. They get no requests until restored."""

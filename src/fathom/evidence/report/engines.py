"""What became of each engine of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fathom.ledger.entries import Recorded
from fathom.ledger.events import (
    EngineFenced,
    EngineJoined,
    EngineLeft,
    EngineRestored,
    EngineServes,
    Event,
    IncarnationOpened,
)
from fathom.ledger.reader import LedgerReader

_KINDS: tuple[type[Event], ...] = (
    IncarnationOpened,
    EngineJoined,
    EngineServes,
    EngineFenced,
    EngineRestored,
    EngineLeft,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLife:
    """One engine, over all processes that bore its name. Counts are of all incarnations, undone work included."""

    engine: str
    """Its name."""
    state: str
    """`serves`, `fenced`, `joined` (it holds no version yet) or `left`; as the run was when it ended, if it did."""
    version: int | None
    """The version it held last. None: none."""
    fenced: int
    """Times it was fenced."""
    restored: int
    """Times it was brought back."""
    discarded: int
    """Generations it had not finished when it was fenced or left."""
    out_s: float
    """Seconds from its fences to its restorations."""
    last_reason: str
    """Why it was fenced last, or left. Empty: neither."""


def engine_lives(reader: LedgerReader) -> tuple[EngineLife, ...]:
    """Every engine, in the order in which they joined."""
    entries: list[Recorded[Event]] = [entry for kind in _KINDS for entry in reader.events(kind, include_undone=True)]
    lives: dict[str, EngineLife] = {}
    for entry in sorted(entries, key=lambda entry: entry.seq):
        event = entry.event
        if isinstance(event, IncarnationOpened):
            lives = {name: replace(life, state="left") for name, life in lives.items()}
        if isinstance(event, EngineJoined | EngineServes | EngineFenced | EngineRestored | EngineLeft):
            lives[event.engine] = _next(lives.get(event.engine) or _born(event.engine), event)
    return tuple(lives.values())


def _born(engine: str) -> EngineLife:
    return EngineLife(
        engine=engine, state="joined", version=None, fenced=0, restored=0, discarded=0, out_s=0.0, last_reason=""
    )


def _next(
    life: EngineLife, event: EngineJoined | EngineServes | EngineFenced | EngineRestored | EngineLeft
) -> EngineLife:
    match event:
        case EngineJoined():
            return replace(life, state="joined" if event.version is None else "serves")
        case EngineServes():
            state = "serves" if life.state == "joined" else life.state
            return replace(life, state=state, version=event.version.number)
        case EngineFenced():
            discarded = life.discarded + event.discarded
            return replace(life, state="fenced", fenced=life.fenced + 1, discarded=discarded, last_reason=event.reason)
        case EngineRestored():
            state = "joined" if event.version is None else "serves"
            return replace(life, state=state, restored=life.restored + 1, out_s=life.out_s + event.seconds)
        case EngineLeft():
            discarded = life.discarded + event.discarded
            return replace(life, state="left", discarded=discarded, last_reason=event.reason)

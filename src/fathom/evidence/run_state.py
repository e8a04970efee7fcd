"""How a run stands, told from the end of its ledger."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fathom.ledger.events import IncarnationOpened, RunEnded, StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.ledger.tuning_events import PreferenceStepped, SupervisedStepped


class RunPhase(StrEnum):
    """What a run is doing."""

    EMPTY = "empty"
    """It never started."""
    OPEN = "open"
    """It runs, or was killed: the ledger alone cannot tell."""
    ENDED = "ended"
    """Its newest incarnation ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """How a run stands."""

    phase: RunPhase
    """What it is doing."""
    reason: str
    """Why it ended; empty otherwise."""
    step: int
    """Optimizer steps taken on the surviving lineage."""
    reward_mean: float | None
    """Mean reward of the newest step. None: none yet, or none graded."""


def state_of(reader: LedgerReader) -> RunState:
    """Cheap: a few look-ups by index."""
    opened = reader.latest(IncarnationOpened)
    ended = reader.latest(RunEnded)
    newest = reader.latest(StepTaken)
    over = opened is not None and ended is not None and ended.seq > opened.seq
    steps = [event.number for event in (newest.event,) if event.stepped] if newest else []
    step = steps[0] if steps else newest.event.number - 1 if newest else opened.event.start_step if opened else 0
    tuned = reader.latest(SupervisedStepped) or reader.latest(PreferenceStepped)
    return RunState(
        phase=RunPhase.EMPTY if opened is None else RunPhase.ENDED if over else RunPhase.OPEN,
        reason=ended.event.reason if ended is not None and over else "",
        step=step if tuned is None else tuned.event.number,
        reward_mean=newest.event.reward_mean if newest else None,
    )

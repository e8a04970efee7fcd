"""What happens in the run goes to the ledger, and to whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import final

from fathom.core.records.step import RowOutcome
from fathom.core.records.trajectory import Trajectory
from fathom.ledger.events import Event, FaultSeen, StepTaken, TrajectoryEnded
from fathom.ledger.writer import LedgerWriter

Observer = Callable[[Event], None]


@final
class Recorder:
    """The one place that writes the ledger. Observers see each event after it was appended; they must not raise."""

    def __init__(self, writer: LedgerWriter, observers: Iterable[Observer], incarnation: int) -> None:
        self._writer = writer
        self.incarnation = incarnation
        """The incarnation whose history this is."""
        self._observers = tuple(observers)

    @property
    def last_seq(self) -> int:
        """Number of the newest event."""
        return self._writer.last_seq

    def record(self, *events: Event) -> None:
        """Append events without arrays."""
        for event in events:
            self._writer.append(event)
            self._show(event)

    def trajectory(self, trajectory: Trajectory, ended: TrajectoryEnded) -> None:
        """Append the end of a trajectory with its record."""
        self._writer.append_trajectory(trajectory, ended)
        self._show(ended)

    def step(self, step: StepTaken, rows: tuple[RowOutcome, ...]) -> None:
        """Append an optimizer step with its rows; it is durable before anybody sees it."""
        self._writer.append_step(step, rows)
        self.commit()
        self._show(step)

    def fault(self, component: str, error: Exception) -> None:
        """Append an infrastructure failure."""
        self.record(FaultSeen(component=component, kind=type(error).__name__, detail=str(error)))

    def commit(self) -> None:
        """Make everything until here durable."""
        self._writer.commit()

    def close(self) -> None:
        """Commit and close."""
        self._writer.close()

    def _show(self, event: Event) -> None:
        for observer in self._observers:
            observer(event)

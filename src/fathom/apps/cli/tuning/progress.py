"""Live progress of a run that tunes: a bar on a terminal, a line per step elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fathom.ledger.events import Event, FaultSeen, IncarnationOpened, RunEnded, WarmStartStepped
from fathom.ledger.tuning_events import (
    ModelSaved,
    PreferenceEvaluated,
    PreferenceStepped,
    ReferenceScored,
    SupervisedEvaluated,
    SupervisedStepped,
)


@final
class TuningProgress:
    """Shows events as they are recorded."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=total_steps)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        line = self._take(event)
        if line:
            self._console.print(Text(line), highlight=False)

    def _take(self, event: Event) -> str:
        """Move the bar; returns a line to print, or nothing."""
        match event:
            case IncarnationOpened():
                self._bar.update(self._task, completed=event.start_step)
                return f"incarnation {event.incarnation}, from step {event.start_step}"
            case WarmStartStepped():
                self._bar.update(self._task, description=f"warm start {event.step}, loss {event.loss:.3f}")
                return f"warm start step {event.step}: loss {event.loss:.3f}" if event.step % 50 == 0 else ""
            case ReferenceScored():
                return f"the reference has scored {event.pairs} pairs ({event.seconds:.1f} s)"
            case SupervisedStepped():
                return self._step(event.number, f"loss {event.nll:.4f}", event.forward_tokens, event.step_s)
            case PreferenceStepped():
                told = f"loss {event.loss:.4f}, accuracy {event.accuracy:.1%}, margin {event.margin:+.3f}"
                return self._step(event.number, told, event.forward_tokens, event.step_s)
            case SupervisedEvaluated():
                return (
                    f"held out at step {event.step}: loss {event.loss:.4f}, probability of an answer "
                    f"{event.probability:.1%} ({event.seconds:.1f} s)"
                )
            case PreferenceEvaluated():
                return (
                    f"held out at step {event.step}: accuracy {event.accuracy:.1%}, chosen is likelier "
                    f"{event.preferred:.1%}, probability of chosen {event.chosen_probability:.1%} and of rejected "
                    f"{event.rejected_probability:.1%} ({event.seconds:.1f} s)"
                )
            case ModelSaved():
                return f"model of step {event.step}: {event.path}"
            case FaultSeen():
                return f"fault in {event.component}: {event.kind}: {(event.detail.splitlines() or [''])[0]}"
            case RunEnded():
                return f"ended: {event.reason} (checkpoint at step {event.step})"
            case _:
                return ""

    def _step(self, number: int, told: str, tokens: int, seconds: float) -> str:
        self._bar.update(self._task, completed=number, description=told)
        rate = f"{tokens / seconds:,.0f} tokens/s" if seconds else ""
        return "" if self._console.is_terminal else f"step {number}/{self._total}: {told}, {tokens} tokens, {rate}"

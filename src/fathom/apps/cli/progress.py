"""Live progress in the terminal: what was learnt, how fast, how old, and what waits for what."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self, final

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fathom.ledger.events import (
    DemonstrationsPlayed,
    EngineJoined,
    EngineLeft,
    EngineRestored,
    Evaluated,
    Event,
    FaultSeen,
    GroupDequeued,
    IncarnationOpened,
    LoopSampled,
    PublicationCancelled,
    Published,
    RunEnded,
    StepTaken,
    TrajectoryEnded,
    WarmStartStepped,
)

_BARS = " ▁▂▃▄▅▆▇█"
_HISTORY = 60
_REFRESH_PER_S = 4

_Line = str | tuple[str, str]
"""Text, or text and its style. What others wrote is in it, so it is never read as markup."""


@final
class Progress:
    """Shows events as they are recorded: a live panel on a terminal, a line per step elsewhere."""

    def __init__(self, console: Console, total_steps: int, *, of: str = "") -> None:
        """`of`: the adapter whose events they are, where others are shown, too: lines with its name, no panel."""
        self._console = console
        self._of = of
        self._total = total_steps
        self._live = (
            Live(console=console, refresh_per_second=_REFRESH_PER_S) if console.is_terminal and not of else None
        )
        self._began = time.monotonic()
        self._rewards: deque[float] = deque(maxlen=_HISTORY)
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=512)
        self._ages: deque[int] = deque(maxlen=256)
        self._step: StepTaken | None = None
        self._loop: LoopSampled | None = None
        self._publication: Published | None = None
        self._phase = "starting"

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        line = self._take(event)
        if self._live is not None:
            self._live.update(self._panel())
        if line:
            named = (f"{self._of}: ", line) if self._of else (line,)
            self._console.print(Text.assemble(*named), highlight=False)

    def _take(self, event: Event) -> _Line:
        """Remember what the panel shows; returns a line to print above it, or nothing."""
        match event:
            case IncarnationOpened():
                self._phase = "resumed" if event.parent_seq else "starting"
                return f"incarnation {event.incarnation}, from step {event.start_step}"
            case DemonstrationsPlayed():
                self._phase = f"playing demonstrations, {event.played} of {event.of}"
                told = f"{event.of} demonstrations with {event.tokens} tokens to imitate, in {event.seconds:.1f} s"
                return told if event.played == event.of else ""
            case WarmStartStepped():
                self._phase = f"warm start, step {event.step}, loss {event.loss:.3f}"
                return f"warm start step {event.step}: loss {event.loss:.3f}" if event.step % 50 == 0 else ""
            case TrajectoryEnded():
                self._arrivals.append((time.monotonic(), event.sampled_tokens))
            case GroupDequeued() if event.age is not None:
                self._ages.append(event.age)
            case LoopSampled():
                self._loop = event
            case Published():
                self._publication = event
            case StepTaken():
                self._phase = "training"
                self._step = event
                if event.reward_mean is not None:
                    self._rewards.append(event.reward_mean)
                return "" if self._live is not None else self._step_line(event)
            case Evaluated():
                return (
                    f"evaluation at {event.version.name}: pass@{event.pass_at} {event.pass_rate:.1%} "
                    f"[{event.low:.1%}, {event.high:.1%}] on {event.tasks} held-out tasks ({event.seconds:.1f} s)"
                )
            case EngineJoined() if event.asked:
                return f"{event.engine} joined in {event.seconds:.1f} s"
            case EngineRestored():
                return f"{event.engine} serves again after {event.seconds:.1f} s"
            case EngineLeft():
                return f"{event.engine} left: {event.reason}"
            case FaultSeen():
                return f"fault in {event.component}: {event.kind}: {(event.detail.splitlines() or [''])[0]}", "red"
            case PublicationCancelled():
                return f"{event.version.name} was not delivered: {event.reason}", "red"
            case RunEnded():
                return f"ended: {event.reason} (checkpoint at step {event.step})"
            case _:
                pass
        return ""

    def _step_line(self, event: StepTaken) -> str:
        mismatch = f", |log r| {event.mismatch.abs_log_ratio_mean:.4f}" if event.mismatch else ""
        reward = "none" if event.reward_mean is None else f"{event.reward_mean:.3f}"
        skipped = "" if event.stepped else f" NOT STEPPED: {event.why_not}"
        return (
            f"step {event.number}/{self._total}: reward {reward}, {event.metrics.tokens} tokens, "
            f"{event.metrics.step_s:.2f} s, waited {event.waited_s:.2f} s{mismatch}{skipped}"
        )

    def _panel(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right")
        table.add_column()
        step = self._step
        done = step.number if step else 0
        table.add_row(
            "progress", f"{self._phase}: step {done} of {self._total}, {time.monotonic() - self._began:.0f} s"
        )
        if self._rewards:
            table.add_row("reward", f"{self._rewards[-1]:.3f}  {sparkline(list(self._rewards))}")
        table.add_row("rollout", f"{self._tokens_per_s():.0f} tokens/s")
        if step:
            table.add_row(
                "trainer",
                f"{step.metrics.step_s:.2f} s a step, waited {step.waited_s:.2f} s, loss {step.metrics.loss:+.4f}, "
                f"gradient {step.metrics.grad_norm:.3f}",
            )
            if step.mismatch:
                m = step.mismatch
                table.add_row(
                    "mismatch",
                    f"mean |log r| {m.abs_log_ratio_mean:.5f}, max r {m.ratio_max:.3f}, ESS {m.ess:.3f}, "
                    f"capped {m.clipped_share:.2%}",
                )
        if self._ages:
            counts = ", ".join(f"{age}: {self._ages.count(age)}" for age in sorted(set(self._ages)))
            table.add_row("ages", f"groups by age at dequeue  {counts}")
        if self._publication:
            p = self._publication
            gap = f", same-version gap {p.gap.abs_log_ratio_mean:.2e}" if p.gap else ""
            table.add_row("weights", f"{p.version.name} over {p.transport}, paused {p.pause_s * 1e3:.1f} ms{gap}")
        if self._loop:
            loop = self._loop
            table.add_row(
                "buffer",
                f"{loop.in_flight_trajectories} trajectories ({loop.in_flight_groups} groups) in flight, "
                f"{loop.buffered_groups} groups wait",
            )
            table.add_row("trainer waits for", Text(loop.trainer_waits_for or "nothing"))
            table.add_row("source waits for", Text(loop.source_waits_for or "nothing"))
        return Panel(Group(table), title="fathom", border_style="blue", expand=False)

    def _tokens_per_s(self) -> float:
        if len(self._arrivals) < 2:
            return 0.0
        elapsed = time.monotonic() - self._arrivals[0][0]
        return sum(tokens for _, tokens in self._arrivals) / max(elapsed, 1e-9)


def sparkline(values: list[float]) -> str:
    """A curve in one line of text, scaled to its own range."""
    low, high = min(values), max(values)
    if high - low < 1e-9:
        return _BARS[4] * len(values)
    return "".join(_BARS[1 + round((value - low) / (high - low) * (len(_BARS) - 2))] for value in values)

"""Trackers: fed from the ledger by a thread of their own, so that one that fails or blocks never stops training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, final

import msgspec

from fathom.config.families import Tracker
from fathom.ledger.events import Evaluated, Event, Published, StepTaken, WarmStartStepped
from fathom.ledger.reader import LedgerReader
from fathom.ledger.tuning_events import (
    PreferenceEvaluated,
    PreferenceStepped,
    SupervisedEvaluated,
    SupervisedStepped,
)

_POLL_S = 1.0
_CLOSE_S = 5.0


class Sink(Protocol):
    """Where one tracker puts numbers."""

    def put(self, name: str, value: float, step: int) -> None:
        """Store one number."""
        ...

    def close(self) -> None:
        """Write out what is held back."""
        ...


@final
class TensorBoardSink:
    """Event files for TensorBoard. Each incarnation has files of its own, with the whole history that survives."""

    def __init__(self, folder: Path, incarnation: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder / "tensorboard" / f"incarnation-{incarnation}"))

    def put(self, name: str, value: float, step: int) -> None:
        """Store one number."""
        self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is held back."""
        self._writer.close()


@final
class WandbSink:
    """A Weights & Biases run, offline: `wandb sync` uploads it when a person wants that."""

    def __init__(self, folder: Path, incarnation: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]  # an extra

        name = f"{folder.name}-{incarnation}"
        self._run = wandb.init(project="fathom", name=name, dir=str(folder), mode="offline")

    def put(self, name: str, value: float, step: int) -> None:
        """Store one number."""
        self._run.log({name: value, "step": step})

    def close(self) -> None:
        """Write out what is held back."""
        self._run.finish()


SINKS: dict[Tracker, Callable[[Path, int], Sink]] = {
    Tracker.TENSORBOARD: TensorBoardSink,
    Tracker.WANDB: WandbSink,
}
"""How each tracker is opened, given the run's folder and the incarnation; runs in the tracker's own thread."""


@final
class TrackerFeed:
    """Follows a ledger and puts its numbers into one sink, from the first event on, until it is closed.

    Whatever the sink does, hanging included, is its thread's business alone. One that raises is fed no more.
    """

    def __init__(self, ledger: Path, open_sink: Callable[[], Sink], *, close_s: float = _CLOSE_S) -> None:
        """Begin to follow. `close_s` bounds what `close` waits."""
        self._ledger = ledger
        self._open_sink = open_sink
        self._close_s = close_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._feed, name="tracker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Feed what is left, for at most a few seconds."""
        self._ending.set()
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            logging.getLogger(__name__).warning("a tracker hangs and is left behind; its last numbers may be missing")

    def _feed(self) -> None:
        try:
            sink = self._open_sink()
            for name, value, step in self._numbers():
                sink.put(name, value, step)
            sink.close()
        except Exception as error:  # noqa: BLE001  # foreign code: whatever it raises, training goes on
            logging.getLogger(__name__).warning("a tracker failed and is fed no more: %r", error)

    def _numbers(self) -> Iterator[tuple[str, float, int]]:
        """Those of every event until the feed is closed."""
        seq, ending = 0, False
        with LedgerReader(self._ledger) as reader:
            while not ending:
                ending = self._ending.wait(_POLL_S)
                for entry in reader.history(since=seq):
                    yield from numbers(entry.event)
                    seq = entry.seq


def numbers(event: Event) -> Iterator[tuple[str, float, int]]:
    """The (name, value, step) that a tracker shows of an event."""
    match event:
        case StepTaken():
            if event.reward_mean is not None:
                yield "reward/mean", event.reward_mean, event.number
            yield from _fields("step", event.metrics, event.number)
            if event.mismatch is not None:
                yield from _fields("mismatch", event.mismatch, event.number)
            yield "time/waited_s", event.waited_s, event.number
        case Published():
            yield "publication/pause_s", event.pause_s, event.version.number
            if event.gap is not None:
                yield from _fields("same_version_gap", event.gap, event.version.number)
        case Evaluated():
            yield "evaluation/pass_rate", event.pass_rate, event.version.number
            yield "evaluation/reward_mean", event.reward_mean, event.version.number
        case SupervisedStepped() | PreferenceStepped():
            yield from _fields("step", event, event.number)
        case SupervisedEvaluated() | PreferenceEvaluated():
            yield from _fields("held_out", event, event.step)
        case WarmStartStepped():
            yield "warm_start/loss", event.loss, event.step
        case _:
            return


def _fields(prefix: str, record: msgspec.Struct, step: int) -> Iterator[tuple[str, float, int]]:
    for name in record.__struct_fields__:
        value = msgspec.structs.asdict(record)[name]
        if isinstance(value, int | float):
            yield f"{prefix}/{name}", float(value), step

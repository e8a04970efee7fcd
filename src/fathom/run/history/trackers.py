"""Trackers: fed from the ledger by a thread of their own, so that one that fails or blocks never stops training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, final

import msgspec

from fathom.config.families import Tracker
from fathom.core.errors import MissingDependencyError
from fathom.ledger.events import Evaluated, Event, Published, StepTaken, WarmStartStepped
from fathom.ledger.reader import LedgerReader

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
    """Event files for TensorBoard."""

    def __init__(self, folder: Path, name: str) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise MissingDependencyError("trackers = ['tensorboard']", "tensorboard", "tensorboard") from None
        self._writer = SummaryWriter(log_dir=str(folder / "tensorboard" / name))

    def put(self, name: str, value: float, step: int) -> None:
        """Store one number."""
        self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is held back."""
        self._writer.close()


@final
class WandbSink:
    """A Weights & Biases run, offline: `wandb sync` uploads it when a person wants that."""

    def __init__(self, folder: Path, name: str) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]  # an extra
        except ImportError:
            raise MissingDependencyError("trackers = ['wandb']", "wandb", "wandb") from None
        self._run = wandb.init(project="fathom", name=name, dir=str(folder), mode="offline")

    def put(self, name: str, value: float, step: int) -> None:
        """Store one number."""
        self._run.log({name: value, "step": step})

    def close(self) -> None:
        """Write out what is held back."""
        self._run.finish()


SINKS: dict[Tracker, Callable[[Path, str], Sink]] = {
    Tracker.TENSORBOARD: TensorBoardSink,
    Tracker.WANDB: WandbSink,
}


@final
class TrackerFeed:
    """Follows a ledger and puts its numbers into sinks. A sink that raises is left out from then on, and logged."""

    def __init__(self, ledger: Path, sinks: Sequence[Sink]) -> None:
        self._ledger = ledger
        self._sinks = list(sinks)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="trackers", daemon=True)

    def start(self) -> None:
        """Begin to follow, if anything is to be fed."""
        if self._sinks:
            self._thread.start()

    def close(self) -> None:
        """Feed what is left, for at most a few seconds."""
        self._ending.set()
        if self._sinks:
            self._thread.join(_CLOSE_S)

    def _follow(self) -> None:
        seq = 0
        with LedgerReader(self._ledger) as reader:
            ending = False
            while not ending:
                ending = self._ending.wait(_POLL_S)
                for entry in reader.history(since=seq):
                    self._feed(entry.event)
                    seq = entry.seq
        for sink in self._sinks:
            self._guard(sink, sink.close)

    def _feed(self, event: Event) -> None:
        for name, value, step in numbers(event):
            for sink in list(self._sinks):
                self._guard(sink, lambda sink=sink: sink.put(name, value, step))  # noqa: B023  # called at once

    def _guard(self, sink: Sink, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  # foreign code: whatever it raises, training goes on
            self._sinks.remove(sink)
            logging.getLogger(__name__).warning("%s failed and is left out from now on: %r", type(sink).__name__, error)


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
        case WarmStartStepped():
            yield "warm_start/loss", event.loss, event.step
        case _:
            return


def _fields(prefix: str, record: msgspec.Struct, step: int) -> Iterator[tuple[str, float, int]]:
    for name in record.__struct_fields__:
        value = msgspec.structs.asdict(record)[name]
        if value is not None:
            yield f"{prefix}/{name}", float(value), step

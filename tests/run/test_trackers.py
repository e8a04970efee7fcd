"""Trackers are fed from the ledger, and nothing a sink does reaches the run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fathom.ledger.events import StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.run.history.trackers import Sink, TensorBoardSink, TrackerFeed
from synthetic.history import write_run


class Scripted:
    """Keeps what it is given; `act` may do anything else."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.numbers: list[tuple[str, float, int]] = []
        self.closed = False
        self._act = act

    def put(self, name: str, value: float, step: int) -> None:
        self.numbers.append((name, value, step))
        self._act()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=4)


def feed(run: Path, sink: Callable[[], Sink], close_s: float = 5.0) -> None:
    TrackerFeed(run / "ledger", sink, close_s=close_s).close()


def test_a_sink_gets_every_step_of_the_ledger_once(run: Path) -> None:
    sink = Scripted()
    feed(run, lambda: sink)
    with LedgerReader(run / "ledger") as reader:
        rewards = [(e.event.number, e.event.reward_mean) for e in reader.events(StepTaken)]
    assert [(step, value) for name, value, step in sink.numbers if name == "reward/mean"] == rewards
    assert {name.partition("/")[0] for name, _, _ in sink.numbers} >= {"step", "mismatch", "publication", "evaluation"}
    assert sink.closed


def test_a_sink_that_raises_is_fed_no_more(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("the network is gone")

    sink = Scripted(fail)
    with caplog.at_level(logging.WARNING):
        feed(run, lambda: sink)
    assert len(sink.numbers) == 1
    assert "the network is gone" in caplog.text


def test_a_sink_that_cannot_be_opened_is_left_out(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> Sink:
        raise RuntimeError("no account")

    feed(run, refuse)
    assert "no account" in caplog.text


def test_a_sink_that_blocks_is_left_behind(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    free = threading.Event()
    began = time.monotonic()
    feed(run, lambda: Scripted(lambda: free.wait(30) and None), close_s=0.1)
    assert time.monotonic() - began < 5
    assert "hangs" in caplog.text
    free.set()


def test_tensorboard_gets_event_files(run: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra `tensorboard`")
    feed(run, lambda: TensorBoardSink(run, 2), close_s=60.0)
    (file,) = (run / "tensorboard" / "incarnation-2").iterdir()
    assert b"reward/mean" in file.read_bytes()

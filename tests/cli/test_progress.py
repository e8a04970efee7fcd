"""Live progress, from fabricated events: a line per step into a file, a panel on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fathom.apps.cli.progress import Progress, sparkline
from fathom.ledger.events import Event, FaultSeen, LoopSampled, PublicationCancelled, StepTaken, WarmStartStepped
from fathom.ledger.reader import LedgerReader
from synthetic.history import write_run
from synthetic.records import policy


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    run: Path = write_run(tmp_path_factory.mktemp("progress") / "run", steps=5)
    with LedgerReader(run / "ledger") as reader:
        return [entry.event for entry in reader.history()]


def shown(events: list[Event], *, terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=160, no_color=True)
    with Progress(console, total_steps=5) as progress:
        for event in events:
            progress(event)
    return stream.getvalue()


def test_every_step_is_a_line_in_a_file(events: list[Event]) -> None:
    text = shown(events, terminal=False)
    steps = [event for event in events if isinstance(event, StepTaken)]
    assert steps
    for step in steps:
        assert f"step {step.number}/5: reward " in text
    assert "held-out tasks" in text
    assert "ended: steps" in text
    assert "\x1b" not in text


def test_the_panel_says_what_waits_for_what(events: list[Event]) -> None:
    loop = LoopSampled(
        in_flight_trajectories=12,
        in_flight_groups=3,
        buffered_groups=7,
        oldest_version=2,
        trainer_waits_for="2 finished groups: 1 are, 3 run",
        source_waits_for="the staleness bound",
    )
    text = shown([*events, loop], terminal=True)
    for part in (
        "step 5 of 5",
        "tokens/s",
        "mean |log r|",
        "groups by age at dequeue",
        "12 trajectories (3 groups) in flight, 7 groups wait",
        "2 finished groups: 1 are, 3 run",
        "the staleness bound",
        "over shared",
    ):
        assert part in text, part


@pytest.mark.parametrize("terminal", [False, True])
def test_what_went_wrong_is_said_as_it_is(terminal: bool) -> None:
    bad: list[Event] = [
        FaultSeen(component="engine-0 [/red]", kind="EngineError", detail="path [/tmp] is [bold]gone\nsecond line"),
        FaultSeen(component="engine-0", kind="EngineError", detail=""),
        PublicationCancelled(version=policy(3), reason="digest [/] differs"),
        WarmStartStepped(step=50, loss=0.25, tokens=10),
    ]
    text = shown(bad, terminal=terminal)
    assert "fault in engine-0 [/red]: EngineError: path [/tmp] is [bold]gone" in text
    assert "second line" not in text
    assert "v3@1 was not delivered: digest [/] differs" in text
    assert "warm start step 50: loss 0.250" in text


def test_before_the_first_event_there_is_a_panel_too() -> None:
    assert shown([WarmStartStepped(step=1, loss=0.25, tokens=10)], terminal=True).count("fathom")


def test_a_curve_follows_its_values() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([0.5, 0.5]) == "▄▄"

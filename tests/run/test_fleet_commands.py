"""`fathom fleet` speaks to a run that goes on, and says so when none does."""

from __future__ import annotations

import signal
from pathlib import Path

from small_runs import SCRIPTED, RunProcess, small_config
from typer.testing import CliRunner, Result

from fathom.apps.cli.main import app
from fathom.ledger.events import EngineJoined, EngineLeft, StepTaken
from fathom.ledger.reader import LedgerReader


def fleet(*words: str) -> Result:
    return CliRunner().invoke(app, ["fleet", *words])


def test_engines_join_and_leave_a_run_that_goes_on(tmp_path: Path) -> None:
    process = RunProcess(small_config(tmp_path, SCRIPTED, "trainer.steps=100000"))
    run = process.wait_for(StepTaken)
    alone = fleet("leave", str(run), "engine-0")
    joined = fleet("join", str(run))
    left = fleet("leave", str(run), "engine-0", "--within-s", "30")
    process.signal(signal.SIGTERM)
    assert process.wait() == 143
    assert (alone.exit_code, joined.exit_code, left.exit_code) == (1, 0, 0)
    assert "0 engines would stay" in alone.output
    assert "engine-1 joined" in joined.output
    assert "engine-0 left" in left.output
    with LedgerReader(run / "ledger") as reader:
        assert [(entry.event.engine, entry.event.asked) for entry in reader.events(EngineJoined)] == [
            ("engine-0", False),
            ("engine-1", True),
        ]
        assert [entry.event.engine for entry in reader.events(EngineLeft)] == ["engine-0"]
    late = fleet("join", str(run))
    assert late.exit_code != 0
    assert "is not running" in str(late.exception)

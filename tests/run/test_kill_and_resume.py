"""`kill -9` of the whole process tree: the run goes on, nothing is lost, and nothing is trained twice."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from small_runs import (
    DETERMINISTIC,
    ENGINES,
    SCRIPTED,
    RunProcess,
    digests,
    engine_below,
    incarnations,
    require_sound,
    small_config,
)

from fathom import Run
from fathom.config.run import RunConfig
from fathom.ledger.events import CheckpointSaved, Evaluated, Event, FaultSeen, StepTaken, TrajectoryEnded
from fathom.ledger.reader import LedgerReader
from fathom.run.history.folder import RunFolder

SHARED_MEMORY = Path("/dev/shm")


def killed_at(config: RunConfig, moments: list[tuple[type[Event], int]]) -> tuple[Path, list[RunProcess]]:
    """A run that was killed, and resumed, at each of these moments; and the dead processes."""
    run: Path | None = None
    dead: list[RunProcess] = []
    for moment in moments:
        dead.append(RunProcess(config, run, kill_after=moment))
        assert dead[-1].wait() == -signal.SIGKILL
        run = dead[-1].run
    assert run is not None
    return run, dead


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_run_equals_one_that_was_not(tmp_path: Path, engine: str) -> None:
    whole = Run(small_config(tmp_path / "whole", engine, *DETERMINISTIC)).start()
    assert whole.reason == "steps"
    expected = digests(whole.folder)
    assert len(set(expected.values())) == 6

    config = small_config(tmp_path / "killed", engine, *DETERMINISTIC)
    run, _ = killed_at(config, [(StepTaken, 3), (TrajectoryEnded, 10), (CheckpointSaved, 1)])
    assert Run.resume(run).start().reason == "steps"
    assert incarnations(run) == 4
    assert digests(run) == expected
    require_sound(run)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_transport_changes_no_bit(tmp_path: Path, engine: str) -> None:
    steps = ("trainer.steps=4", *DETERMINISTIC, engine)
    ways = {way: Run(small_config(tmp_path, f"sync.transport={way}", *steps)).start() for way in ("shared", "disk")}
    shared, disk = (digests(result.folder) for result in ways.values())
    assert shared == disk
    assert len(set(shared.values())) == 4


def test_an_asynchronous_run_survives_three_moments(tmp_path: Path) -> None:
    config = small_config(tmp_path, SCRIPTED, "staleness.max_staleness=2")
    run, dead = killed_at(config, [(StepTaken, 2), (TrajectoryEnded, 9), (StepTaken, 1)])
    assert Run.resume(run).start().reason == "steps"
    assert incarnations(run) == 4
    assert len(digests(run)) == 6
    require_sound(run)
    assert not weights_of(dead)


@pytest.mark.slow
def test_an_asynchronous_run_survives_twenty_moments(tmp_path: Path) -> None:
    config = small_config(tmp_path, "trainer.steps=60", "staleness.max_staleness=2")
    began = time.monotonic()
    whole = RunProcess(config)
    assert whole.wait() == 0
    lasted_s = time.monotonic() - began

    moments = random.Random(0)
    run: Path | None = None
    dead = [whole]
    for place in range(20):
        if place % 4 == 0:  # anywhere, most likely while it starts
            process = RunProcess(config, run, kill_after_s=moments.uniform(0.1, lasted_s))
        else:  # within the loop
            process = RunProcess(config, run, kill_after=(object, moments.randint(1, 900)))
        dead.append(process)
        code = process.wait()
        assert code in (0, -signal.SIGKILL)
        run = process.run
        if run is not None and has_events(run):
            require_sound(run)
        if code == 0:  # it came to its end before the moment: the next one is a new run
            run = None
    last = Run.resume(run).start() if run is not None else Run(config).start()
    assert last.reason == "steps"
    assert len(digests(last.folder)) == 60
    require_sound(last.folder)
    assert not weights_of(dead)


def test_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    process = RunProcess(small_config(tmp_path, "trainer.steps=40", "staleness.max_staleness=2"))
    run = process.wait_for(StepTaken)
    kill_engine(process)
    assert process.wait() == 0
    with LedgerReader(run / "ledger") as reader:
        faults = [entry.event for entry in reader.events(FaultSeen)]
    assert any("-9" in fault.detail for fault in faults)
    assert len(digests(run)) == 40
    require_sound(run)


@pytest.mark.slow
def test_an_engine_killed_within_an_evaluation_costs_no_sample(tmp_path: Path) -> None:
    evaluation = "evaluation.every_steps=1", "evaluation.tasks=20", "evaluation.samples=100"
    process = RunProcess(small_config(tmp_path, "trainer.steps=2", *evaluation))
    run = process.wait_for(StepTaken)
    time.sleep(0.3)  # the evaluation that follows the step takes seconds
    kill_engine(process)
    assert process.wait(within_s=120.0) == 0
    with LedgerReader(run / "ledger") as reader:
        assert [entry.event.ungraded for entry in reader.events(Evaluated)] == [0, 0, 0]
        assert any("-9" in entry.event.detail for entry in reader.events(FaultSeen))


def kill_engine(process: RunProcess) -> None:
    assert process.process.pid is not None
    engine = engine_below(process.process.pid)
    assert engine is not None
    os.kill(engine, signal.SIGKILL)


def weights_of(processes: list[RunProcess]) -> list[Path]:
    """What dead processes published and nobody removed."""
    return [path for process in processes for path in SHARED_MEMORY.glob(f"fathom-weights-{process.process.pid}-*")]


def has_events(run: Path) -> bool:
    """False when it was killed before its first commit."""
    if not RunFolder(run).has_history:
        return False
    with LedgerReader(run / "ledger") as reader:
        return reader.last_seq > 0

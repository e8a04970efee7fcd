"""How a run ends: by itself, when it is asked to, and when nothing can be learnt."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from small_runs import ENGINES, SCRIPTED, RunProcess, digests, engine_below, incarnations, require_sound, small_config

from fathom import Run
from fathom.core.errors import CheckpointError, ConfigError, NoProgressError
from fathom.ledger.events import Evaluated, GroupDequeued, IncarnationOpened, OccurrenceClosed, RunEnded, StepTaken
from fathom.ledger.reader import LedgerReader

ENDLESS = "trainer.steps=100000"
CASES = [
    pytest.param([signal.SIGINT], False, 130, id="ctrl-c"),
    pytest.param([signal.SIGINT], True, 130, id="ctrl-c-in-a-terminal"),
    pytest.param([signal.SIGINT, signal.SIGINT], True, 130, id="ctrl-c-twice"),
    pytest.param([signal.SIGTERM], False, 143, id="sigterm"),
    pytest.param([signal.SIGTERM], True, 143, id="sigterm-to-the-whole-group"),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("signals", "group", "code"), CASES)
def test_a_signal_ends_it_at_once_and_it_can_be_resumed(
    tmp_path: Path, engine: str, signals: list[signal.Signals], group: bool, code: int
) -> None:
    process = RunProcess(small_config(tmp_path, engine, ENDLESS))
    run = process.wait_for(StepTaken)
    for number in signals:
        process.signal(number, group=group)
    assert process.wait(within_s=10.0) == code
    if len(signals) == 1:
        assert reason(run) == "stopped"
    taken = len(digests(run))
    require_sound(run)
    edit(run, '"steps":', f'"steps": {taken + 2}')
    assert Run.resume(run).start().reason == "steps"
    assert len(digests(run)) == taken + 2
    require_sound(run)


@pytest.mark.slow
def test_a_signal_to_the_whole_group_of_a_run_strikes_no_engine(tmp_path: Path) -> None:
    process = RunProcess(small_config(tmp_path, "engine.kind=embedded", ENDLESS))
    process.wait_for(StepTaken)
    run = process.process.pid
    assert run is not None
    engine = engine_below(run)
    assert engine is not None
    assert os.getpgid(engine) != os.getpgid(run)
    process.signal(signal.SIGTERM, group=True)
    assert process.wait(within_s=30.0) == 143


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.5, 1.0, 2.0, 4.0, 6.0])
def test_ctrl_c_while_it_starts(tmp_path: Path, delay_s: float) -> None:
    config = small_config(
        tmp_path, ENDLESS, "warm_start.steps=100000", "warm_start.tasks=100", "warm_start.batch_size=8"
    )
    process = RunProcess(config)
    while process.run is None:
        time.sleep(0.01)
    time.sleep(delay_s)
    process.signal(signal.SIGINT, group=True)
    assert process.wait(within_s=15.0) == 130
    assert [reason(run) for run in process.runs.iterdir()] in ([], ["stopped"])


def test_ctrl_c_ends_a_long_evaluation(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, SCRIPTED, "evaluation.tasks=20", "evaluation.samples=2000", "rollout.max_in_flight=4"
    )
    process = RunProcess(config)
    while process.run is None or not (process.run / "tokenizer").exists():
        time.sleep(0.01)
    time.sleep(2.0)
    process.signal(signal.SIGINT)
    assert process.wait(within_s=10.0) == 130


def test_it_ends_with_the_data_and_trains_the_smaller_last_batch(tmp_path: Path) -> None:
    options = "task.options.train=3", "task.epochs=1", ENDLESS
    result = Run(small_config(tmp_path, SCRIPTED, *options)).start()
    assert (result.reason, result.exit_code) == ("data", 0)
    with LedgerReader(result.folder / "ledger") as reader:
        assert len(reader.events(GroupDequeued)) == 3
        assert [entry.event.trained for entry in reader.events(OccurrenceClosed)] == [True] * 3
        assert [len({use.group for use in reader.rows_at(step)}) for step in (1, 2)] == [2, 1]
    require_sound(result.folder)


def test_rewards_that_never_differ_end_it_with_an_error(tmp_path: Path) -> None:
    options = "task.options.constant=0.0", "objective.filter_zero_variance=true", ENDLESS
    with pytest.raises(NoProgressError, match=r"6\d variance"):
        Run(small_config(tmp_path, SCRIPTED, *options)).start()
    (run,) = (tmp_path / "runs").iterdir()
    assert "NoProgressError" in reason(run)
    require_sound(run)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    first = Run(small_config(tmp_path, SCRIPTED, "trainer.steps=2")).start()
    again = Run.resume(first.folder).start()
    assert (again.reason, again.exit_code) == ("steps", 0)
    assert incarnations(first.folder) == 1
    edit(first.folder, '"steps": 2', '"steps": 4')
    assert Run.resume(first.folder).start().reason == "steps"
    assert incarnations(first.folder) == 2
    assert len(digests(first.folder)) == 4
    require_sound(first.folder)


def test_a_resume_leaves_no_hole_in_the_evaluations(tmp_path: Path) -> None:
    """One of the step of a checkpoint is recorded after it, so a resume from there undoes it."""
    options = "evaluation.tasks=4", "evaluation.every_steps=2", "trainer.steps=4"
    run = Run(small_config(tmp_path, SCRIPTED, *options)).start().folder
    assert evaluated(run) == [0, 2, 4]
    edit(run, '"steps": 4', '"steps": 7')
    Run.resume(run).start()
    assert evaluated(run) == [0, 2, 4, 6, 7]


def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on(tmp_path: Path) -> None:
    run = Run(small_config(tmp_path, SCRIPTED, "trainer.steps=4")).start().folder
    edit(run, '"steps": 4', '"steps": 5')
    before, newest = sorted((run / "checkpoints").iterdir())
    kept = shutil.copytree(newest, tmp_path / "kept")
    for name in ("state.msgpack", "trainer/trainer.json", "trainer/model/model.safetensors"):
        (newest / name).write_bytes(b"\xc1")
        with pytest.raises(CheckpointError, match=newest.name):
            Run.resume(run).start()
        shutil.copytree(kept, newest, dirs_exist_ok=True)
    shutil.rmtree(newest)
    assert Run.resume(run).start().reason == "steps"
    assert len(digests(run)) == 5
    with LedgerReader(run / "ledger") as reader:
        opened = reader.latest(IncarnationOpened)
    assert opened is not None
    assert f"step-{opened.event.start_step:06d}" == before.name
    require_sound(run)


def test_an_edit_that_cannot_be_gone_on_with_is_refused(tmp_path: Path) -> None:
    run = Run(small_config(tmp_path, SCRIPTED, "trainer.steps=2")).start().folder
    config = run / "config.json"
    whole = config.read_text()
    for old, new, words in (
        ('"name": "small"', '"seed": 3, "name": "small"', "the data changed"),
        ('"kind": "digits:Digits"', '"kind": "digits:Digits", "options": {"train": 7}', "the data changed"),
        ('"lr": 0.001', '"lr": -1', "greater than 0"),
    ):
        edit(run, old, new)
        with pytest.raises((ConfigError, CheckpointError), match=words):
            Run.resume(run).start()
        config.write_text(whole)
    edit(run, '"steps": 2', '"steps": 3')
    assert Run.resume(run).start().reason == "steps"
    require_sound(run)


def test_within_an_event_loop_it_is_refused_and_in_a_thread_of_it_it_runs(tmp_path: Path) -> None:
    run = Run(small_config(tmp_path, SCRIPTED, "trainer.steps=2"))

    async def start() -> str:
        with pytest.raises(ConfigError, match=r"asyncio\.to_thread"):
            run.start()
        assert not (tmp_path / "runs").exists()
        return (await asyncio.to_thread(run.start)).reason

    assert asyncio.run(start()) == "steps"


def reason(run: Path) -> str:
    with LedgerReader(run / "ledger") as reader:
        ended = reader.latest(RunEnded)
    assert ended is not None
    return ended.event.reason


def evaluated(run: Path) -> list[int]:
    with LedgerReader(run / "ledger") as reader:
        return [entry.event.version.number for entry in reader.events(Evaluated)]


def edit(run: Path, old: str, new: str) -> None:
    """Change a line of the run's config, as a person does."""
    lines = (run / "config.json").read_text().splitlines()
    (place,) = (place for place, line in enumerate(lines) if old in line)
    comma = "," if lines[place].endswith(",") else ""
    lines[place] = new + comma
    (run / "config.json").write_text("\n".join(lines))

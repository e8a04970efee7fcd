"""Runs that train several adapters over one base: each is the run that it would be by itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_runs import DETERMINISTIC, digests, engine_below, incarnations, require_sound, small_config, small_file

from fathom import AdaptersRun, Run
from fathom.apps.recipes import recipe
from fathom.config.load import load_config
from fathom.config.run import RunConfig
from fathom.core.errors import CheckpointError, ConfigError
from fathom.ledger.events import EngineJoined, EngineRestored, Event, Published, RunEnded, StepTaken
from fathom.ledger.reader import LedgerReader
from fathom.run.adapters.configs import configs_of

torch.set_num_threads(1)
TWO = (
    "lora.rank=4",
    "lora.alpha=8",
    "trainer.optimizer.lr=1e-2",
    "trainer.steps=4",
    "adapters.left.trainer.steps=3",
    "adapters.right.lora.rank=2",
    "adapters.right.lora.rslora=true",
    'adapters.right.lora.target_modules=["q_proj","v_proj"]',
    "adapters.right.trainer.groups_per_step=3",
    "adapters.right.task.options.train=30",
)


def events(run: Path, kind: type) -> list:
    with LedgerReader(run / "ledger") as reader:
        return [entry.event for entry in reader.events(kind)]


def labels(run: Path) -> set[str | None]:
    with LedgerReader(run / "ledger") as reader:
        return {reader.trajectory(entry.id).trajectory.header.adapter for entry in reader.trajectories()}


def test_each_is_to_the_bit_what_it_is_by_itself(tmp_path: Path) -> None:
    config = small_config(tmp_path, *TWO, *DETERMINISTIC, "model.aligned=true")
    outcome = AdaptersRun(config).start()
    assert (outcome.reason, outcome.exit_code) == ("steps", 0)
    left, right = (outcome.folder / "adapters" / name for name in ("left", "right"))
    for run, steps in ((left, 3), (right, 4)):
        require_sound(run)
        assert len(digests(run)) == steps
        (label,) = labels(run)
        published = events(run, Published)
        assert {event.adapter.label for event in published} == {label}
        assert label is not None
        assert label.startswith(f"{run.name}:")
        gaps = [event.gap for event in published if event.gap is not None]
        assert gaps
        assert all(gap.abs_log_ratio_max == 0.0 for gap in gaps)
        assert len(events(run, EngineJoined)) == 1
    assert len({event.adapter.base for run in (left, right) for event in events(run, Published)}) == 1
    assert [path.name for path in (outcome.folder / "logs").iterdir()] == ["engine-0.log"], "one process for both"
    assert not (left / "model").exists()

    alone = Run(configs_of(config)["right"]).start()
    assert digests(alone.folder) == digests(right)
    assert labels(alone.folder) == labels(right)


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    """What was in flight when everything was killed is run again; an adapter that had ended stays as it is."""
    options = (*TWO, *DETERMINISTIC, "adapters.left.trainer.steps=2", "checkpoint.every_steps=1")
    straight = AdaptersRun(small_config(tmp_path / "a", *options)).start().folder
    part = killed_at(small_config(tmp_path / "b", *options), "right", 3)
    outcome = AdaptersRun.resume(part).start()
    assert outcome.reason == "steps"
    for name in ("left", "right"):
        require_sound(part / "adapters" / name)
        assert digests(part / "adapters" / name) == digests(straight / "adapters" / name)
    assert incarnations(part / "adapters" / "right") == 2
    assert AdaptersRun.resume(part).start().reason == "steps"
    assert incarnations(part / "adapters" / "right") == 2, "it had ended"


def killed_at(config: RunConfig, name: str, step: int) -> Path:
    """The folder of a run that was killed, with all it had started, when an adapter had taken a step."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        AdaptersRun(config).start({name: [_at_step(step, lambda: os.killpg(0, signal.SIGKILL))]})
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    (folder,) = Path(config.runs_dir).iterdir()
    return folder


def _at_step(step: int, do: Callable[[], object]) -> Callable[[Event], None]:
    def observe(event: Event) -> None:
        if isinstance(event, StepTaken) and event.number == step:
            do()

    return observe


@pytest.mark.slow
def test_the_death_of_their_process_is_survived_by_both(tmp_path: Path) -> None:
    def kill() -> None:
        engine = engine_below(os.getpid())
        assert engine is not None
        os.kill(engine, signal.SIGKILL)

    config = small_config(tmp_path, *TWO, "adapters.left.trainer.steps=8", "adapters.right.trainer.steps=8")
    outcome = AdaptersRun(config).start({"left": [_at_step(2, kill)]})
    assert outcome.reason == "steps"
    for name in ("left", "right"):
        run = outcome.folder / "adapters" / name
        require_sound(run)
        assert len(events(run, StepTaken)) == 8
        assert len(events(run, EngineRestored)) >= 1


@pytest.mark.slow
def test_when_one_fails_the_others_end_with_a_checkpoint(tmp_path: Path) -> None:
    def spoil() -> None:
        (folder,) = (tmp_path / "runs").glob("*/adapters/right/checkpoints")
        shutil.rmtree(folder)
        folder.touch()

    options = (*TWO, "adapters.left.trainer.steps=200", "checkpoint.every_steps=2")
    with pytest.raises(CheckpointError, match="adapters/right/checkpoints"):
        AdaptersRun(small_config(tmp_path, *options)).start({"right": [_at_step(1, spoil)]})
    (run,) = (tmp_path / "runs").iterdir()
    left = run / "adapters" / "left"
    require_sound(left)
    (ended,) = events(left, RunEnded)
    assert ended.reason == "stopped"
    assert ended.step == len(events(left, StepTaken)) < 200
    spoilt = run / "adapters" / "right" / "checkpoints"
    spoilt.unlink()
    spoilt.mkdir()
    edited = (run / "config.json").read_text().replace('"steps": 200', f'"steps": {ended.step + 2}')
    (run / "config.json").write_text(edited)
    assert AdaptersRun.resume(run).start().reason == "steps"
    for name, steps in (("left", ended.step + 2), ("right", 4)):
        require_sound(run / "adapters" / name)
        assert len(digests(run / "adapters" / name)) == steps


@pytest.mark.slow
def test_ctrl_c_and_resume_by_the_command(tmp_path: Path) -> None:
    options = (
        *TWO[:2],
        "adapters.left.lora.rank=2",
        "adapters.right.trainer.groups_per_step=3",
        "task.kind=arithmetic",
    )
    command = [sys.executable, "-c", "from fathom.apps.cli.main import main; main()"]
    started = [*command, "train", str(small_file(tmp_path)), "runs_dir=runs", *options, "trainer.steps=50"]
    with subprocess.Popen(started, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any(line.startswith("right: step 3/50") for line in process.stderr)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    (run,) = (tmp_path / "runs").iterdir()
    (run / "config.json").write_text((run / "config.json").read_text().replace('"steps": 50', '"steps": 30'))
    for line in (["resume", "small"], ["audit", "small"]):
        done = subprocess.run([*command, *line], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
    for name in ("left", "right"):
        assert len(digests(run / "adapters" / name)) == 30
        assert incarnations(run / "adapters" / name) == 2


def test_the_recipe_is_two_runs_over_one_base() -> None:
    one, other = configs_of(load_config(recipe("adapters"))).values()
    assert (one.name, other.name) == ("sums", "differences")
    assert (one.task.options["operators"], other.task.options["operators"]) == (["+"], ["-"])
    assert one.trainer.optimizer.lr != other.trainer.optimizer.lr
    assert one.trainer.optimizer.warmup_steps == other.trainer.optimizer.warmup_steps
    assert (one.model, one.seed, one.engine) == (other.model, other.seed, other.engine)


def test_another_kind_of_task_takes_none_of_the_options_of_the_first(tmp_path: Path) -> None:
    own = ("task.options.train=7", "adapters.right.task.kind=arithmetic", "adapters.right.task.options={num_train=9}")
    given = [option for option in TWO if "task" not in option]
    store = f'sync.chain.store="{tmp_path / "chain"}"'
    left, right = configs_of(small_config(tmp_path, *given, *own, store)).values()
    assert (left.task.options, right.task.options) == ({"train": 7}, {"num_train": 9})
    assert (left.sync.chain.store, right.sync.chain.store) == tuple(
        str(tmp_path / "chain" / name) for name in ("left", "right")
    )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("adapters.x.trainer.steps=2",), "there is no [lora]"),
        (("lora.publish=merged", "adapters.x.trainer.steps=2"), "set lora.publish = 'adapter'"),
        ((*TWO, "engine.kind=scripted"), "set engine.kind = 'embedded'"),
        ((*TWO, "engine.kind=vllm"), "set engine.kind = 'embedded'"),
        ((*TWO, "adapters.left.lora.rank=0"), "lora.rank"),
        ((*TWO, "adapters.left.lora.publish=merged"), "lora.publish is the same for all adapters"),
        ((*TWO, "adapters.left.trainer.dtype=bfloat16"), "trainer.dtype is the same for all adapters"),
        ((*TWO, "adapters.left.engine.count=2"), "unknown option adapters.left.engine"),
        ((*TWO, "adapters.left.trainer.stepz=2"), "unknown option trainer.stepz"),
        ((*TWO, 'adapters."a/b".trainer.steps=2'), "adapters"),
        ((*TWO, 'adapters.left.lora.target_modules=["nothing"]'), "[adapters.left]: lora.target_modules names nothing"),
        ((*TWO, "adapters.left.task.kind=nothing"), "[adapters.left]: "),
        (("lora.rank=4",), "there are no [adapters.NAME]"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        AdaptersRun(small_config(tmp_path, *overrides))
    assert says in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_run_of_one_is_not_for_several(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fathom\.AdaptersRun"):
        Run(small_config(tmp_path, *TWO))


def test_an_adapter_of_another_base_ends_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    one = Run(small_config(tmp_path, "lora.rank=4", "trainer.steps=1", "engine.kind=embedded")).start()
    trained = next((one.folder / "checkpoints").iterdir()) / "trainer" / "model"
    config = small_config(tmp_path / "other", *TWO[:1], "seed=1", f"adapters.left.lora.start_from={trained}")
    with pytest.raises(ConfigError, match=r"\[adapters\.left\]: .*another base"):
        AdaptersRun(config).start()
    assert not list((tmp_path / "other" / "runs").iterdir())

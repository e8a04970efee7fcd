"""Generated terminal tasks: the same for the same seed, held-out ones apart, all of them sound."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from harbor_folders import make_task
from typer.testing import CliRunner

from fathom.apps.cli.tasks.group import tasks
from fathom.core.errors import ConfigError, DataError, FathomError
from fathom.core.records.message import Role
from fathom.envs.harbor import HarborEnvironment, HarborOptions, read_task
from fathom.envs.harbor.admission import check_folders
from fathom.envs.harbor.folder import task_folders
from fathom.envs.harbor.generating import draw, write_tasks
from fathom.envs.harbor.generating.families import FAMILIES
from fathom.envs.harbor.script import read_script

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_instances_follow_from_the_seed_and_held_out_ones_are_never_trained_on() -> None:
    train, held = draw(5, 200, 40)
    assert (train, held) == draw(5, 200, 40)
    assert draw(5, 3, 40)[1] == held
    assert draw(6, 200, 40) != (train, held)
    assert len({instance.key for instance in (*train, *held)}) == 240
    assert not {instance.instruction for instance in train} & {instance.instruction for instance in held}
    assert len({instance.family for instance in train}) == len(FAMILIES) == len({one.family for one in held})
    assert all(len(instance.commands) >= 2 and instance.before != instance.after for instance in (*train, *held))
    with pytest.raises(ConfigError, match="no more different tasks"):
        draw(0, 10, 8000)  # every way to rename is held out


def test_families_can_be_chosen_and_folders_sorted_by_name_mix_them(tmp_path: Path) -> None:
    asked = ["generate", "--seed", "1", "--count", "6", "--held-out", "2", "--out", str(tmp_path / "g")]
    done = CliRunner().invoke(tasks, [*asked, "--family", "find", "--family", "count"])
    assert done.exit_code == 0, done.output
    families = [folder.name.partition("-")[2] for folder in task_folders([tmp_path / "g" / "train"])]
    assert families == ["find", "count"] * 3
    assert len({one.family for one in draw(1, 60, 0)[0][: len(FAMILIES)]}) == len(FAMILIES)
    with pytest.raises(ConfigError, match="no family 'dance' of tasks; choose from write, append"):
        write_tasks(tmp_path / "h", seed=1, count=1, held_out=0, families=["dance"])


@needs_bwrap
def test_a_sample_of_each_family_is_admitted_and_its_script_solves_it(tmp_path: Path) -> None:
    write_tasks(tmp_path / "g", seed=1, count=len(FAMILIES), held_out=2)
    write_tasks(tmp_path / "h", seed=1, count=len(FAMILIES), held_out=2)
    assert content(tmp_path / "g") == content(tmp_path / "h")
    folders = task_folders([tmp_path / "g" / "train"])
    rows = asyncio.run(check_folders(folders))
    assert len(rows) == len(FAMILIES)
    assert [row for row in rows if not row.admitted] == []
    environment = HarborEnvironment(
        HarborOptions(folders=(str(tmp_path / "g/train"),), eval_folders=(str(tmp_path / "g/eval"),))
    )
    assert (len(environment.tasks()), len(environment.eval_tasks())) == (len(FAMILIES), 2)
    with pytest.raises(DataError, match="not empty"):
        write_tasks(tmp_path / "g", seed=1, count=1, held_out=0)


def test_a_script_is_the_answers_of_a_model(tmp_path: Path) -> None:
    folder = make_task(tmp_path)
    script = folder / "solution" / "dialogue.json"
    script.write_text('{"commands": ["wc -l < in", "echo 5 > out"], "answer": "done"}')
    answers = read_script(read_task(folder))
    assert [message.role for message in answers] == [Role.ASSISTANT] * 3
    commands = [json.loads(call.arguments) for message in answers for call in message.tool_calls]
    assert commands == [{"command": "wc -l < in"}, {"command": "echo 5 > out"}]
    assert [message.content for message in answers] == ["", "", "done"]
    script.write_text('{"commands": []}')
    with pytest.raises(DataError, match="no script"):
        read_script(read_task(folder))
    script.unlink()
    with pytest.raises(DataError, match="no script"):
        read_script(read_task(folder))


@needs_bwrap
def test_the_commands(tmp_path: Path) -> None:
    run = CliRunner().invoke
    made = run(tasks, ["generate", "--seed", "2", "--count", "2", "--held-out", "1", "--out", str(tmp_path / "g")])
    assert made.exit_code == 0, made.output
    good = run(tasks, ["check", str(tmp_path / "g" / "train")])
    assert good.exit_code == 0
    assert "2 of 2 tasks are admitted" in good.output
    make_task(tmp_path / "bad", test="true\n")
    bad = run(tasks, ["check", str(tmp_path / "g" / "eval"), str(tmp_path / "bad")])
    assert isinstance(bad.exception, FathomError)
    assert "1 of 2 tasks are admitted" in bad.output
    assert "left no reward" in bad.output

"""`fathom runs`, `show`, `audit` and `trace` of a run that trained several adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fathom.apps.cli.main import app
from fathom.core.errors import ConfigError
from fathom.text.characters import save_character_tokenizer
from synthetic.history import write_run

SEVERAL = """
name = "several"
[model]
tiny = "arithmetic"
[lora]
rank = 4
[task]
kind = "arithmetic"
[adapters.left.task.options]
operators = ["+"]
[adapters.right.task.options]
operators = ["-"]
[rollout]
group_size = 4
max_in_flight = 16
max_new_tokens = 4
max_prompt_tokens = 24
[trainer]
steps = 2
groups_per_step = 2
"""
RUN = "several-20250101-120000"


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs_dir = tmp_path_factory.mktemp("runs")
    for name, steps in (("left", 4), ("right", 12)):
        run = write_run(runs_dir / RUN / "adapters" / name, steps=steps)
        (run / "tokenizer").mkdir()
        save_character_tokenizer(run / "tokenizer")
    (runs_dir / RUN / "config.json").write_text('{"adapters": {"left": {}, "right": {}}}')
    return runs_dir


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def test_the_list_has_the_run_and_each_adapter(runs_dir: Path) -> None:
    listed = json.loads(call("runs", "--runs-dir", runs_dir, "--json").output)
    assert [(run["name"], run["step"], run["state"]) for run in listed] == [
        (RUN, 16, "ended: steps"),
        (f"{RUN}/left", 4, "ended: steps"),
        (f"{RUN}/right", 12, "ended: steps"),
    ]


def test_show_has_each_and_one_alone(runs_dir: Path) -> None:
    both = call("show", "several", "--runs-dir", runs_dir)
    assert both.exit_code == 0, both.output
    assert f"{RUN}/left" in both.output
    assert f"{RUN}/right" in both.output
    told = json.loads(call("show", "several", "--runs-dir", runs_dir, "--json").output)
    assert {name: len(summary["steps"]) for name, summary in told["adapters"].items()} == {"left": 4, "right": 12}
    alone = json.loads(call("show", "several/right", "--runs-dir", runs_dir, "--json").output)
    assert alone == told["adapters"]["right"]
    assert (
        call("show", runs_dir / RUN / "right", "--json").output
        == call("show", runs_dir / RUN / "adapters" / "right", "--json").output
    )


def test_audit_examines_each(runs_dir: Path) -> None:
    done = call("audit", "several", "--runs-dir", runs_dir)
    assert f"{RUN}/left: 4 steps" in done.output
    assert f"{RUN}/right: 12 steps" in done.output
    told = json.loads(call("audit", "several", "--runs-dir", runs_dir, "--json").output)
    assert set(told["adapters"]) == {"left", "right"}
    assert told["passed"] is (done.exit_code == 0)


def test_a_dry_run_prints_the_config_of_each(tmp_path: Path) -> None:
    file = tmp_path / "several.toml"
    file.write_text(SEVERAL)
    done = call("train", file, "--dry-run", "adapters.right.lora.rank=2")
    assert done.exit_code == 0, done.output
    assert "right: train an adapter of rank 2" in done.output
    configs = json.loads(done.output[done.output.index("\n{") :])
    assert {name: each["lora"]["rank"] for name, each in configs.items()} == {"left": 4, "right": 2}
    assert {name: each["task"]["options"]["operators"] for name, each in configs.items()} == {
        "left": ["+"],
        "right": ["-"],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["several.toml"]


def test_what_is_of_one_history_asks_which(runs_dir: Path) -> None:
    done = call("trace", "several", "--step", 2, "--runs-dir", runs_dir)
    assert isinstance(done.exception, ConfigError)
    assert "several/left, several/right" in str(done.exception)
    assert call("trace", "several/right", "--step", 2, "--runs-dir", runs_dir).exit_code == 0

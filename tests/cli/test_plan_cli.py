"""`fathom plan sync`: what people read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fathom.apps.cli.main import app
from fathom.apps.recipes import recipe
from fathom.core.errors import ConfigError
from fathom.sync.plan.estimate import NAMES


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", "sync", *map(str, arguments)], env={"COLUMNS": "120"})


def read(*arguments: object) -> str:
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_answer_is_sentences_and_a_row_for_each_transport() -> None:
    page = read("--published", "GLM-5")
    assert "Use p2p: about 8." in page
    assert all(f"\n{name} " in page for name in NAMES)
    assert "shared: not possible: needs one host" in page
    assert "fitted to two published figures" in page


def test_a_run_is_one_host() -> None:
    page = read(recipe("arithmetic"), "engine.count=3")
    assert "one host: trainer of 1" in page
    assert "3 engines" in page
    assert "Use shared" in page


def test_json_says_the_same() -> None:
    advice = json.loads(read("--params", "8e9", "--trainer-nodes", 2, "--engine-nodes", 2, "--engine-tp", 8, "--json"))
    answered = [answer["transport"] for answer in advice["estimates"] + advice["impossible"]]
    assert sorted(answered) == sorted(NAMES)
    assert advice["transport"] in answered
    assert advice["traffic"]["full_bytes"] == 16_000_000_000


def test_the_check_prints_every_figure_and_its_error() -> None:
    page = read("--check")
    assert "58,301.5" in page
    assert "7,227.3" in page
    assert page.count(" fitted ") == 3  # two figures in the table, and once in words
    assert "right in 9 of 9 rows" in page
    checked = json.loads(read("--check", "--json"))
    assert len(checked) == 18


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = call("--params", "1e9", "--pictures", tmp_path / "new")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "transport-crossover.png",
        "transport-delta.png",
        "transport-published.png",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "which model"),
        (("--params", "1e9", "--trainer-nodes", "4"), "--engine-nodes"),
        (("--params", "1e9", "--published", "GLM-5"), "said twice"),
        (("--params", "1e9", "--trainer-nodes", "1", "--engine-nodes", "1", "--engine-tp", "3"), "does not divide"),
        (("--model", "nowhere"), "no model folder"),
        (("nowhere.toml",), "no config file"),
        (("--measured", "nowhere.json"), "nowhere.json"),
        (("--check", "--params", "1e9"), "stand alone"),
        (("--check", "--measured", "nowhere.json"), "stand alone"),
    ],
)
def test_absurd_input_is_refused_with_the_fix(arguments: tuple[str, ...], message: str) -> None:
    done = call(*arguments)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)

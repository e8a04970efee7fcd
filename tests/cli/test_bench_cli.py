"""`fathom bench`, `fathom doctor` and `fathom models`: what people read and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fathom.apps.cli.main import app
from fathom.bench.workloads import WORKLOADS
from fathom.core.errors import ConfigError


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def test_help_names_every_workload_and_its_options() -> None:
    overview = call("bench", "--help").output
    for name, workload in WORKLOADS.items():
        assert name in overview
        page = call("bench", name, "--help").output
        assert all(option in page for option in workload.options.model_fields)


def test_ledger_is_shown_and_filed(tmp_path: Path) -> None:
    options = ("tokens=2000", "lengths=[64]", "repeats=1", f"folder={tmp_path}")
    done = call("bench", "ledger", "--out", tmp_path / "bench", *options)
    assert done.exit_code == 0, done.output
    assert "64 tokens" in done.output
    (path,) = (tmp_path / "bench").iterdir()
    assert path.name in done.output
    printed = call("bench", "ledger", "--json", "--out", tmp_path / "bench", *options)
    assert json.loads(printed.stdout)["workload"] == "ledger"


def test_an_unknown_model_names_the_nearest() -> None:
    done = call("models", "fetch", "smollm2-136m")
    assert isinstance(done.exception, ConfigError)
    assert "did you mean smollm2-135m?" in str(done.exception)


def test_models_lists_what_can_be_fetched() -> None:
    assert "smollm2-135m" in call("models", "list").output


def test_no_trl_says_how_to_get_it(tmp_path: Path) -> None:
    done = call("bench", "train", "--trl-python", tmp_path / "python")
    assert isinstance(done.exception, ConfigError)
    assert "--install-trl" in str(done.exception)


@pytest.mark.slow
def test_doctor_finds_this_machine_able(tmp_path: Path) -> None:
    done = call("doctor", "--json", "--runs-dir", tmp_path)
    report = json.loads(done.stdout)
    assert report["passed"], done.output
    assert done.exit_code == 0
    assert {"python", "engine and trainer", "gold answers, arithmetic"} <= {f["check"] for f in report["findings"]}

"""`fathom runs`, `show`, `trace` and `audit`: what people read, exit codes, and what is never loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fathom.apps.cli.main import app
from fathom.apps.cli.summary_view import curve
from fathom.text.characters import save_character_tokenizer
from synthetic.history import write_run

NAME = "synthetic-20250101-120000"
LAUNCH = """
import sys
from fathom.apps.cli.main import main
try:
    main()
finally:
    loaded = {"torch", "transformers", "matplotlib"} & set(sys.modules)
    if loaded:
        print("LOADED", *sorted(loaded))
"""


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs_dir = tmp_path_factory.mktemp("runs")
    run = write_run(runs_dir / NAME, steps=12)
    (run / "tokenizer").mkdir()
    save_character_tokenizer(run / "tokenizer")
    write_run(runs_dir / "other-20250102-120000", finished=False)
    return runs_dir


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def launch(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LAUNCH, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_runs_lists_them(runs_dir: Path) -> None:
    done = call("runs", "--runs-dir", runs_dir)
    assert done.exit_code == 0
    assert NAME in done.output
    assert "12/12" in done.output
    assert "stopped" in done.output
    listed = json.loads(call("runs", "--runs-dir", runs_dir, "--json").output)
    assert {run["name"]: run["state"] for run in listed} == {
        NAME: "ended: steps",
        "other-20250102-120000": "stopped",
    }


def test_no_runs_says_how_to_get_one(tmp_path: Path) -> None:
    assert "fathom demo" in call("runs", "--runs-dir", tmp_path).output


def test_show_has_every_part(runs_dir: Path) -> None:
    done = call("show", "synthetic", "--runs-dir", runs_dir)
    assert done.exit_code == 0
    for part in (
        "ended: steps",
        "books, balanced",
        "24 trained, 1 given up",
        "held-out evaluation",
        "paired by task: +0.500",
        "same-version gap",
        "lengths and latencies",
        "drafted tokens accepted (75.0%)",
        "of the wall clock",
        "no answer within 5 s",
    ):
        assert part in done.output, part


def test_show_as_json(runs_dir: Path) -> None:
    summary = json.loads(call("show", runs_dir / NAME, "--json").output)
    assert summary["state"] == {"phase": "ended", "reason": "steps", "step": 12, "reward_mean": pytest.approx(1.4)}
    assert len(summary["steps"]) == 12
    assert summary["books"]["balanced"]


def test_show_draws_a_picture(runs_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    picture = tmp_path / "run.png"
    assert call("show", runs_dir / NAME, "--picture", picture).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    done = launch("show", runs_dir / NAME, "--picture", tmp_path / "nowhere" / "run.png")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    done = launch("show", runs_dir / NAME, "--picture", tmp_path / "run")
    assert done.returncode == 2
    assert "end it with .png" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.png"], "it was drawn under another name than was said"


def test_trace_shows_tokens_with_text(runs_dir: Path) -> None:
    done = call("trace", "synthetic", "--runs-dir", runs_dir, "--step", 3, "--limit", 1)
    assert done.exit_code == 0
    assert "1/e0.i4/a0/m0, step 3" in done.output
    assert "versions v2@1" in done.output
    assert "0.9900" in done.output
    traced = json.loads(call("trace", runs_dir / NAME, "--step", 3, "--json").output)
    assert [branch["trajectory"] for branch in traced] == [f"1/e0.i{place}/a0/m{m}" for place in (4, 5) for m in (0, 1)]


def test_trace_of_a_dropped_trajectory_says_why(runs_dir: Path) -> None:
    done = call("trace", runs_dir / NAME, "--trajectory", "1/e0.i24/a0/m0")
    assert done.exit_code == 0
    assert "no step" in done.output
    assert "dropped: age" in done.output


def test_trace_names_the_steps_with_unusual_gradients_and_what_is_behind_them(runs_dir: Path) -> None:
    done = call("trace", runs_dir / NAME, "--worst", 2, "--limit", 1)
    assert done.exit_code == 0
    assert done.output.count("gradient") == 2
    assert "share" in done.output
    found = json.loads(call("trace", runs_dir / NAME, "--worst", 3, "--json").output)
    assert len(found) == 3
    assert all(sum(part["share"] for part in step["parts"]) == pytest.approx(1.0) for step in found)


def test_audit_passes_and_fails_by_exit_code(runs_dir: Path, tmp_path: Path) -> None:
    assert call("audit", runs_dir / NAME).exit_code == 0
    damaged = write_run(tmp_path / "damaged")
    segment = damaged / "ledger" / "arrays-00001.bin"
    whole = segment.read_bytes()
    segment.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    done = call("audit", damaged)
    assert done.exit_code == 1
    assert "FAIL" in done.output
    assert json.loads(call("audit", damaged, "--json").output)["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("show", "synthetik"), 2, "did you mean synthetic?"),
        (("trace", "synthetic", "--step", 99), 1, "there is no step 99; the run has steps 1 to 12"),
        (("trace", "synthetic", "--trajectory", "x/y"), 1, "no trajectory 'x/y'"),
        (("trace", "synthetic", "--trajectory", "x", "--step", 1), 2, "give one of --step, --trajectory and --worst"),
        (("show", "synthetic", "--jsn"), 2, "No such option"),
    ],
)
def test_errors_are_one_message_and_a_code(
    runs_dir: Path, arguments: tuple[object, ...], code: int, words: str
) -> None:
    done = launch(*arguments, "--runs-dir", runs_dir)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("runs",), ("show", "synthetic"), ("trace", "synthetic")])
def test_looking_loads_no_heavy_library(runs_dir: Path, arguments: tuple[str, ...]) -> None:
    where = () if arguments == ("--help",) else ("--runs-dir", runs_dir)
    done = launch(*arguments, *where)
    assert done.returncode == 0, done.stderr
    assert "LOADED" not in done.stdout


def test_a_curve_has_a_bar_per_share() -> None:
    assert curve([0.0, 1.0]) == "▁█"
    assert curve([1.0] * 100, width=3) == "▁▁▁"
    assert len(curve(list(range(200)))) == 60
    assert curve([]) == ""

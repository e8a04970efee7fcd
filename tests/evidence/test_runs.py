"""Runs are found by what a person would type."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from fathom.core.errors import ConfigError
from fathom.evidence.runs import find_run, list_runs, tokenizer_of
from synthetic.history import write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("arith-20250101-120000", "arith-20250301-120000", "smollm-20250201-120000"):
        write_run(tmp_path / "runs" / name, steps=2)
    return tmp_path / "runs"


def test_a_folder_a_name_and_the_newest_of_a_name(runs: Path) -> None:
    assert find_run(str(runs / "arith-20250101-120000"), Path("elsewhere")) == runs / "arith-20250101-120000"
    assert find_run("arith-20250101-120000", runs) == runs / "arith-20250101-120000"
    assert find_run("arith", runs) == runs / "arith-20250301-120000"


def test_an_unknown_run_names_the_nearest(runs: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean arith"):
        find_run("arit", runs)
    with pytest.raises(ConfigError, match="runs there: arith, smollm"):
        find_run("zzz", runs)
    with pytest.raises(ConfigError, match="runs there: none"):
        find_run("zzz", runs / "nowhere")


def test_a_listing_says_how_each_run_stands(runs: Path) -> None:
    write_run(runs / "killed-20250401-120000", finished=False)
    held = write_run(runs / "live-20250401-120000", finished=False)
    (runs / "fresh-20250401-120000").mkdir()
    (runs / "fresh-20250401-120000" / "config.json").write_text("{}")
    damaged = write_run(runs / "damaged-20250401-120000")
    (damaged / "ledger" / "ledger.sqlite").write_bytes(b"not a database")
    lock = os.open(held / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        states = {run.name.partition("-")[0]: run.state.partition(" /")[0] for run in list_runs(runs)}
    finally:
        os.close(lock)
    assert states == {
        "arith": "ended: steps",
        "smollm": "ended: steps",
        "killed": "stopped",
        "live": "running",
        "fresh": "empty",
        "damaged": "unreadable: cannot open",
    }
    first = next(run for run in list_runs(runs) if run.name == "smollm-20250201-120000")
    assert (first.step, first.steps, first.reward_mean) == (2, 2, pytest.approx(0.4))


def test_the_tokenizer_lies_with_the_run(runs: Path) -> None:
    run = runs / "arith-20250101-120000"
    assert tokenizer_of(run) is None
    (run / "tokenizer").mkdir()
    (run / "tokenizer" / "tokenizer.json").write_text("{}")
    assert tokenizer_of(run) == run / "tokenizer"

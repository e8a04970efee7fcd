"""`fathom fleet`: engines join and leave a run while it goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fathom.apps.cli.arguments import DEFAULT_RUNS_DIR, RunName, RunsDir
from fathom.evidence.runs import find_run, require_running
from fathom.run.weights.requests import JoinRequest, LeaveRequest, Request, RequestBox

_LOOK_S = 0.2

Wait = Annotated[float, typer.Option("--wait-s", min=0.0, help="seconds to wait for the answer")]
DrainWithin = Annotated[
    float, typer.Option("--within-s", min=0.0, help="seconds for its generations to end; the rest is discarded")
]

fleet = typer.Typer(no_args_is_help=True, help="Let engines join and leave a run while it goes on.")


@fleet.command()
def join(run: RunName, runs_dir: RunsDir = DEFAULT_RUNS_DIR, wait_s: Wait = 300.0) -> None:
    """Start one more engine; it serves after a full verified load."""
    _ask(find_run(run, runs_dir), JoinRequest(), wait_s)


@fleet.command()
def leave(
    run: RunName,
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="its name, as `fathom show` has it")],
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    within_s: DrainWithin = 600.0,
    wait_s: Wait = 900.0,
) -> None:
    """Let an engine go: it gets no more requests, finishes what it has, and is closed."""
    _ask(find_run(run, runs_dir), LeaveRequest(engine=engine, within_s=within_s), wait_s)


def _ask(folder: Path, request: Request, wait_s: float) -> None:
    """Post the request and show the answer. Exit code 1: refused, failed, or no answer in time."""
    require_running(folder)
    box = RequestBox.of(folder)
    name = box.post(request)
    deadline = time.monotonic() + wait_s
    while (answer := box.answer(name)) is None:
        if time.monotonic() > deadline:
            typer.echo(f"no answer within {wait_s:g} s; whether it was done is in: fathom show {folder}", err=True)
            raise typer.Exit(1)
        time.sleep(_LOOK_S)
    typer.echo(answer.text, err=not answer.done)
    raise typer.Exit(0 if answer.done else 1)

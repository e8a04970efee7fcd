"""`fathom runs`."""

from __future__ import annotations

import time

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fathom.apps.cli.arguments import DEFAULT_RUNS_DIR, AsJson, RunsDir
from fathom.evidence.runs import RunListing, list_runs

_COLOURS = {"running": "green", "ended": "default", "stopped": "yellow", "empty": "bright_black", "unreadable": "red"}


def runs(runs_dir: RunsDir = DEFAULT_RUNS_DIR, as_json: AsJson = False) -> None:
    """List runs, newest first."""
    found = list_runs(runs_dir)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    console = Console()
    if not found:
        console.print(f"no runs in {runs_dir}; start one with: fathom demo", highlight=False)
        return
    table = Table(box=None, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state")
    for title in ("steps", "reward", "started"):
        table.add_column(title, justify="right")
    for run in found:
        table.add_row(*_cells(run))
    console.print(table)


def _cells(run: RunListing) -> tuple[Text | str, ...]:
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_s)) if run.started_s else "-"
    return (
        Text(run.name),
        Text(run.state, style=_COLOURS.get(run.state.partition(":")[0], "default")),
        f"{run.step}/{run.steps}" if run.steps is not None else str(run.step),
        "-" if run.reward_mean is None else f"{run.reward_mean:.3f}",
        started,
    )

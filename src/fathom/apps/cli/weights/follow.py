"""`fathom weights follow` and `followers`: engines that Fathom did not start."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fathom.apps.cli.arguments import DEFAULT_RUNS_DIR, AsJson, RunsDir
from fathom.apps.cli.weights.ago import ago
from fathom.core.errors import ConfigError

if TYPE_CHECKING:  # it loads torch
    from fathom.sync.follow.reports import FollowerReport, Standing

Place = Annotated[
    str, typer.Argument(metavar="STORE", help="a chain's folder or URL, or a run (its folder, or its name)")
]
Into = Annotated[Path | None, typer.Option("--into", metavar="DIR", help="make DIR/<version> of each, and DIR/current")]
Engine = Annotated[
    str | None, typer.Option("--engine", metavar="URL", help="publish each to the embedded engine that listens there")
]
TokenEnv = Annotated[
    str | None, typer.Option("--token-env", metavar="NAME", help="environment variable with that engine's access token")
]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="in reports [default: host and DIR or URL]")]
LookS = Annotated[float, typer.Option("--look-s", min=0.05, help="seconds between looks for a newer version")]
Once = Annotated[bool, typer.Option("--once", help="pull the newest version and end; exit code 1 when that fails")]


def follow(
    store: Place,
    into: Into = None,
    engine: Engine = None,
    token_env: TokenEnv = None,
    name: Name = None,
    look_s: LookS = 2.0,
    once: Once = False,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    """Pull each new version of a chain into a folder, or into an engine that runs elsewhere, until Ctrl-C."""
    if (into is None) == (engine is None):
        raise ConfigError("say where versions go: either --into DIR, or --engine URL with --token-env NAME")
    if (engine is None) != (token_env is None):
        raise ConfigError("--engine URL and --token-env NAME belong together: an engine answers only to its token")
    token = _token(token_env) if token_env is not None else ""
    given = name or _host_and(into.absolute().name if into is not None else engine or "")
    from fathom.run.weights.following import follow_into, follow_with_engine, open_store  # needs torch

    source = open_store(store, runs_dir)
    if into is not None:
        following = follow_into(source, into, given, look_s, _say, once=once)
    else:
        following = follow_with_engine(source, engine or "", token, given, look_s, _say, once=once)
    report = asyncio.run(following)
    raise typer.Exit(1 if once and report.error else 0)


def followers(store: Place, runs_dir: RunsDir = DEFAULT_RUNS_DIR, as_json: AsJson = False) -> None:
    """List who follows a chain: what each serves, how far it is behind, and when it last said so."""
    from fathom.run.weights.following import open_store  # needs torch
    from fathom.sync.follow.reports import standings

    found = standings(open_store(store, runs_dir))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    console = Console()
    if not found:
        console.print("nobody follows this chain; one starts with: fathom weights follow", highlight=False)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("follower", "serves", "digest", "behind", "said", "state"):
        table.add_column(title)
    for each in found:
        table.add_row(*_cells(each))
    console.print(table)


def _cells(standing: Standing) -> tuple[str | Text, ...]:
    report, version = standing.report, standing.report.version
    behind = "-" if standing.behind is None else str(standing.behind)
    state = Text(report.error, style="red") if report.error else Text("follows" if report.following else "ended")
    said = "-" if not report.at_s else ago(time.time() - report.at_s)
    return (report.name, version.name if version else "-", version.digest[:16] if version else "-", behind, said, state)


def _say(report: FollowerReport) -> None:
    if report.error:
        typer.echo(f"{report.name}: {report.error}", err=True)
    elif report.version is None:
        typer.echo(f"{report.name}: the chain is empty", err=True)
    elif report.following:
        typer.echo(
            f"{report.name} serves {report.version.name} ({report.moved_bytes:,} bytes in {report.pull_s:.2f} s), "
            f"{report.version.digest}"
        )


def _token(variable: str) -> str:
    if not (token := os.environ.get(variable)):
        raise ConfigError(f"the environment variable {variable} is not set; put the engine's access token there")
    return token


def _host_and(what: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{socket.gethostname()}-{what}").strip("-._")[:100] or "follower"

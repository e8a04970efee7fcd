"""`fathom weights RUN`: the versions that can be rebuilt, and any of them as a folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from fathom.apps.cli.arguments import DEFAULT_RUNS_DIR, AsJson, RunName, RunsDir
from fathom.apps.cli.weights.ago import ago
from fathom.core.errors import ConfigError
from fathom.evidence.runs import find_run

Version = Annotated[
    int | None, typer.Option("--version", metavar="N", help="rebuild this one; -7: the newest less seven steps")
]
Incarnation = Annotated[
    int | None, typer.Option("--incarnation", metavar="I", help="which of several N [default: the latest that stands]")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Hugging Face folder to make of it")]


def show(
    run: RunName,
    version: Version = None,
    incarnation: Incarnation = None,
    out: Out = None,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    as_json: AsJson = False,
) -> None:
    """List the versions of a run that can be rebuilt, or rebuild one of them. `show` may be left out."""
    folder = find_run(run, runs_dir)
    if (version is None) != (out is None):
        raise ConfigError("--version N and --out DIR belong together: which version, and the folder to make of it")
    if version is None and incarnation is not None:
        raise ConfigError("--incarnation says which of several versions N is meant: give --version N too")
    if version is not None and out is not None:
        _rebuild(folder, version, incarnation, out, as_json)
    else:
        _list(folder, as_json)


def _rebuild(folder: Path, number: int, incarnation: int | None, out: Path, as_json: bool) -> None:
    console = Console(stderr=True, soft_wrap=True)
    with console.status("rebuilding", spinner="dots"):
        from fathom.run.weights.rebuild import rebuild  # needs torch

        version = rebuild(folder, number, incarnation, out)
    if as_json:
        typer.echo(msgspec.json.encode(version).decode())
    console.print(f"{out} is {version.name} of {folder.name}, to the bit: {version.digest}", highlight=False)


def _list(folder: Path, as_json: bool) -> None:
    from fathom.run.weights.rebuild import stored_versions  # needs torch

    versions = stored_versions(folder)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(versions)))
        return
    console = Console()
    if not versions:
        console.print(f"{folder.name} holds no version that can be rebuilt", highlight=False)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("version", "in the chain as", "digest"):
        table.add_column(title)
    for title in ("behind", "bytes", "recorded"):
        table.add_column(title, justify="right")
    now_s = time.time()
    for each in reversed(versions):
        cells = (each.name, " and ".join(each.kinds), each.digest[:16], str(each.behind), f"{each.size_bytes:,}")
        table.add_row(*cells, ago(now_s - each.recorded_s))
    console.print(table)
    total = sum(each.size_bytes for each in versions)
    console.print(f"{len(versions)} versions, {total:,} bytes; rebuild one: --version N --out DIR", highlight=False)

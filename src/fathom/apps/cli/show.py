"""`fathom show`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from fathom.apps.cli.arguments import DEFAULT_RUNS_DIR, AsJson, RunName, RunsDir
from fathom.apps.cli.summary_view import sections
from fathom.apps.cli.tuning.view import tuning_sections
from fathom.core.errors import ConfigError
from fathom.evidence.report.picture import draw
from fathom.evidence.report.summary import RunSummary, summarise
from fathom.evidence.runs import adapters_of, describe_run, find_folder, ledger_of
from fathom.evidence.tuning.summary import TuningSummary, is_tuning, summarise_tuning
from fathom.ledger.reader import LedgerReader

Picture = Annotated[Path | None, typer.Option("--picture", metavar="FILE.png", help="also draw it (extra: plot)")]


def show(run: RunName, runs_dir: RunsDir = DEFAULT_RUNS_DIR, as_json: AsJson = False, picture: Picture = None) -> None:
    """What a run learnt, and its books, ages, mismatch, publications and speed."""
    folder = find_folder(run, runs_dir)
    if adapters := adapters_of(folder):
        _show_each(folder, adapters, as_json, picture)
        return
    with LedgerReader(ledger_of(folder)) as reader:
        if is_tuning(reader):
            _show_tuning(folder, summarise_tuning(reader), as_json, picture)
            return
        summary = summarise(reader)
    if picture is not None:
        draw(summary, folder.name, picture)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(summary)))
        return
    console = Console()
    for section in sections(describe_run(folder), summary):
        console.print(section)
        console.print()
    if picture is not None:
        console.print(f"picture: {picture}", highlight=False)


def _show_each(folder: Path, adapters: Mapping[str, Path], as_json: bool, picture: Path | None) -> None:
    """Of a run of several adapters: what each learnt, one after the other."""
    if picture is not None:
        raise ConfigError(f"--picture draws one adapter; name it: {', '.join(f'{folder}/{name}' for name in adapters)}")
    summaries: dict[str, RunSummary] = {}
    for name, path in adapters.items():
        with LedgerReader(ledger_of(path)) as reader:
            summaries[name] = summarise(reader)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode({"adapters": summaries})))
        return
    console = Console()
    for name, summary in summaries.items():
        listing = replace(describe_run(adapters[name]), name=f"{folder.name}/{name}")
        for section in sections(listing, summary):
            console.print(section)
            console.print()


def _show_tuning(folder: Path, summary: TuningSummary, as_json: bool, picture: Path | None) -> None:
    if picture is not None:
        raise ConfigError("--picture draws runs of fathom train; of this one fathom show prints the curve")
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(summary)))
        return
    console = Console()
    for section in tuning_sections(describe_run(folder), summary):
        console.print(section)
        console.print()

"""`fathom trajectories export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fathom.apps.cli.arguments import DEFAULT_RUNS_DIR, RunName, RunsDir
from fathom.core.errors import ConfigError
from fathom.core.ids import TrajectoryId
from fathom.evidence.atif.export import documents_of, file_name
from fathom.evidence.atif.words import Words
from fathom.evidence.runs import find_run, ledger_of, tokenizer_of
from fathom.ledger.reader import LedgerReader
from fathom.text.atif.document import encode


class Format(StrEnum):
    """Formats of files."""

    ATIF = "atif"


Written = Annotated[Format, typer.Option("--format", help="format of the files")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="a new or empty folder")]
Step = Annotated[int | None, typer.Option("--step", help="those that this step trained on [default: all that ended]")]
Trajectory = Annotated[str | None, typer.Option("--trajectory", metavar="ID", help="this trajectory")]


def export(
    run: RunName,
    out: Out,
    written: Written = Format.ATIF,
    step: Step = None,
    trajectory: Trajectory = None,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
) -> None:
    """Write trajectories of a run, one file for each branch of their conversations."""
    if step is not None and trajectory is not None:
        raise ConfigError("give --step or --trajectory, not both")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already and not an empty folder; give another --out")
    folder = find_run(run, runs_dir)
    words = Words(tokenizer_of(folder))
    files = 0
    with LedgerReader(ledger_of(folder)) as reader:
        names = _chosen(reader, step, trajectory)
        out.mkdir(parents=True, exist_ok=True)
        for name in names:
            for branch, document in enumerate(documents_of(reader.trajectory(name), folder.name, words)):
                (out / file_name(name, branch)).write_bytes(encode(document))
                files += 1
    Console(soft_wrap=True).print(
        f"{len(names)} trajectories in {files} {written.value} files in {out}", highlight=False, markup=False
    )


def _chosen(reader: LedgerReader, step: int | None, trajectory: str | None) -> list[TrajectoryId]:
    """Each once, in the order in which they ended, or of the step's rows."""
    if trajectory is not None:
        return [reader.trajectory(TrajectoryId(trajectory)).entry.id]
    if step is None:
        return [entry.id for entry in reader.trajectories()]
    names = list(dict.fromkeys(row.trajectory for row in reader.rows_at(step)))
    if not names:
        raise ConfigError(f"there is no step {step} that trained on anything; fathom show lists the steps")
    return names

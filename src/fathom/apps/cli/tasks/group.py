"""`fathom tasks`: task folders in Harbor's format."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fathom.core.errors import FathomError
from fathom.envs.harbor.admission import Admission, check_folders
from fathom.envs.harbor.folder import task_folders
from fathom.envs.harbor.generating import write_tasks

Folders = Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="task folders, or folders of task folders")]
Seed = Annotated[int, typer.Option("--seed", help="which tasks are drawn")]
Count = Annotated[int, typer.Option("--count", min=1, help="training tasks")]
HeldOut = Annotated[int, typer.Option("--held-out", min=0, help="held-out tasks; they do not depend on --count")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="a new folder")]

tasks = typer.Typer(no_args_is_help=True, help="Terminal tasks, as folders in Harbor's format.")


@tasks.command()
def check(folders: Folders) -> None:
    """Run each task's own solution, which must get 1, and nothing at all, which must get 0. Else exit code 1."""
    console = Console(soft_wrap=True)
    found = task_folders(folders)
    with console.status(f"{len(found)} tasks"):
        rows = asyncio.run(check_folders(found))
    console.print(_table(rows))
    admitted = sum(row.admitted for row in rows)
    console.print(f"{admitted} of {len(rows)} tasks are admitted", highlight=False)
    if admitted < len(rows):
        raise FathomError("tasks that are not admitted must not be trained on; the table says why")


@tasks.command()
def generate(seed: Seed, count: Count, out: Out, held_out: HeldOut = 20) -> None:
    """Write small terminal tasks made from a seed: DIR/train and, with other tasks, DIR/eval."""
    write_tasks(out, seed, count, held_out)
    Console(soft_wrap=True).print(f"{count} tasks in {out / 'train'}, {held_out} in {out / 'eval'}", highlight=False)


def _table(rows: list[Admission]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("task", "solution", "nothing", "admitted", "why not"):
        table.add_column(title, overflow="fold")
    for row in rows:
        rewards = ("-" if value is None else f"{value:g}" for value in (row.oracle, row.no_op))
        table.add_row(row.name, *rewards, "yes" if row.admitted else "no", row.reason.replace("[", r"\["))
    return table

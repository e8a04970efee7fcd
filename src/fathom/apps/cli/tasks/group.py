"""`fathom tasks`: task folders in Harbor's format, and tasks as rows of files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fathom.config.load import apply_override
from fathom.core.errors import ConfigError, FathomError
from fathom.core.ports.environment import DemonstratedEnvironment
from fathom.envs.harbor.admission import Admission, check_folders
from fathom.envs.harbor.folder import task_folders
from fathom.envs.harbor.generating import write_tasks
from fathom.envs.harbor.places.provider import LOCAL, provider_of
from fathom.envs.registry import build_environment
from fathom.envs.written_rows import write_rows

Folders = Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="task folders, or folders of task folders")]
ProviderName = Annotated[
    str, typer.Option("--provider", metavar="NAME", help="where they run: local, or a provider of Harbor's")
]
ProviderOptions = Annotated[
    list[str] | None, typer.Option("--provider-option", metavar="KEY=VALUE", help="an option of that provider's")
]
Seed = Annotated[int, typer.Option("--seed", help="which tasks are drawn")]
Count = Annotated[int, typer.Option("--count", min=1, help="training tasks")]
HeldOut = Annotated[int, typer.Option("--held-out", min=0, help="held-out tasks; they do not depend on --count")]
Families = Annotated[
    list[str] | None, typer.Option("--family", metavar="NAME", help="a kind of tasks; may be repeated; all by default")
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="a new folder")]
Kind = Annotated[str, typer.Argument(metavar="KIND", help="a task family that can show good answers, e.g. arithmetic")]
Options = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="the family's options")]
Rows = Annotated[Path, typer.Option("--out", metavar="DIR", help="the folder")]
Pairs = Annotated[bool, typer.Option("--pairs", help="write a wrong answer beside each good one, for fathom dpo")]
RowsSeed = Annotated[int, typer.Option("--seed", help="which wrong answers are drawn")]
ROWS = Path("data")

tasks = typer.Typer(no_args_is_help=True, help="Tasks as files: folders in Harbor's format, rows to tune on.")


@tasks.command()
def check(folders: Folders, provider: ProviderName = LOCAL, provider_option: ProviderOptions = None) -> None:
    """Run each task's own solution, which must get 1, and nothing at all, which must get 0. Else exit code 1."""
    console = Console(soft_wrap=True)
    found = task_folders(folders)
    options: dict[str, Any] = {}
    for item in provider_option or ():
        apply_override(options, item)
    harbors = provider_of(provider, options)
    with console.status(f"{len(found)} tasks"):
        rows = asyncio.run(check_folders(found, harbors))
    console.print(_table(rows))
    admitted = sum(row.admitted for row in rows)
    console.print(f"{admitted} of {len(rows)} tasks are admitted", highlight=False)
    if admitted < len(rows):
        raise FathomError("tasks that are not admitted must not be trained on; the table says why")


@tasks.command()
def generate(seed: Seed, count: Count, out: Out, held_out: HeldOut = 20, family: Families = None) -> None:
    """Write small terminal tasks made from a seed: DIR/train and, with other tasks, DIR/eval."""
    write_tasks(out, seed, count, held_out, family or ())
    Console(soft_wrap=True).print(f"{count} tasks in {out / 'train'}, {held_out} in {out / 'eval'}", highlight=False)


@tasks.command()
def rows(kind: Kind, options: Options = None, out: Rows = ROWS, pairs: Pairs = False, seed: RowsSeed = 0) -> None:
    """Write a task family with its good answers as rows, DIR/train.jsonl and DIR/eval.jsonl, to tune on."""
    tree: dict[str, Any] = {}
    for option in options or ():
        apply_override(tree, option)
    environment = build_environment(kind, tree)
    if not isinstance(environment, DemonstratedEnvironment):
        raise ConfigError(f"tasks of {kind!r} show no good answers, so there is nothing to write")
    written = write_rows(environment, out, pairs=pairs, seed=seed)
    told = f"{written.train} rows in {out / 'train.jsonl'}, {written.held_out} in {out / 'eval.jsonl'}"
    Console(soft_wrap=True).print(told, highlight=False)


def _table(rows: list[Admission]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("task", "solution", "nothing", "admitted", "why not"):
        table.add_column(title, overflow="fold")
    for row in rows:
        rewards = ("-" if value is None else f"{value:g}" for value in (row.oracle, row.no_op))
        table.add_row(row.name, *rewards, "yes" if row.admitted else "no", row.reason.replace("[", r"\["))
    return table

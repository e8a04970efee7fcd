"""`fathom sft` and `fathom dpo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fathom.apps.cli.tuning.progress import TuningProgress
from fathom.run.tuning.prepare import describe
from fathom.run.tuning.run import TuningRun

File = Annotated[Path, typer.Argument(metavar="FILE.toml", help="the run's config")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="options to change")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the resolved config and what it will do; start nothing")]


def sft(file: File, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Supervised fine-tuning on conversations; the loss is on the assistant's tokens."""
    start_tuning(TuningRun.from_toml("sft", file, overrides or []), dry_run)


def dpo(file: File, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Preference training (DPO) on pairs of answers."""
    start_tuning(TuningRun.from_toml("dpo", file, overrides or []), dry_run)


def start_tuning(run: TuningRun, dry_run: bool) -> None:
    """Say what it will do, and do it. Exits with the run's code."""
    config = run.plan.config
    console = Console(stderr=not dry_run, soft_wrap=not dry_run)
    for line in describe(config, run.plan.prepared):
        console.print(f"- {line}", highlight=False)
    if dry_run:
        console.print_json(config.model_dump_json())
        return
    with TuningProgress(console, run.plan.prepared.steps) as progress:
        result = run.start([progress])
    if result.folder.is_dir():  # a run that was stopped before it recorded anything leaves none
        console.print(f"{result.folder}\nlook at it with: fathom show {result.folder}", highlight=False)
    raise typer.Exit(result.exit_code)

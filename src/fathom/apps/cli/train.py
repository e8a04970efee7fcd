"""`fathom train`, `fathom resume` and `fathom demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fathom.apps.cli.arguments import DEFAULT_RUNS_DIR, RunName, RunsDir
from fathom.apps.cli.progress import Progress
from fathom.apps.cli.tuning.commands import start_tuning
from fathom.apps.recipes import recipe
from fathom.config.load import load_config
from fathom.evidence.runs import find_folder
from fathom.run.adapters.configs import describe_each
from fathom.run.adapters.run import AdaptersRun, adapters_in
from fathom.run.resolve import describe
from fathom.run.run import Run, RunResult
from fathom.run.tuning.run import TuningRun, kind_of

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="options to change")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the resolved config and what it will do; start nothing")]


def train(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="the run's config")],
    overrides: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Start a run."""
    config = load_config(file, overrides or [])
    if config.adapters:
        _start_each(AdaptersRun(config), dry_run)
    else:
        _start(Run(config), dry_run)


def resume(run: RunName, runs_dir: RunsDir = DEFAULT_RUNS_DIR) -> None:
    """Go on with a run from its newest checkpoint, as the config.json in its folder says."""
    folder = find_folder(run, runs_dir)
    if kind_of(folder):
        start_tuning(TuningRun.resume(folder), dry_run=False)
    elif adapters_in(folder):
        _start_each(AdaptersRun.resume(folder), dry_run=False)
    else:
        _start(Run.resume(folder), dry_run=False)


def demo(overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """See a tiny model learn arithmetic: asynchronous RL on this machine's CPU, in about three minutes."""
    _start(Run.from_toml(recipe("arithmetic"), overrides or []), dry_run)


def _start(run: Run, dry_run: bool) -> None:
    console = Console(stderr=not dry_run, soft_wrap=not dry_run)
    for line in describe(run.resolved):
        console.print(f"- {line}", highlight=False)
    if dry_run:
        console.print_json(run.resolved.config.model_dump_json())
        return
    with Progress(console, run.resolved.config.trainer.steps) as progress:
        result = run.start([progress])
    _end(console, result)


def _start_each(run: AdaptersRun, dry_run: bool) -> None:
    console = Console(stderr=not dry_run, soft_wrap=not dry_run)
    for line in describe_each(run.resolved):
        console.print(f"- {line}", highlight=False)
    if dry_run:
        console.print_json(data={name: each.config.model_dump(mode="json") for name, each in run.resolved.items()})
        return
    steps = {name: each.config.trainer.steps for name, each in run.resolved.items()}
    result = run.start({name: [Progress(console, count, of=name)] for name, count in steps.items()})
    _end(console, result)


def _end(console: Console, result: RunResult) -> None:
    if result.folder.is_dir():  # a run that was stopped before it recorded anything leaves none
        console.print(f"{result.folder}\nlook at it with: fathom show {result.folder}", highlight=False)
    raise typer.Exit(result.exit_code)

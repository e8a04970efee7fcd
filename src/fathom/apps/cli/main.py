"""The command `fathom`: every sub-command in one list. Parses, calls, and turns errors into one line and a code."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from fathom.apps.cli.audit import audit
from fathom.apps.cli.bench import bench
from fathom.apps.cli.doctor import doctor
from fathom.apps.cli.live.fleet import fleet
from fathom.apps.cli.plan.sync import plan
from fathom.apps.cli.runs import runs
from fathom.apps.cli.show import show
from fathom.apps.cli.stock.engines import engines
from fathom.apps.cli.stock.models import models
from fathom.apps.cli.tasks.group import tasks
from fathom.apps.cli.templates.check import template
from fathom.apps.cli.trace import trace
from fathom.apps.cli.train import demo, resume, train
from fathom.apps.cli.trajectories.group import trajectories
from fathom.apps.cli.tuning.commands import dpo, sft
from fathom.apps.cli.weights.group import weights
from fathom.core.errors import ConfigError, FathomError

COMMANDS = (train, sft, dpo, resume, demo, runs, show, trace, audit, doctor)
"""Commands, in the order of the help."""
GROUPS: dict[str, typer.Typer] = {
    "models": models,
    "engines": engines,
    "fleet": fleet,
    "plan": plan,
    "template": template,
    "weights": weights,
    "tasks": tasks,
    "trajectories": trajectories,
    "bench": bench,
}
"""Commands with sub-commands of their own."""

BAD_INPUT, FAILED = 2, 1

app = typer.Typer(
    name="fathom",
    help="Asynchronous reinforcement learning for language models that accounts for every token it trains on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    app.command()(command)
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 the input is wrong and nothing was started."""
    try:
        app()
    except FathomError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_plain(error)}", highlight=False)
        sys.exit(BAD_INPUT if isinstance(error, ConfigError) else FAILED)
    except OSError as error:
        if error.filename is None:  # not about a file: a fault of ours, whose place is told
            raise
        told = f"{error.strerror}: {error.filename!r}; name another place, or set it right"
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {_plain(told)}", highlight=False)
        sys.exit(FAILED)


def _plain(error: Exception | str) -> str:
    """The message with its brackets kept, not read as markup."""
    return str(error).replace("[", r"\[")

"""`fathom trajectories`: the group."""

from __future__ import annotations

import typer

from fathom.apps.cli.trajectories.check import check
from fathom.apps.cli.trajectories.export import export

trajectories = typer.Typer(no_args_is_help=True, help="Trajectories as files in formats that others read and write.")
trajectories.command()(export)
trajectories.command()(check)

"""`fathom weights`: a group whose first command is meant when none is named."""

from __future__ import annotations

from typing import Any, final

import typer
from typer.core import TyperGroup

from fathom.apps.cli.weights.follow import follow, followers
from fathom.apps.cli.weights.show import show

_MEANT = "show"


@final
class RunFirst(TyperGroup):
    """`fathom weights RUN` is `fathom weights show RUN`. A run called like a command is given by its folder."""

    def spelled_out(self, args: list[str]) -> list[str]:
        """The arguments, with the command in front where none is named."""
        named = not args or args[0] in self.commands or args[0] == "--help"
        return args if named else [_MEANT, *args]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer's own copy of click has no public name
        """See `spelled_out`."""
        return super().parse_args(ctx, self.spelled_out(args))


weights = typer.Typer(
    cls=RunFirst,
    no_args_is_help=True,
    help="Versions that a run's chain holds: list them, rebuild one, follow them. `fathom weights RUN` lists.",
)
weights.command(_MEANT)(show)
weights.command()(follow)
weights.command()(followers)

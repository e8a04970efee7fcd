"""`fathom bench`: workloads whose numbers are filed as records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fathom.apps.cli.arguments import AsJson
from fathom.apps.cli.bench_view import sections
from fathom.bench.record import file_record
from fathom.bench.workloads import WORKLOADS, Workload, run_workload
from fathom.config.load import apply_override

DEFAULT_OUT = Path("bench")

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="options to change")]
Model = Annotated[
    str | None, typer.Option("--model", metavar="DIR", help="model folder [default: the demo's tiny model]")
]
TrlPython = Annotated[str | None, typer.Option("--trl-python", metavar="PATH", help="an interpreter that has TRL")]
InstallTrl = Annotated[
    Path | None, typer.Option("--install-trl", metavar="DIR", help="make such an environment, then end")
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="where records are filed")]

bench = typer.Typer(no_args_is_help=True, help="Measure this machine; every number is filed in a record.")


def probe(overrides: Overrides = None, model: Model = None, out: Out = DEFAULT_OUT, as_json: AsJson = False) -> None:
    """See `WORKLOADS`."""
    _measure("probe", overrides, {"model": model}, out, as_json)


def pipeline(overrides: Overrides = None, model: Model = None, out: Out = DEFAULT_OUT, as_json: AsJson = False) -> None:
    """See `WORKLOADS`."""
    _measure("pipeline", overrides, {"model": model}, out, as_json)


def ledger(overrides: Overrides = None, out: Out = DEFAULT_OUT, as_json: AsJson = False) -> None:
    """See `WORKLOADS`."""
    _measure("ledger", overrides, {}, out, as_json)


def sync(overrides: Overrides = None, model: Model = None, out: Out = DEFAULT_OUT, as_json: AsJson = False) -> None:
    """See `WORKLOADS`."""
    _measure("sync", overrides, {"model": model}, out, as_json)


def train(
    overrides: Overrides = None,
    model: Model = None,
    trl_python: TrlPython = None,
    install_trl: InstallTrl = None,
    out: Out = DEFAULT_OUT,
    as_json: AsJson = False,
) -> None:
    """See `WORKLOADS`."""
    if install_trl is not None:
        from fathom.bench.trl import install_trl as install

        Console().print(f"use it with: --trl-python {install(install_trl)}", highlight=False)
        return
    _measure("train", overrides, {"model": model, "trl_python": trl_python}, out, as_json)


COMMANDS: dict[str, Callable[..., None]] = {
    "probe": probe,
    "pipeline": pipeline,
    "ledger": ledger,
    "sync": sync,
    "train": train,
}
"""One per workload."""


def _measure(name: str, overrides: list[str] | None, flags: dict[str, str | None], out: Path, as_json: bool) -> None:
    """Run a workload, file and show its record. Exit code 1 when a required target was missed."""
    values: dict[str, Any] = {flag: value for flag, value in flags.items() if value is not None}
    for override in overrides or []:
        apply_override(values, override)
    progress = Console(stderr=True)
    record = run_workload(name, values, lambda line: progress.print(line, style="dim", highlight=False))
    path = file_record(record, out)
    if as_json:
        typer.echo(path.read_text(encoding="utf-8"))
    else:
        console = Console()
        for section in sections(record):
            console.print(section)
            console.print()
        console.print(f"record: {path}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if record.failed else 0)


def _help(workload: Workload) -> str:
    """Its sentence and its options."""
    fields = workload.options.model_fields.items()
    lines = [
        f"{name}: {' '.join((field.description or '').split())} (default: {field.default})" for name, field in fields
    ]
    return "\n\n".join([workload.about, "Options (KEY=VALUE):", *lines])


for _name, _command in COMMANDS.items():
    bench.command(_name, help=_help(WORKLOADS[_name]))(_command)

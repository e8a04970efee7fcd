"""`fathom bench`: workloads whose numbers are filed as records."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fathom.apps.cli.arguments import AsJson
from fathom.bench.record import BenchRecord, Sample, file_record, read_record, require_place
from fathom.bench.workloads import WORKLOADS, Workload, run_workload
from fathom.config.load import apply_override
from fathom.core.errors import ConfigError

DEFAULT_OUT = Path("bench")

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="options to change")]
Model = Annotated[
    str | None, typer.Option("--model", metavar="DIR", help="model folder [default: the demo's tiny model]")
]
TrlPython = Annotated[str | None, typer.Option("--trl-python", metavar="PATH", help="an interpreter that has TRL")]
Vllm = Annotated[str | None, typer.Option("--vllm", metavar="DIR", help="an environment that has vLLM")]
InstallTrl = Annotated[
    Path | None, typer.Option("--install-trl", metavar="DIR", help="make such an environment, then end")
]
Picture = Annotated[Path | None, typer.Option("--picture", metavar="FILE.png", help="also draw it (extra: plot)")]
Recorded = Annotated[
    Path | None, typer.Option("--record", metavar="FILE.json", help="show this record instead of measuring")
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="where records are filed")]

bench = typer.Typer(no_args_is_help=True, help="Measure this machine; every number is filed in a record.")


def probe(overrides: Overrides = None, model: Model = None, out: Out = DEFAULT_OUT, as_json: AsJson = False) -> None:
    """See `WORKLOADS`."""
    _measure("probe", overrides, {"model": model}, out, as_json)


def engine(
    overrides: Overrides = None,
    model: Model = None,
    vllm: Vllm = None,
    out: Out = DEFAULT_OUT,
    as_json: AsJson = False,
) -> None:
    """See `WORKLOADS`."""
    _measure("engine", overrides, {"model": model, "vllm": vllm}, out, as_json)


def pipeline(overrides: Overrides = None, model: Model = None, out: Out = DEFAULT_OUT, as_json: AsJson = False) -> None:
    """See `WORKLOADS`."""
    _measure("pipeline", overrides, {"model": model}, out, as_json)


def ledger(overrides: Overrides = None, out: Out = DEFAULT_OUT, as_json: AsJson = False) -> None:
    """See `WORKLOADS`."""
    _measure("ledger", overrides, {}, out, as_json)


def session(overrides: Overrides = None, out: Out = DEFAULT_OUT, as_json: AsJson = False) -> None:
    """See `WORKLOADS`."""
    _measure("session", overrides, {}, out, as_json)


def sync(
    overrides: Overrides = None,
    model: Model = None,
    picture: Picture = None,
    record: Recorded = None,
    out: Out = DEFAULT_OUT,
    as_json: AsJson = False,
) -> None:
    """See `WORKLOADS`."""
    if record is None:
        _measure("sync", overrides, {"model": model}, out, as_json, _drawn(picture))
    elif overrides or model:
        raise ConfigError("--record shows what was measured; give no options of a measurement with it")
    else:
        measured = read_record(record)
        _drawn(picture)(measured)
        _show(measured, record, as_json)


def lora(overrides: Overrides = None, model: Model = None, out: Out = DEFAULT_OUT, as_json: AsJson = False) -> None:
    """See `WORKLOADS`."""
    _measure("lora", overrides, {"model": model}, out, as_json)


def _drawn(picture: Path | None) -> Callable[[BenchRecord], None]:
    """Draws a record into that file. None: draws nothing. Raises ConfigError at once when nothing can be drawn here."""
    if picture is None:
        return lambda record: None
    from fathom.bench.workloads.sync.picture import draw
    from fathom.core.picture import require_matplotlib

    require_matplotlib("--picture")
    return lambda record: draw(record, picture)


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
        from fathom.bench.peers.trl_python import install_trl as install

        Console().print(f"use it with: --trl-python {install(install_trl)}", highlight=False)
        return
    _measure("train", overrides, {"model": model, "trl_python": trl_python}, out, as_json)


COMMANDS: dict[str, Callable[..., None]] = {
    "probe": probe,
    "engine": engine,
    "pipeline": pipeline,
    "ledger": ledger,
    "session": session,
    "sync": sync,
    "lora": lora,
    "train": train,
}
"""One per workload."""


def _measure(
    name: str,
    overrides: list[str] | None,
    flags: dict[str, str | None],
    out: Path,
    as_json: bool,
    also: Callable[[BenchRecord], None] = lambda record: None,
) -> None:
    """Run a workload, file and show its record. Exit code 1 when a required target was missed."""
    values: dict[str, Any] = {flag: value for flag, value in flags.items() if value is not None}
    for override in overrides or []:
        apply_override(values, override)
    require_place(out)
    progress = Console(stderr=True)
    record = run_workload(name, values, lambda line: progress.print(line, style="dim", highlight=False))
    path = file_record(record, out)
    also(record)
    _show(record, path, as_json)
    raise typer.Exit(1 if record.failed else 0)


def _show(record: BenchRecord, path: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(path.read_text(encoding="utf-8"))
        return
    console = Console()
    if not console.is_terminal:
        console.width = _PAPER
    for section in sections(record):
        console.print(section)
        console.print()
    console.print(f"record: {path}", highlight=False, soft_wrap=True)


_PAPER = 140
"""Columns where the output is no terminal's."""


def _help(workload: Workload) -> str:
    """Its sentence and its options."""
    fields = workload.options.model_fields.items()
    lines = [
        f"{name}: {' '.join((field.description or '').split())} (default: {field.default})" for name, field in fields
    ]
    return "\n\n".join([workload.about, "Options (KEY=VALUE):", *lines])


def sections(record: BenchRecord) -> Iterator[RenderableType]:
    """Where, what, and against what."""
    yield _header(record)
    yield from _numbers(record)
    if record.targets:
        yield _targets(record)


def _header(record: BenchRecord) -> RenderableType:
    machine = record.machine
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started_s))
    text = Text(record.id, style="bold")
    text.append(f"\n{started}, {record.seconds:.0f} s; {machine.processor}, {machine.cores} cores, load ", "default")
    text.append(f"{machine.load:.1f}", "yellow" if machine.load > machine.cores / 2 else "default")
    text.append(f"; torch {machine.libraries['torch']}, Python {machine.python}")
    if record.git is not None:
        text.append(
            f"; {record.git.commit[:12]}" + (f" with {len(record.git.changed)} changes" if record.git.changed else "")
        )
    for note in record.notes:
        text.append(f"\n{note}", "dim")
    return text


def _numbers(record: BenchRecord) -> Iterator[RenderableType]:
    """Every measure of every variant: with its range in a row of its own, or, where there are many, in a column."""
    rows = list(_measures(record))
    if len(rows) > _MOST_ROWS:
        yield from _wide(rows)
    elif rows:
        yield _long(rows)


_MOST_ROWS = 60
_Row = tuple[str, str, list[Sample]]


def _long(rows: list[_Row]) -> Table:
    """Median and range."""
    table = _table("variant", "measure")
    for title in ("median", "min", "max", "n"):
        table.add_column(title, justify="right")
    shown = ""
    for variant, measure, samples in rows:
        values = [sample.value for sample in samples]
        unit = samples[0].unit
        cells = [number(value, unit) for value in (statistics.median(values), min(values), max(values))]
        table.add_row("" if variant == shown else variant, measure, *cells, str(len(values)))
        shown = variant
    return table


def _wide(rows: list[_Row]) -> Iterator[Table]:
    """Medians; a table for each set of measures. The ranges are in the record."""
    variants: dict[str, dict[str, str]] = {}
    for variant, measure, samples in rows:
        median = statistics.median(sample.value for sample in samples)
        variants.setdefault(variant, {})[measure] = number(median, samples[0].unit)
    shapes: dict[tuple[str, ...], list[str]] = {}
    for variant, cells in variants.items():
        shapes.setdefault(tuple(cells), []).append(variant)
    for measures, names in shapes.items():
        table = _table("median of")
        for measure in measures:
            table.add_column(measure, justify="right")
        for name in names:
            table.add_row(name, *variants[name].values())
        yield table


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


def _measures(record: BenchRecord) -> Iterator[_Row]:
    groups: dict[str, dict[str, list[Sample]]] = {}
    for sample in record.samples:
        groups.setdefault(sample.variant, {}).setdefault(sample.measure, []).append(sample)
    for variant, measures in groups.items():
        for measure, samples in measures.items():
            yield variant, measure, samples


def _targets(record: BenchRecord) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    for target in record.targets:
        missed = Text("FAIL", style="bold red") if target.required else Text("missed", style="yellow")
        verdict = Text("met", style="green") if target.met else missed
        bound = f"{'at most' if target.at_most else 'at least'} {number(target.limit, '')}"
        table.add_row(verdict, target.claim, number(target.measured, ""), bound)
    return table


def number(value: float, unit: str) -> str:
    """A number a person can read, with its unit."""
    if unit == "s" and abs(value) < 1:
        return f"{value * 1e3:.1f} ms"
    if value == int(value) and abs(value) < 1e15:
        text = f"{int(value):,}"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    elif abs(value) >= 0.01:
        text = f"{value:.3f}"
    else:
        text = f"{value:.2e}"
    return f"{text} {unit}".rstrip()


for _name, _command in COMMANDS.items():
    bench.command(_name, help=_help(WORKLOADS[_name]))(_command)

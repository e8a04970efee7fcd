"""A benchmark's record as tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fathom.bench.record import BenchRecord, Sample


def sections(record: BenchRecord) -> Iterator[RenderableType]:
    """Where, what, and against what."""
    yield _header(record)
    yield _numbers(record)
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


def _numbers(record: BenchRecord) -> RenderableType:
    """Median and range of every measure of every variant."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("variant", "measure"):
        table.add_column(title, no_wrap=True)
    for title in ("median", "min", "max", "n"):
        table.add_column(title, justify="right")
    shown = ""
    for variant, measure, samples in _measures(record):
        values = [sample.value for sample in samples]
        unit = samples[0].unit
        cells = [number(value, unit) for value in (statistics.median(values), min(values), max(values))]
        table.add_row("" if variant == shown else variant, measure, *cells, str(len(values)))
        shown = variant
    return table


def _measures(record: BenchRecord) -> Iterator[tuple[str, str, list[Sample]]]:
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

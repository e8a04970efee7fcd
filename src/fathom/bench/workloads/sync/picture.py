"""The crossover pictures of a record: transfers over size, and deltas against full files over the speed of storage."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fathom.bench.options import SyncOptions
from fathom.bench.record import BenchRecord, Sample, values
from fathom.bench.workloads.sync.crossover import (
    DELTA,
    FULL,
    crossover_mb_per_s,
    measured_s,
    measured_speeds,
    predicted_s,
    was_measured,
)
from fathom.bench.workloads.sync.names import TRANSFER, fleet_variant
from fathom.core.errors import ConfigError
from fathom.core.picture import BLACK, BLUE, BROWN, GREEN, GREY, ORANGE, PURPLE, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = {
    "shared": (BLUE, "-", "o"),
    "disk": (BROWN, "-", "s"),
    "broadcast": (ORANGE, "-", "^"),
    "raw Gloo": (ORANGE, ":", ""),
    "p2p by NIXL": (GREEN, "-", "D"),
    "raw NIXL": (GREEN, ":", ""),
    "p2p by Mooncake": (PURPLE, "-", "v"),
    "raw Mooncake": (PURPLE, ":", ""),
    "delta": (BLACK, "-", "P"),
}
"""What is drawn over size: color, line and mark. Dotted: the bare library."""
_SIZE_LABEL = "MB of a version"
_SLOWEST, _FASTEST, _POINTS = 10.0, 10_000.0, 60


def draw(record: BenchRecord, file: Path) -> None:
    """Write what the record of a `sync` bench shows to an image `file` (.png, .svg, .pdf).

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the record is of another workload, holds nothing that is drawn, or the file cannot be written.
    """
    panels = _panels(record)
    with picture(file, option="--picture", inches=(4.6 * len(panels) + 0.4, 4.4)) as figure:
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel(axes)
        _share(figure)
        figure.suptitle(f"{record.id}: {record.machine.processor}, {record.machine.cores} cores", x=0.01, ha="left")


def _panels(record: BenchRecord) -> list[Callable[[Axes], None]]:
    """One for the fewest and one for the most receivers, and one for deltas, where they were measured."""
    if record.workload != "sync":
        raise ConfigError(f"{record.id} is of the workload {record.workload!r}; a picture is drawn of `sync` only")
    options = SyncOptions.model_validate(msgspec.json.decode(record.options), strict=False)
    counts = sorted({min(options.receivers), max(options.receivers)})
    panels: list[Callable[[Axes], None]] = [
        lambda axes, count=count: _sizes(axes, record.samples, options.sizes_mb, count)
        for count in counts
        if any(_points(record.samples, what, options.sizes_mb, count) for what in _LINES)
    ]
    rates = [lr for lr in options.learning_rates if was_measured(record.samples, lr)]
    if rates:
        panels.append(lambda axes: _storage(axes, record.samples, rates[-1]))
    if not panels:
        raise ConfigError(f"{record.id} holds neither transfers to receivers nor deltas; measure parts fleet or delta")
    return panels


def _points(samples: Sequence[Sample], what: str, sizes_mb: Sequence[int], count: int) -> list[tuple[int, float]]:
    """(size, median seconds) where it was measured."""
    found = [(size, values(samples, fleet_variant(what, size, count), TRANSFER)) for size in sorted(sizes_mb)]
    return [(size, statistics.median(seconds)) for size, seconds in found if seconds]


def _sizes(axes: Axes, samples: Sequence[Sample], sizes_mb: Sequence[int], count: int) -> None:
    axes.set_title(f"transfer to {count} receiver{'s' if count > 1 else ''}, one machine")
    for what, (color, line, mark) in _LINES.items():
        points = _points(samples, what, sizes_mb, count)
        if points:
            sizes, seconds = zip(*points, strict=True)
            axes.plot(sizes, seconds, color=color, linestyle=line, marker=mark, markersize=4, linewidth=1.4, label=what)
    _log_scales(axes)
    axes.set_xticks(sorted(sizes_mb), [str(size) for size in sorted(sizes_mb)])
    axes.set_xlabel(_SIZE_LABEL)
    axes.set_ylabel("until the slowest receiver has it")


def _storage(axes: Axes, samples: Sequence[Sample], lr: float) -> None:
    axes.set_title(f"delta against the full file, learning rate {lr:g}")
    step = (_FASTEST / _SLOWEST) ** (1 / (_POINTS - 1))
    speeds = [_SLOWEST * step**index for index in range(_POINTS)]
    for side, color, mark in ((FULL, BROWN, "s"), (DELTA, BLACK, "P")):
        curve = [predicted_s(samples, side, lr, speed) for speed in speeds]
        axes.plot(speeds, curve, color=color, linewidth=1.4, label=f"{side}, predicted")
        timed = [
            (speed, second) for speed in measured_speeds(samples, lr) for second in measured_s(samples, side, lr, speed)
        ]
        if timed:
            axes.plot(
                *zip(*timed, strict=True), color=color, linestyle="", marker=mark, markersize=5, label=f"{side}, timed"
            )
    crossover = crossover_mb_per_s(samples, lr)
    if crossover is not None and _SLOWEST < crossover < _FASTEST:
        axes.axvline(crossover, color=GREY, linewidth=1, linestyle="--")
        axes.annotate(
            f"{crossover:.0f} MB/s",
            (crossover, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            color="#4a5568",
        )
    _log_scales(axes)
    ticks = [_SLOWEST, 100.0, 1000.0, _FASTEST]
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.set_xlabel("MB/s of the storage (simulated)")
    axes.set_ylabel("digest to commit")
    axes.legend(loc="upper right")


def _share(figure: Figure) -> None:
    """One range and one legend for the panels over size."""
    panels = [axes for axes in figure.axes if axes.get_xlabel() == _SIZE_LABEL]
    if panels:
        limits = [axes.get_ylim() for axes in panels]
        for axes in panels:
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=min(len(labels), 3 * len(figure.axes)))


def _log_scales(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda second, _: f"{second:g} s" if second >= 1 else f"{second * 1e3:g} ms")
    axes.yaxis.set_minor_formatter(lambda second, _: "")
    axes.xaxis.set_minor_formatter(lambda size, _: "")
    axes.minorticks_off()

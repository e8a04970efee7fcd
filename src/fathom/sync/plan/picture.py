"""Pictures of where one transport overtakes another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.core.errors import ConfigError
from fathom.core.picture import BLACK, BLUE, GREEN, GREY, ORANGE, PALE, picture
from fathom.sync.plan.advice import size
from fathom.sync.plan.crossover import delta_wins_below, over_engine_ranks, over_nodes, p2p_wins_from
from fathom.sync.plan.estimate import Estimate, Scenario, estimates
from fathom.sync.plan.fabric import FABRICS, Storage
from fathom.sync.plan.published import check, published_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PUBLISHED_FILE, CROSSOVER_FILE, DELTA_FILE = "transport-published.png", "transport-crossover.png", "transport-delta.png"
"""Files that are drawn."""

_COLORS = {"broadcast": ORANGE, "p2p": BLUE, "disk": ORANGE, "delta": GREEN}
_SHOWN = ("Qwen3-30B-A3B", "GLM-4.7-9B-Flash", "GLM-5")
_NODES_LABEL = "nodes of each side"


def draw_pictures(folder: Path, scenario: Scenario) -> list[Path]:
    """Draw all of them into a folder; returns the files. The model and rates of the delta's are those of `scenario`.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the folder cannot be written to.
    """

    def delta(figure: Figure) -> None:
        _delta(figure, scenario)

    files: list[Path] = []
    for name, width, draw in (
        (PUBLISHED_FILE, 5.0, _published),
        (CROSSOVER_FILE, 11.0, _crossovers),
        (DELTA_FILE, 5.0, delta),
    ):
        files.append(folder / name)
        with picture(files[-1], option="--pictures", inches=(width, 4.0)) as figure:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"the pictures cannot be written to {folder}: {error}") from None
            draw(figure)
    return files


def _published(figure: Figure) -> None:
    """Predicted over published, every figure of the table."""
    axes: Axes = figure.subplots()
    axes.set_title("published and predicted, seconds")
    checked = check()
    low, high = 0.4, 120.0
    axes.fill_between([low, high], [low / 1.25, high / 1.25], [low * 1.25, high * 1.25], color=PALE, label="25 %")
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.8)
    for transport in ("broadcast", "p2p"):
        for fitted, marker in ((False, "o"), (True, "s")):
            chosen = [row for row in checked if row.transport == transport and row.fitted is fitted]
            label = f"{transport}{', fitted' if fitted else ''}"
            axes.plot(
                [row.published_s for row in chosen],
                [row.predicted_s for row in chosen],
                marker,
                color=_COLORS[transport],
                markerfacecolor="none" if fitted else _COLORS[transport],
                markersize=7 if fitted else 5,
                label=label,
            )
    axes.set(xscale="log", yscale="log", xlabel="published", ylabel="predicted", xlim=(low, high), ylim=(low, high))
    axes.legend(loc="upper left")


def _crossovers(figure: Figure) -> None:
    """Both transports over the ranks of an engine, and over nodes."""
    rows = {row.model.name: row for row in published_rows()}
    panels: Sequence[Axes] = figure.subplots(1, 3).flatten()
    for axes, name, over_ranks in zip(panels, _SHOWN, (True, False, False), strict=True):
        row = rows[name]
        scenario = row.scenario(FABRICS["infiniband-h100"])
        points = over_engine_ranks(scenario) if over_ranks else over_nodes(scenario)
        places = [point.at for point in points]
        axes.set_title(name)
        axes.plot(places, [point.broadcast_s for point in points], "o-", color=ORANGE, markersize=3, label="broadcast")
        axes.plot(places, [point.p2p_s for point in points], "o-", color=BLUE, markersize=3, label="p2p")
        at = scenario.topology.engines.tp if over_ranks else scenario.topology.trainer_hosts
        axes.plot([at] * 2, [row.broadcast_s, row.p2p_s], "s", color=BLACK, markerfacecolor="none", label="published")
        begins = p2p_wins_from(points)
        if begins is not None and begins != places[0]:
            axes.axvline(begins, color=GREY, linestyle="--", linewidth=0.9, label=f"p2p ahead from {begins}")
        where = f"{scenario.topology.trainer_hosts} + {scenario.topology.engine_hosts} nodes"
        axes.set(xscale="log", ylim=(0, None), xlabel=f"ranks of an engine, {where}" if over_ranks else _NODES_LABEL)
        axes.set_xticks(places, [str(place) for place in places])
        axes.minorticks_off()
        axes.legend(loc="best")
    panels[0].set_ylabel("seconds a publication")


def _delta(figure: Figure, scenario: Scenario) -> None:
    """Delta and full file over the speed of the storage."""
    axes: Axes = figure.subplots()
    where = "one host" if scenario.topology.one_host else f"{scenario.topology.engine_hosts} engine hosts"
    axes.set_title(f"{scenario.model.name}, {where}: a delta of {scenario.delta.ratio:.1%} or the full file")
    speeds = [10 ** (6 + step / 20) for step in range(0, 101)]
    crossing = delta_wins_below(scenario)
    for name in ("disk", "delta"):
        axes.plot(
            [speed / 1e6 for speed in speeds],
            [_total_s(replace(scenario, storage=Storage(bytes_per_s=speed)), name) for speed in speeds],
            color=_COLORS[name],
            label=name,
        )
    axes.axvline(crossing / 1e6, color=GREY, linestyle="--", linewidth=0.9, label=f"equal at {size(crossing)}/s")
    axes.set(xscale="log", yscale="log", xlabel="storage, MB/s", ylabel="seconds a publication")
    axes.legend(loc="best")


def _total_s(scenario: Scenario, transport: str) -> float:
    totals = {answer.transport: answer.total_s for answer in estimates(scenario) if isinstance(answer, Estimate)}
    return totals.get(transport, float("nan"))

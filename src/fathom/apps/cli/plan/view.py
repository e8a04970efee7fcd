"""Tables and sentences of a plan, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fathom.sync.plan.advice import Advice, seconds, size
from fathom.sync.plan.crossover import delta_wins_below
from fathom.sync.plan.estimate import Estimate, Scenario
from fathom.sync.plan.forecast import Forecast
from fathom.sync.plan.layout import Topology
from fathom.sync.plan.published import FITTED_CHAIN, FITTED_LAYOUT, Checked

_WITHIN = 0.3
_PHASES = ("gather", "transfer", "verify", "load", "total", "paused", "once", "received")


def advice_view(scenario: Scenario, advice: Advice) -> Group:
    """The question, the answer, the table, and what it rests on."""
    table = _table("transport", *_PHASES)
    for estimate in advice.estimates:
        table.add_row(*_cells(estimate), style="bold" if estimate.transport == advice.transport else "")
    for impossible in advice.impossible:
        table.add_row(impossible.transport, "-", style="dim")
    notes = ["Seconds; 'once' is set up before the first publication, and in no total."]
    notes += [f"{answer.transport}: not possible: {answer.reason}." for answer in advice.impossible]
    if any(estimate.transport == "delta" for estimate in advice.estimates):
        notes.append(
            f"delta: {scenario.delta.ratio:.1%} of the full bytes; faster than disk while the storage gives less than "
            f"{size(delta_wins_below(scenario))}/s."
        )
    if any(estimate.verify_s is None for estimate in advice.estimates):
        notes.append("?: no rate is known on this fabric; it counts as 0 in the total.")
    notes.append(f"{scenario.fabric.name}: {scenario.fabric.about}")
    return Group(
        Text(_asked(scenario), style="dim"),
        Text(),
        Text(" ".join(advice.sentences)),
        Text(),
        table,
        Text(),
        *(Text(note, style="dim") for note in notes),
    )


def check_view(checked: Sequence[Checked]) -> Group:
    """Every figure, its prediction and the error; then the winners."""
    table = _table("model", "nodes", "transport", "published", "predicted", "error", "alone")
    for row in checked:
        error = "fitted" if row.fitted else f"{row.error:+.0%}"
        name = row.model if row.transport == "broadcast" else ""
        nodes = f"{row.nodes} + {row.nodes}" if name else ""
        table.add_row(name, nodes, row.transport, _ms(row.published_s), _ms(row.predicted_s), error, _alone(row))
    errors = [abs(row.error) for row in checked if not row.fitted]
    several = [abs(row.error) for row in checked if not row.fitted and row.nodes > 1]
    right = sum(1 for pair in _pairs(checked) if _faster(pair, measured=True) == _faster(pair, measured=False))
    words = (
        f"Milliseconds. Two constants are fitted: the time a bucket takes longer for each receiver, to {FITTED_CHAIN} "
        f"over broadcast; the rate at which a p2p source lays tensors out, to {FITTED_LAYOUT} over p2p. The other "
        f"{len(errors)} figures "
        f"are predicted: {_mean(errors):.0%} off on average, {max(errors):.0%} at worst; on two nodes and more "
        f"{_mean(several):.0%} and {max(several):.0%}. The faster transport is right in {right} of "
        f"{len(checked) // 2} rows. The form of the model was chosen with these figures in sight. The last column is "
        "what a transport's constant would be, fitted to that figure alone (-: no value gives it): how far it is from "
        "being one constant."
    )
    return Group(table, Text(), Text(words))


def forecast_view(forecasts: Sequence[Forecast]) -> Group:
    """Measured and predicted, phase by phase."""
    table = _table("transport", "size", "receivers", "phase", "measured", "predicted", "error")
    for row in forecasts:
        taken = row.taken
        link = "" if taken.link_bytes_per_s is None else f", {taken.link_bytes_per_s * 8 / 1e9:g} Gb/s"
        error = "calibrated" if row.calibrated else f"{row.error:+.0%}"
        table.add_row(
            f"{taken.transport}{link}",
            size(taken.size_bytes),
            str(taken.receivers),
            taken.phase,
            seconds(taken.seconds),
            seconds(row.predicted_s),
            error,
        )
    words = "Each phase has one rate, from the row marked calibrated; the rest is predicted; over links everything."
    phases: dict[str, list[float]] = {}
    for row in forecasts:
        if not row.calibrated:
            phases.setdefault(row.taken.phase, []).append(abs(row.error))
    for phase, errors in phases.items():
        within = sum(1 for error in errors if error <= _WITHIN)
        words += (
            f"\n{phase}: {median(errors):.0%} off in the median, {max(errors):.0%} at worst; {within} of {len(errors)} "
            f"within {_WITHIN:.0%}."
        )
    return Group(table, Text(), Text(words))


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for index, title in enumerate(titles):
        table.add_column(title, no_wrap=True, justify="left" if index == 0 else "right")
    return table


def _cells(estimate: Estimate) -> tuple[str, ...]:
    phases = (
        estimate.gather_s,
        estimate.transfer_s,
        estimate.verify_s,
        estimate.load_s,
        estimate.total_s,
        estimate.pause_s,
        estimate.setup_s,
    )
    return (estimate.transport, *(_phase(value) for value in phases), size(estimate.moved_bytes))


def _phase(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:,.0f}" if value >= 100 or not value else f"{value:.3g}"


def _asked(scenario: Scenario) -> str:
    model, topology = scenario.model, scenario.topology
    kind = f"{model.params / 1e9:.3g}B parameters" if model.params >= 1e8 else f"{model.params / 1e6:.3g}M parameters"
    experts = f", {model.expert_params / model.params:.0%} in experts" if model.experts else ""
    return (
        f"{model.name}: {kind}{experts}, {scenario.served}; {_placed(topology)}; {scenario.fabric.name}, storage "
        f"{size(scenario.storage.bytes_per_s)}/s"
    )


def _placed(topology: Topology) -> str:
    trainer, engines = topology.trainer, topology.engines
    split = f"TP{trainer.tp} PP{trainer.pp} CP{trainer.cp} EP{trainer.ep}"
    each = f"TP{engines.tp} EP{engines.ep} DP{engines.dp}"
    count = f"{engines.engines} engine" + ("" if engines.engines == 1 else "s")
    if topology.one_host:
        return f"one host: trainer of {trainer.gpus} ({split}), {count} ({each})"
    nodes = [f"{hosts} node" + ("" if hosts == 1 else "s") for hosts in (topology.trainer_hosts, topology.engine_hosts)]
    return f"trainer on {nodes[0]} ({split}), {count} on {nodes[1]} ({each})"


def _alone(row: Checked) -> str:
    if row.alone is None:
        return "-"
    return f"{row.alone * 1e6:.0f} us" if row.transport == "broadcast" else f"{row.alone / 1e9:.1f} GB/s"


def _ms(value: float) -> str:
    return f"{value * 1e3:,.1f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _pairs(checked: Sequence[Checked]) -> list[tuple[Checked, Checked]]:
    return list(zip(checked[::2], checked[1::2], strict=True))


def _faster(pair: tuple[Checked, Checked], *, measured: bool) -> str:
    """The faster transport of one row."""
    return min(pair, key=lambda row: row.published_s if measured else row.predicted_s).transport

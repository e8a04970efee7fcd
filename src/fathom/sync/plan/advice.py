"""Which transport to use, and why, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fathom.sync.plan.crossover import NODES, over_nodes, p2p_wins_from
from fathom.sync.plan.estimate import Estimate, Impossible, Scenario, estimates, p2p
from fathom.sync.plan.traffic import Traffic

_CLOSE = 1.1
"""Within this factor of the fastest, the transport with fewer parts is preferred: no estimate is better than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """An answer."""

    transport: str
    """The one to use."""
    sentences: tuple[str, ...]
    """Why, and what would change it."""
    estimates: tuple[Estimate, ...]
    """Those that can be used, the one with the fewest parts first."""
    impossible: tuple[Impossible, ...]
    """Those that cannot."""
    traffic: Traffic
    """What has to be moved."""


def advise(scenario: Scenario) -> Advice:
    """Compare all transports."""
    answers = estimates(scenario)
    possible = tuple(answer for answer in answers if isinstance(answer, Estimate))
    fastest = min(possible, key=lambda estimate: estimate.total_s)
    chosen = next(estimate for estimate in possible if estimate.total_s <= fastest.total_s * _CLOSE)
    return Advice(
        transport=chosen.transport,
        sentences=tuple(_sentences(scenario, chosen, possible)),
        estimates=possible,
        impossible=tuple(answer for answer in answers if isinstance(answer, Impossible)),
        traffic=scenario.traffic(),
    )


def _sentences(scenario: Scenario, chosen: Estimate, possible: Sequence[Estimate]) -> Iterator[str]:
    others = sorted((other for other in possible if other is not chosen), key=lambda other: other.total_s)
    nearest = others[0]
    yield f"Use {chosen.transport}: about {seconds(chosen.total_s)} a publication."
    if nearest.total_s < chosen.total_s * _CLOSE:
        yield (
            f"{nearest.transport} takes {seconds(nearest.total_s)}, which is no difference that an estimate can tell, "
            f"and {chosen.transport} has fewer parts."
        )
    else:
        times = nearest.total_s / chosen.total_s
        yield f"Next is {nearest.transport} with {seconds(nearest.total_s)}, {times:.1f} times that."
    yield _reason(scenario, chosen)
    topology = scenario.topology
    if not topology.one_host and topology.trainer_hosts == topology.engine_hosts:
        yield _crossover(scenario)


def _crossover(scenario: Scenario) -> str:
    points = over_nodes(scenario)
    begins = p2p_wins_from(points)
    if begins is None:
        return f"With these splits, broadcast stays ahead of p2p up to {NODES[-1]} + {NODES[-1]} nodes."
    if begins == points[0].at:
        return f"With these splits, p2p is ahead of broadcast wherever they fit: from {begins} + {begins} nodes on."
    return f"With these splits, p2p begins to be ahead of broadcast at {begins} + {begins} nodes."


def _reason(scenario: Scenario, chosen: Estimate) -> str:
    traffic, topology = scenario.traffic(), scenario.topology
    full, rank = size(traffic.full_bytes), size(traffic.rank_bytes)
    receivers = "engine rank" if traffic.receivers == 1 else f"{traffic.receivers} engine ranks"
    match chosen.transport:
        case "shared":
            return f"All is on one host: {full} are copied into memory once, and once out of it by each engine."
        case "disk":
            return f"Storage at {size(scenario.storage.bytes_per_s)}/s takes {full} once and gives them to each host."
        case "broadcast":
            other = p2p(scenario)
            return (
                f"All {full} pass one link once, on to {receivers}. p2p would give each of them {rank}, but its "
                f"busiest source would gather for {seconds(other.gather_s)}, lay out for {seconds(other.load_s)} and "
                f"write for {seconds(other.transfer_s)} more."
            )
        case "p2p":
            return (
                f"Each of {receivers} needs {rank} of {full}, and gets no more; {traffic.sources} "
                f"ranks of the trainer send at once, where a broadcast sends from one at a time."
            )
        case _:
            return (
                f"A delta is {scenario.delta.ratio:.1%} of {full}, and the way to the {topology.engine_hosts} engine "
                f"hosts is slow: storage at {size(scenario.storage.bytes_per_s)}/s."
            )


def seconds(value: float) -> str:
    """A duration a person can read."""
    if value <= 0:
        return "0 s"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def size(value: float) -> str:
    """Bytes a person can read."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}" if value < 1e3 * factor else f"{value / factor:,.0f} {unit}"
    return f"{value / 1e3:.3g} kB"

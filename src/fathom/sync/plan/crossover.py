"""Where one transport overtakes another: over nodes, over the ranks of an engine, over the speed of the storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fathom.core.errors import ConfigError
from fathom.sync.plan.estimate import Scenario, broadcast, coding_s, p2p
from fathom.sync.plan.fabric import Fabric

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Nodes of each side that are tried."""
RANKS = (1, 2, 4, 8, 16, 32, 64)
"""Ranks of an engine that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Both transports at one place."""

    at: int
    """Nodes of each side, or ranks of an engine."""
    broadcast_s: float
    """Over broadcast."""
    p2p_s: float
    """Over p2p."""


def over_nodes(scenario: Scenario, nodes: Sequence[int] = NODES) -> list[Point]:
    """The splits of `scenario` on other numbers of nodes: more copies of the trainer, more engines.

    Numbers of nodes on which the splits do not fit are left out.
    """
    return [_point(count, moved) for count, moved in _on_nodes(scenario, nodes)]


def over_engine_ranks(scenario: Scenario, ranks: Sequence[int] = RANKS) -> list[Point]:
    """The nodes of `scenario` with wider or narrower engines: TP and EP alike, nothing kept twice in an engine."""
    return [_point(count, moved) for count, moved in _with_ranks(scenario, ranks)]


def p2p_wins_from(points: Sequence[Point]) -> int | None:
    """Smallest place from which p2p is ahead, there and at every larger one. None: not at the largest."""
    winner: int | None = None
    for point in reversed(points):
        if point.p2p_s >= point.broadcast_s:
            break
        winner = point.at
    return winner


def largest_share(fabric: Fabric) -> float | None:
    """With one stage: p2p is ahead while an engine rank needs less than this share of the model, chains left aside.

    Both gather alike; then a source lays one rank's share out, or sends everything over its link. None: nothing is laid
    out on this fabric.
    """
    return None if fabric.layout_bytes_per_s is None else fabric.layout_bytes_per_s / fabric.collective_bytes_per_s


def delta_wins_below(scenario: Scenario) -> float:
    """Storage bandwidth, bytes/s, below which a delta is faster than the full file.

    Both are written to it once and read by each engine host; a delta is smaller, and has to be made and applied.
    """
    traffic = scenario.traffic()
    stored_bytes = traffic.full_bytes + traffic.host_bytes * scenario.topology.engine_hosts
    return (1 - scenario.delta.ratio) * stored_bytes / coding_s(scenario)


def _on_nodes(scenario: Scenario, nodes: Sequence[int]) -> Iterator[tuple[int, Scenario]]:
    topology = scenario.topology
    for count in nodes:
        gpus = count * topology.gpus_per_node
        try:
            moved = replace(
                topology,
                trainer=replace(topology.trainer, gpus=gpus),
                engines=replace(topology.engines, gpus=gpus),
                one_host=False,
            )
        except ConfigError:
            continue  # too few ranks for these splits
        yield count, replace(scenario, topology=moved)


def _with_ranks(scenario: Scenario, ranks: Sequence[int]) -> Iterator[tuple[int, Scenario]]:
    topology = scenario.topology
    for count in ranks:
        if topology.engines.gpus % count == 0:
            engines = replace(topology.engines, tp=count, ep=count, dp=1)
            yield count, replace(scenario, topology=replace(topology, engines=engines))


def _point(at: int, moved: Scenario) -> Point:
    return Point(at=at, broadcast_s=broadcast(moved).total_s, p2p_s=p2p(moved).total_s)

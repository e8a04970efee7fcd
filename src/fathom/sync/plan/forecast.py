"""Predictions for one host, from rates that were measured there at one size: beside what was measured at the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fathom.sync.plan.fabric import tree_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Seconds that were measured."""

    transport: str
    """Which, e.g. `p2p by NIXL`."""
    size_bytes: float
    """Bytes of the version."""
    receivers: int
    """Engines that received it at once."""
    phase: str
    """`digest` and `write` (the trainer's), `transfer` and `verify` (the slowest receiver's)."""
    seconds: float
    """Measured."""
    link_bytes_per_s: float | None = None
    """Of every host's link to the others. None: one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A measurement beside its prediction."""

    taken: Taken
    """What was measured."""
    predicted_s: float
    """What was to be expected."""
    error: float
    """Predicted over measured, minus 1."""
    calibrated: bool
    """The phase's rate was taken from this measurement: its error is 0 and says nothing."""


def forecast(measurements: Sequence[Taken], cores: int) -> list[Forecast]:
    """Predict each measurement, in the order given.

    On one host, each phase of each transport has one rate, taken at the middle size with the fewest receivers; time is
    bytes over rate. In p2p the one sender writes to one receiver after the other. Otherwise all work at once, in a
    broadcast the sender too, and share the cores when they outnumber them. Over links nothing is calibrated: the
    sender's link passes the version in each round of a broadcast's tree (Gloo's), and once for each receiver in p2p.
    """
    rates = {key: _calibration(group) for key, group in _grouped(measurements)}
    return [
        _forecast(taken, rates[taken.transport, taken.phase, taken.link_bytes_per_s], cores) for taken in measurements
    ]


def _grouped(measurements: Iterable[Taken]) -> Iterator[tuple[tuple[str, str, float | None], list[Taken]]]:
    groups: dict[tuple[str, str, float | None], list[Taken]] = {}
    for taken in measurements:
        groups.setdefault((taken.transport, taken.phase, taken.link_bytes_per_s), []).append(taken)
    yield from groups.items()


def _calibration(group: Sequence[Taken]) -> Taken:
    """The middle size, the upper one of two, with the fewest receivers."""
    sizes = sorted({taken.size_bytes for taken in group})
    middle = sizes[len(sizes) // 2]
    return min((taken for taken in group if taken.size_bytes == middle), key=lambda taken: taken.receivers)


def _forecast(taken: Taken, calibration: Taken, cores: int) -> Forecast:
    over_link = taken.link_bytes_per_s is not None and taken.phase == "transfer"
    predicted_s = _over_link_s(taken) if over_link else _scaled_s(taken, calibration, cores)
    return Forecast(
        taken=taken,
        predicted_s=predicted_s,
        error=predicted_s / taken.seconds - 1,
        calibrated=taken is calibration and not over_link,
    )


def _over_link_s(taken: Taken) -> float:
    passes = tree_rounds(taken.receivers) if taken.transport == "broadcast" else taken.receivers
    return passes * taken.size_bytes / (taken.link_bytes_per_s or float("inf"))


def _scaled_s(taken: Taken, calibration: Taken, cores: int) -> float:
    size = taken.size_bytes / calibration.size_bytes
    return calibration.seconds * size * _times_longer(taken, cores) / _times_longer(calibration, cores)


def _times_longer(taken: Taken, cores: int) -> float:
    """What the number of receivers does to a phase."""
    match taken.phase, taken.transport.partition(" ")[0]:
        case "transfer", "p2p":
            return taken.receivers
        case "transfer", "broadcast":
            return max(1.0, (taken.receivers + 1) / cores)
        case "transfer" | "verify", _:
            return max(1.0, taken.receivers / cores)
        case _:
            return 1.0

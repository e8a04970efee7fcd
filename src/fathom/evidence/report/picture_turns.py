"""The part of a run's picture that is about agents: how many are at work, and what their turns cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fathom.core.picture import BLUE, GREY, ORANGE
from fathom.evidence.report.turns import Spread, StepTurns, TurnsSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BREAK_S = 15.0
"""Samples further apart are not joined: the run was not there in between."""


def draw_turns(panels: Sequence[Sequence[Axes]], in_flight: Sequence[tuple[float, int]], turns: TurnsSummary) -> None:
    """Draw trajectories in flight over time, the hit rate of the prefix cache, and turns and tokens per trajectory.

    Args:
        panels: two rows of two.
        in_flight: as in `RunSummary`.
        turns: the rest.
    """
    (flight, rate), (counts, tokens) = panels
    _flight(flight, in_flight)
    _hit_rate(rate, turns.steps)
    _histogram(counts, turns.turns, "turns", BLUE)
    _histogram(tokens, turns.sampled_tokens, "sampled tokens", ORANGE)


def _flight(axes: Axes, samples: Sequence[tuple[float, int]]) -> None:
    axes.set_title("trajectories in flight")
    times: list[float] = []
    counts: list[float] = []
    for at_s, count in samples:
        if times and at_s - times[-1] > _BREAK_S:
            times.append(times[-1])
            counts.append(math.nan)
        times.append(at_s)
        counts.append(count)
    axes.plot(times, counts, color=BLUE, linewidth=1.0, drawstyle="steps-post")
    axes.set_xlabel("seconds since the run's first event")
    axes.set_ylim(bottom=0)


def _hit_rate(axes: Axes, steps: Sequence[StepTurns]) -> None:
    axes.set_title("tokens sent that a prefix cache served")
    numbers = [step.number for step in steps]
    rates = [step.hit_rate for step in steps]
    axes.plot(numbers, [rate.own_turns for rate in rates], color=GREY, linewidth=1.0, label="known from own turns")
    axes.plot(numbers, [rate.measured for rate in rates], color=BLUE, linewidth=1.4, label="measured")
    axes.plot(numbers, [rate.bound for rate in rates], color=ORANGE, linewidth=1.0, linestyle="--", label="at best")
    axes.set_xlabel("optimizer step")
    axes.set_ylim(0, 1)
    axes.legend(loc="best")


def _histogram(axes: Axes, spread: Spread, title: str, colour: str) -> None:
    axes.set_title(f"{title}: median {spread.p50:,.0f}, 95 % up to {spread.p95:,.0f}")
    axes.set_axisbelow(True)
    axes.stairs(spread.counts, spread.edges, fill=True, color=colour)
    axes.set_xlabel(f"{title} of a trajectory")
    axes.set_ylabel("trajectories")

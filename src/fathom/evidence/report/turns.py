"""Turns of agents' conversations, and how much of what they repeat was computed again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fathom.core.ids import TrajectoryId
from fathom.ledger.entries import Recorded
from fathom.ledger.events import StepTaken, TrajectoryEnded

_BINS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a count is spread over trajectories."""

    mean: float
    """Its mean."""
    p50: float
    """Its median."""
    p95: float
    """Its 95th percentile."""
    largest: int
    """Its maximum."""
    edges: tuple[float, ...]
    """Edges of the bins of `counts`, one more than bins."""
    counts: tuple[int, ...]
    """Trajectories in each bin; the last holds its upper edge too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRate:
    """Prompt tokens from a prefix cache, as shares of the prompt tokens of the same calls. 0: there were none."""

    measured: float
    """Tokens that were served from it."""
    bound: float
    """What caches without limits would have served at best, emptied at updates (`known_at_best`)."""
    own_turns: float
    """What earlier calls of the same trajectory had computed, under whatever version and on whatever engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTurns:
    """The trajectories that ended between a step and the one before it."""

    number: int
    """The step."""
    trajectories: int
    """How many that asked anything."""
    turns_mean: float
    """Mean turns of one."""
    hit_rate: HitRate
    """Of all their calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsSummary:
    """Over all trajectories that asked anything."""

    trajectories: int
    """How many."""
    turns: Spread
    """Turns of one."""
    prompt_tokens: Spread
    """Prompt tokens of one, of all its turns together."""
    sampled_tokens: Spread
    """Sampled tokens of one."""
    hit_rate: HitRate
    """Of all calls."""
    steps: tuple[StepTurns, ...]
    """Over the steps, those left out before which nothing ended."""


def asks_often(ends: Sequence[Recorded[TrajectoryEnded]]) -> bool:
    """Some trajectory has several turns."""
    return any(end.event.turns > 1 for end in ends)


def summarise_turns(
    ends: Sequence[Recorded[TrajectoryEnded]],
    steps: Sequence[Recorded[StepTaken]],
    known: Mapping[TrajectoryId, int],
) -> TurnsSummary:
    """Sum up a run of which `asks_often` is true.

    Args:
        ends: in the order of the history.
        steps: too.
        known: prompt tokens that were known at best, of each trajectory that ended (`known_at_best`).
    """
    asked = [end for end in ends if end.event.turns]
    events = [end.event for end in asked]
    seqs = [end.seq for end in asked]
    points: list[StepTurns] = []
    first = 0
    for step in steps:
        last = bisect_left(seqs, step.seq)
        if part := events[first:last]:
            points.append(_point(step.event.number, part, known))
        first = last
    return TurnsSummary(
        trajectories=len(events),
        turns=_spread([event.turns for event in events]),
        prompt_tokens=_spread([event.prompt_tokens for event in events]),
        sampled_tokens=_spread([event.sampled_tokens for event in events]),
        hit_rate=_hit_rate(events, known),
        steps=tuple(points),
    )


def _point(number: int, ends: Sequence[TrajectoryEnded], known: Mapping[TrajectoryId, int]) -> StepTurns:
    return StepTurns(
        number=number,
        trajectories=len(ends),
        turns_mean=sum(end.turns for end in ends) / len(ends),
        hit_rate=_hit_rate(ends, known),
    )


def _hit_rate(ends: Sequence[TrajectoryEnded], known: Mapping[TrajectoryId, int]) -> HitRate:
    prompt = sum(end.prompt_tokens for end in ends) or 1
    return HitRate(
        measured=sum(end.cached_tokens for end in ends) / prompt,
        bound=sum(known[end.trajectory] for end in ends) / prompt,
        own_turns=sum(end.known_tokens for end in ends) / prompt,
    )


def _spread(values: Sequence[int]) -> Spread:
    p50, p95 = np.percentile(values, (50, 95))
    low, high = min(values), max(values)
    width = -(-(high - low + 1) // _BINS)  # whole numbers, so that no bin is favoured
    edges = np.arange(low, high + 1 + width, width)
    counts, _ = np.histogram(values, edges)
    return Spread(
        mean=float(np.mean(values)),
        p50=float(p50),
        p95=float(p95),
        largest=high,
        edges=tuple(float(edge) for edge in edges),
        counts=tuple(int(count) for count in counts),
    )

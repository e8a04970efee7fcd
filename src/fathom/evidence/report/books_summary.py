"""The books in counts, and what became of long and slow trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fathom.core.records.states import AttemptState, Fate, OccurrenceState
from fathom.core.records.step import MaskReason
from fathom.ledger.entries import TrajectoryEntry
from fathom.ledger.replay import Books


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptCount:
    """Trajectories of one state and fate."""

    state: AttemptState
    """The state."""
    fate: Fate | None
    """Why. None: in flight, buffered or trained."""
    count: int
    """How many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BooksSummary:
    """The three books. Each adds up to its total."""

    balanced: bool
    """No contradiction was found."""
    faults: tuple[str, ...]
    """The contradictions."""
    occurrences: dict[OccurrenceState, int]
    """Occurrences by state."""
    attempts: tuple[AttemptCount, ...]
    """Trajectories by state and fate."""
    sampled_tokens: int
    """Tokens of all trajectories that ended."""
    in_gradient: int
    """Of those, in the gradient."""
    masked: dict[MaskReason, int]
    """Of those, without gradient, by reason."""
    waiting: int
    """Of those, still to be trained or dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fortune:
    """Lengths and latencies of the trajectories that ended in one state: dropping may prefer short or quick ones."""

    state: AttemptState
    """The state."""
    count: int
    """Trajectories with a record."""
    tokens_mean: float
    """Mean sampled tokens."""
    tokens_p50: float
    """Median sampled tokens."""
    tokens_p95: float
    """95th percentile of sampled tokens."""
    seconds_mean: float
    """Mean seconds from start to end."""
    seconds_p50: float
    """Median seconds."""
    seconds_p95: float
    """95th percentile of seconds."""


def summarise_books(books: Books) -> BooksSummary:
    """Count."""
    attempts = sorted(books.attempt_counts.items(), key=lambda item: (list(AttemptState).index(item[0][0]), -item[1]))
    total = books.tokens_in_gradient + books.tokens_masked.total() + books.tokens_waiting
    return BooksSummary(
        balanced=not books.faults and total == books.sampled_tokens,
        faults=tuple(books.faults),
        occurrences={state: books.occurrence_counts[state] for state in OccurrenceState},
        attempts=tuple(AttemptCount(state=state, fate=fate, count=count) for (state, fate), count in attempts),
        sampled_tokens=books.sampled_tokens,
        in_gradient=books.tokens_in_gradient,
        masked=dict(books.tokens_masked.most_common()),
        waiting=books.tokens_waiting,
    )


def fortunes(books: Books, trajectories: Sequence[TrajectoryEntry]) -> tuple[Fortune, ...]:
    """Trajectories by final state."""
    by_state: dict[AttemptState, list[TrajectoryEntry]] = {}
    for entry in trajectories:
        if entry.id in books.attempts:
            by_state.setdefault(books.attempts[entry.id].state, []).append(entry)
    return tuple(_fortune(state, by_state[state]) for state in AttemptState if state in by_state)


def _fortune(state: AttemptState, entries: list[TrajectoryEntry]) -> Fortune:
    tokens = np.array([entry.sampled_tokens for entry in entries], dtype=np.float64)
    seconds = np.array([entry.ended_s - entry.started_s for entry in entries])
    tokens_p50, tokens_p95 = np.percentile(tokens, (50, 95))
    seconds_p50, seconds_p95 = np.percentile(seconds, (50, 95))
    return Fortune(
        state=state,
        count=len(entries),
        tokens_mean=float(tokens.mean()),
        tokens_p50=float(tokens_p50),
        tokens_p95=float(tokens_p95),
        seconds_mean=float(seconds.mean()),
        seconds_p50=float(seconds_p50),
        seconds_p95=float(seconds_p95),
    )

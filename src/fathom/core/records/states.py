"""The states of the three books (docs/concepts/books.md)."""

from __future__ import annotations

from enum import StrEnum


class OccurrenceState(StrEnum):
    """A use of a task."""

    OPEN = "open"
    TRAINED = "trained"
    GIVEN_UP = "given_up"


class AttemptState(StrEnum):
    """A trajectory; it is in exactly one of these."""

    IN_FLIGHT = "in_flight"
    BUFFERED = "buffered"
    TRAINED = "trained"
    DROPPED = "dropped"
    FILTERED = "filtered"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """True when nothing can happen to it any more on this lineage."""
        return self not in (AttemptState.IN_FLIGHT, AttemptState.BUFFERED)


class Fate(StrEnum):
    """Why an attempt was dropped, filtered or failed, and why an occurrence was given up."""

    AGE = "age"
    """A token was over the bound."""
    ABANDONED = "abandoned"
    """A branch that nobody extended."""
    REQUEUED = "requeued"
    """The whole group runs again."""
    VARIANCE = "variance"
    """All rewards of the group are equal and the filter is on."""
    TRUNCATED = "truncated"
    """Cut, and `mask_truncated` is on."""
    EMPTY = "empty"
    """Nothing was sampled, so there is nothing to train."""
    INFRASTRUCTURE = "infrastructure"
    """An engine or transport failed."""
    UNGRADED = "ungraded"
    """No reward could be had."""
    ABORTED = "aborted"
    """Ended from outside."""
    REFUSED = "refused"
    """The record contradicted itself."""
    TOO_FEW_GRADED = "too_few_graded"
    """The group has fewer graded members than `min_graded`."""
    ATTEMPTS = "attempts"
    """The occurrence used up its attempts."""
    STOPPED = "stopped"
    """The run ended while it was running."""
    NO_STEP = "no_step"
    """It was in a batch, but no step on that batch changed the weights by it."""

"""The three books, folded again from the history alone: an account that shares no code with the one that ran."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import final

from fathom.core.ids import GroupId, Occurrence, TrajectoryId
from fathom.core.records.states import AttemptState, Fate, OccurrenceState
from fathom.core.records.step import MaskReason
from fathom.ledger.events import AttemptMoved, Event, GroupStarted, OccurrenceClosed, StepTaken, TrajectoryEnded
from fathom.ledger.reader import LedgerReader

KINDS: tuple[type[Event], ...] = (GroupStarted, TrajectoryEnded, AttemptMoved, OccurrenceClosed, StepTaken)
"""The events that move the books."""
_REASON_OF_FATE = {Fate.AGE: MaskReason.AGE, Fate.TRUNCATED: MaskReason.TRUNCATED}


@dataclass(slots=True, kw_only=True)
class OccurrenceEntry:
    """A use of a task."""

    state: OccurrenceState
    """Its state."""
    groups: list[GroupId]
    """Its attempts, in order."""
    decided_by: GroupId | None = None
    """The attempt that closed it. None: open."""
    fate: Fate | None = None
    """Why it was given up. None: it was not."""


@dataclass(slots=True, kw_only=True)
class AttemptEntry:
    """A trajectory."""

    group: GroupId
    """Its group."""
    occurrence: Occurrence
    """Its use of the task."""
    state: AttemptState
    """Its state."""
    fate: Fate | None = None
    """Why. None: in flight, buffered or trained."""
    sampled_tokens: int | None = None
    """Tokens of its record. None: it has not ended."""
    in_gradient: int = 0
    """Its tokens that had a gradient."""
    masked: Counter[MaskReason] = field(default_factory=Counter[MaskReason])
    """Its tokens without, by reason."""

    @property
    def accounted(self) -> int:
        """Its tokens that are in one account or the other."""
        return self.in_gradient + self.masked.total()

    @property
    def waiting(self) -> bool:
        """True while it can still be trained."""
        return not self.state.final


@final
@dataclass(slots=True, kw_only=True)
class Books:
    """Occurrences, attempts and sampled tokens, and what contradicted itself on the way."""

    occurrences: dict[Occurrence, OccurrenceEntry] = field(default_factory=dict[Occurrence, OccurrenceEntry])
    """By occurrence."""
    attempts: dict[TrajectoryId, AttemptEntry] = field(default_factory=dict[TrajectoryId, AttemptEntry])
    """By trajectory."""
    faults: list[str] = field(default_factory=list[str])
    """Contradictions, in words. Empty: the books balance."""

    @property
    def occurrence_counts(self) -> Counter[OccurrenceState]:
        """Occurrences by state."""
        return Counter(entry.state for entry in self.occurrences.values())

    @property
    def attempt_counts(self) -> Counter[tuple[AttemptState, Fate | None]]:
        """Attempts by state and fate."""
        return Counter((entry.state, entry.fate) for entry in self.attempts.values())

    @property
    def sampled_tokens(self) -> int:
        """Tokens of all trajectories that ended."""
        return sum(entry.sampled_tokens or 0 for entry in self.attempts.values())

    @property
    def tokens_in_gradient(self) -> int:
        """Of those, tokens that had a gradient."""
        return sum(entry.in_gradient for entry in self.attempts.values())

    @property
    def tokens_masked(self) -> Counter[MaskReason]:
        """Of those, tokens without, by reason."""
        return sum((entry.masked for entry in self.attempts.values()), Counter[MaskReason]())

    @property
    def tokens_waiting(self) -> int:
        """Of those, tokens that can still be trained: their trajectories are buffered or in the batch in training."""
        return sum(entry.sampled_tokens - entry.accounted for entry in self.attempts.values() if entry.sampled_tokens)

    def apply(self, event: Event) -> None:
        """Account for one event."""
        match event:
            case GroupStarted():
                self._start(event)
            case TrajectoryEnded():
                self._end(event)
            case AttemptMoved():
                self._move(event)
            case OccurrenceClosed():
                self._close(event)
            case _:
                pass

    def _start(self, event: GroupStarted) -> None:
        entry = self.occurrences.setdefault(event.occurrence, OccurrenceEntry(state=OccurrenceState.OPEN, groups=[]))
        if entry.state is not OccurrenceState.OPEN:
            self.faults.append(f"group {event.group} starts at {event.occurrence.name}, which is {entry.state}")
        entry.groups.append(event.group)
        for member in event.members:
            if member in self.attempts:
                self.faults.append(f"trajectory {member} starts twice")
            self.attempts[member] = AttemptEntry(
                group=event.group, occurrence=event.occurrence, state=AttemptState.IN_FLIGHT
            )

    def _end(self, event: TrajectoryEnded) -> None:
        entry = self.attempts.get(event.trajectory)
        if entry is None:
            self.faults.append(f"trajectory {event.trajectory} ended and never started")
        elif entry.sampled_tokens is not None:
            self.faults.append(f"trajectory {event.trajectory} ended twice")
        else:
            entry.sampled_tokens = event.sampled_tokens

    def _move(self, event: AttemptMoved) -> None:
        entry = self.attempts.get(event.trajectory)
        if entry is None:
            self.faults.append(f"trajectory {event.trajectory} became {event.state} and never started")
            return
        if entry.state.final or event.state in (entry.state, AttemptState.IN_FLIGHT):
            self.faults.append(f"trajectory {event.trajectory} became {event.state} after it was {entry.state}")
        if (event.fate is None) != (event.state in (AttemptState.BUFFERED, AttemptState.TRAINED)):
            self.faults.append(f"trajectory {event.trajectory} became {event.state} with fate {event.fate}")
        entry.state, entry.fate = event.state, event.fate

    def _close(self, event: OccurrenceClosed) -> None:
        entry = self.occurrences.get(event.occurrence)
        if entry is None or event.group not in entry.groups:
            self.faults.append(f"{event.occurrence.name} was closed by {event.group}, which never started there")
            return
        if entry.state is not OccurrenceState.OPEN:
            self.faults.append(f"{event.occurrence.name} was closed twice")
        entry.state = OccurrenceState.TRAINED if event.trained else OccurrenceState.GIVEN_UP
        entry.decided_by, entry.fate = event.group, event.fate


def replay(reader: LedgerReader, until: int | None = None) -> Books:
    """Fold the history that survives, seen from event `until` (None: the newest), into books.

    `until` must be the last event of a commit: within one, the books are on their way.
    """
    books = Books()
    stepped: set[int] = set()
    for recorded in reader.history(KINDS, until=until):
        if isinstance(recorded.event, StepTaken) and recorded.event.stepped:
            stepped.add(recorded.seq)
        books.apply(recorded.event)
    _account_tokens(reader, books, stepped, until)
    _compare(books)
    return books


def _account_tokens(reader: LedgerReader, books: Books, stepped: set[int], until: int | None) -> None:
    """Rows of steps that changed the weights say which tokens had a gradient; states say why the others had none."""
    for use in reader.rows(until=until):
        if use.seq in stepped and use.trajectory in books.attempts:
            books.attempts[use.trajectory].in_gradient += use.in_gradient
    for seq, trajectory, reason, tokens in reader.masked_tokens(until=until):
        if seq in stepped and trajectory in books.attempts:
            books.attempts[trajectory].masked[reason] += tokens
    for entry in books.attempts.values():
        if entry.waiting or entry.sampled_tokens is None:
            continue
        untouched = entry.sampled_tokens - entry.accounted
        if untouched > 0:
            entry.masked[_reason(entry)] += untouched


def _reason(entry: AttemptEntry) -> MaskReason:
    if entry.state is AttemptState.TRAINED:
        return MaskReason.NO_LOSS
    return _REASON_OF_FATE.get(entry.fate, MaskReason.NOT_TRAINED) if entry.fate else MaskReason.NOT_TRAINED


def _compare(books: Books) -> None:
    """What the three books say of each other."""
    for name, entry in books.attempts.items():
        if entry.sampled_tokens is None:
            if entry.accounted or entry.state in (AttemptState.BUFFERED, AttemptState.TRAINED):
                books.faults.append(f"trajectory {name} is {entry.state} and has no record")
        elif entry.accounted > entry.sampled_tokens:
            books.faults.append(f"trajectory {name}: {entry.accounted} tokens used of {entry.sampled_tokens} sampled")
        if entry.in_gradient and entry.state.final and entry.state is not AttemptState.TRAINED:
            books.faults.append(
                f"trajectory {name} had {entry.in_gradient} tokens in the gradient, and is {entry.state}"
            )
    trained: dict[Occurrence, set[GroupId]] = {}
    unfinished: set[GroupId] = set()
    for entry in books.attempts.values():
        if entry.state is AttemptState.TRAINED:
            trained.setdefault(entry.occurrence, set()).add(entry.group)
        if entry.waiting:
            unfinished.add(entry.group)
    for occurrence, entry in books.occurrences.items():
        groups = trained.get(occurrence, set())
        if len(groups) > 1:
            books.faults.append(f"{occurrence.name} was trained by {len(groups)} groups: {', '.join(sorted(groups))}")
        if entry.state is OccurrenceState.TRAINED and groups != {entry.decided_by}:
            books.faults.append(f"{occurrence.name} is trained by {entry.decided_by}, attempts say {sorted(groups)}")
        if entry.state is OccurrenceState.GIVEN_UP and groups:
            books.faults.append(f"{occurrence.name} was given up, and {', '.join(sorted(groups))} was trained")
        if entry.decided_by in unfinished:
            books.faults.append(f"{occurrence.name} was closed while members of {entry.decided_by} were unfinished")

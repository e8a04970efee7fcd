"""The three books: where every occurrence, every trajectory attempt and every sampled token is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import final

import msgspec

from fathom.core.errors import BooksError
from fathom.core.ids import GroupId, Occurrence, TrajectoryId
from fathom.core.records.states import AttemptState, Fate
from fathom.core.records.step import MaskReason

_FATES = {
    AttemptState.DROPPED: frozenset(
        {Fate.AGE, Fate.ABANDONED, Fate.REQUEUED, Fate.EMPTY, Fate.TOO_FEW_GRADED, Fate.STOPPED, Fate.NO_STEP}
    ),
    AttemptState.FILTERED: frozenset({Fate.VARIANCE, Fate.TRUNCATED}),
    AttemptState.FAILED: frozenset({Fate.INFRASTRUCTURE, Fate.UNGRADED, Fate.ABORTED, Fate.REFUSED}),
}
"""The ends of an attempt that was not trained, and what each may be called."""


class OpenOccurrence(msgspec.Struct, frozen=True, tag="open_occurrence.1"):
    """An occurrence that is neither trained nor given up."""

    occurrence: Occurrence
    """The occurrence."""
    attempts_used: int
    """Attempts that ended in a requeue."""
    live: int
    """Its attempts in flight or buffered."""


class LiveAttempt(msgspec.Struct, frozen=True, tag="live_attempt.1"):
    """A trajectory in flight or buffered."""

    trajectory: TrajectoryId
    """The trajectory."""
    group: GroupId
    """Its group."""
    occurrence: Occurrence
    """Its occurrence."""
    state: AttemptState
    """In flight or buffered."""
    tokens: int | None
    """Its sampled tokens, all pending. None: it has not ended yet."""


class EndedAttempts(msgspec.Struct, frozen=True, tag="ended_attempts.1"):
    """How many trajectories ended in one way."""

    state: AttemptState
    """A final state."""
    fate: Fate | None
    """Why. None: trained."""
    count: int
    """Trajectories."""


class BooksState(msgspec.Struct, frozen=True, tag="books.1"):
    """The books at one moment. Its size follows what is open, not how long the run has been."""

    last_opened: Occurrence | None
    """The newest occurrence ever opened; earlier ones that are not in `open` are closed. None: none yet."""
    opened: int
    """Occurrences ever opened."""
    open: tuple[OpenOccurrence, ...]
    """Occurrences still open, in the order they were opened."""
    trained: int
    """Occurrences trained."""
    given_up: dict[Fate, int]
    """Occurrences given up, by reason."""
    started: int
    """Trajectories ever started."""
    live: tuple[LiveAttempt, ...]
    """Trajectories in flight or buffered."""
    ended: tuple[EndedAttempts, ...]
    """Trajectories in a final state."""
    recorded_tokens: int
    """Sampled tokens of all trajectories that ended."""
    gradient_tokens: int
    """Of those, in a gradient."""
    masked_tokens: dict[MaskReason, int]
    """Of those, without a gradient for good, by reason. The rest is pending in `live`."""


@final
class Books:
    """Conserved by construction: every method is one transition, and an illegal one raises BooksError naming it.

        occurrences   open -> trained | given up(fate)
        attempts      in flight -> buffered -> trained;  in flight | buffered -> dropped | filtered | failed (fate)
        tokens        recorded (pending) -> in the gradient | masked(reason)

    Occurrences are opened in the order of the data without a gap, so the newest one opened and the set of open ones
    tell which are closed: a closed one can never be opened, thus never trained, again.
    """

    def __init__(self) -> None:
        self.restore(
            BooksState(
                last_opened=None,
                opened=0,
                open=(),
                trained=0,
                given_up={},
                started=0,
                live=(),
                ended=(),
                recorded_tokens=0,
                gradient_tokens=0,
                masked_tokens={},
            )
        )

    def start(self, occurrence: Occurrence, group: GroupId, members: Sequence[TrajectoryId]) -> None:
        """Trajectories of one attempt at an occurrence are in flight. A new occurrence is opened by it."""
        if occurrence not in self._open:
            self._open_next(occurrence)
        entry = self._open[occurrence]
        if entry.live:
            raise BooksError(
                f"occurrence {occurrence.name} has an attempt in flight or buffered: {group} may not start"
            )
        known = [member for member in members if member in self._live]
        if known or len(set(members)) != len(members) or not members:
            raise BooksError(f"group {group} cannot start with members {list(members)}: known already {known}")
        for member in members:
            self._live[member] = LiveAttempt(
                trajectory=member,
                group=group,
                occurrence=occurrence,
                state=AttemptState.IN_FLIGHT,
                tokens=None,
            )
        self._started += len(members)
        self._open[occurrence] = msgspec.structs.replace(entry, live=len(members))

    def record(self, trajectory: TrajectoryId, sampled_tokens: int) -> None:
        """A trajectory in flight ended with this many sampled tokens; they are pending until its group is decided."""
        attempt = self._expect(trajectory, AttemptState.IN_FLIGHT, "record the end of")
        if attempt.tokens is not None or sampled_tokens < 0:
            raise BooksError(f"{trajectory} ended twice, or with {sampled_tokens} tokens")
        self._live[trajectory] = msgspec.structs.replace(attempt, tokens=sampled_tokens)
        self._recorded += sampled_tokens

    def buffer(self, trajectory: TrajectoryId) -> None:
        """In flight -> buffered. Its end must be recorded."""
        attempt = self._expect(trajectory, AttemptState.IN_FLIGHT, "buffer")
        if attempt.tokens is None:
            raise BooksError(f"{trajectory} cannot be buffered: its end was not recorded")
        self._live[trajectory] = msgspec.structs.replace(attempt, state=AttemptState.BUFFERED)

    def train(self, trajectory: TrajectoryId, in_gradient: int, masked: Mapping[MaskReason, int]) -> None:
        """Buffered -> trained. `in_gradient` and `masked` tokens must be all that it sampled."""
        attempt = self._expect(trajectory, AttemptState.BUFFERED, "train")
        if in_gradient < 0:
            raise BooksError(f"{trajectory} has {in_gradient} tokens in the gradient")
        self._account(attempt, in_gradient, masked)
        self._end(attempt, AttemptState.TRAINED, None)

    def end(
        self,
        trajectory: TrajectoryId,
        state: AttemptState,
        fate: Fate,
        masked: Mapping[MaskReason, int] | None = None,
    ) -> None:
        """In flight | buffered -> dropped | filtered | failed. `masked` None: all its tokens by `mask_reason(fate)`."""
        attempt = self._live.get(trajectory)
        if attempt is None:
            raise BooksError(f"{trajectory} cannot become {state} ({fate}): it is not in flight or buffered")
        if fate not in _FATES.get(state, frozenset()):
            raise BooksError(f"{trajectory} cannot become {state} for the reason {fate}")
        self._account(attempt, 0, {mask_reason(fate): attempt.tokens or 0} if masked is None else masked)
        self._end(attempt, state, fate)

    def requeue(self, occurrence: Occurrence) -> int:
        """The attempt at an open occurrence failed whole; returns the number of attempts used. It stays open."""
        entry = self._open_entry(occurrence, "requeue")
        used = entry.attempts_used + 1
        self._open[occurrence] = msgspec.structs.replace(entry, attempts_used=used)
        return used

    def close(self, occurrence: Occurrence, fate: Fate | None) -> None:
        """Open -> trained (`fate` None) or given up. None of its attempts may be in flight or buffered."""
        self._open_entry(occurrence, "close")
        del self._open[occurrence]
        if fate is None:
            self._trained += 1
        else:
            self._given_up[fate] += 1

    def attempts_used(self, occurrence: Occurrence) -> int:
        """Attempts at the occurrence that ended in a requeue; 0 for one that is not open."""
        entry = self._open.get(occurrence)
        return entry.attempts_used if entry else 0

    @property
    def last_opened(self) -> Occurrence | None:
        """The newest occurrence opened. None: none yet."""
        return self._last_opened

    def idle(self) -> list[Occurrence]:
        """Open occurrences without an attempt in flight or buffered: they are to be run again. In opening order."""
        return [entry.occurrence for entry in self._open.values() if not entry.live]

    def in_flight(self) -> list[TrajectoryId]:
        """Trajectories in flight, in starting order."""
        return [item.trajectory for item in self._live.values() if item.state is AttemptState.IN_FLIGHT]

    def is_buffered(self, trajectory: TrajectoryId) -> bool:
        """True for a buffered attempt."""
        attempt = self._live.get(trajectory)
        return attempt is not None and attempt.state is AttemptState.BUFFERED

    def check(self) -> None:
        """Raise BooksError unless all three books balance. Called before every optimizer step."""
        closed = self._trained + self._given_up.total()
        if self._opened != len(self._open) + closed:
            raise BooksError(f"occurrences: {self._opened} opened, {len(self._open)} open, {closed} closed")
        ended = self._ended.total()
        if self._started != len(self._live) + ended:
            raise BooksError(f"attempts: {self._started} started, {len(self._live)} live, {ended} ended")
        live_by_occurrence = Counter(item.occurrence for item in self._live.values())
        claimed = {entry.occurrence: entry.live for entry in self._open.values() if entry.live}
        if claimed != dict(live_by_occurrence):
            raise BooksError("attempts are live at other occurrences than those open for them")
        pending = sum(item.tokens or 0 for item in self._live.values())
        masked = self._masked.total()
        if self._recorded != self._gradient + masked + pending:
            raise BooksError(
                f"tokens: {self._recorded} recorded, {self._gradient} in the gradient, {masked} masked, "
                f"{pending} pending"
            )

    def snapshot(self) -> BooksState:
        """The books now."""
        return BooksState(
            last_opened=self._last_opened,
            opened=self._opened,
            open=tuple(self._open.values()),
            trained=self._trained,
            given_up=dict(self._given_up),
            started=self._started,
            live=tuple(self._live.values()),
            ended=tuple(EndedAttempts(state=s, fate=f, count=count) for (s, f), count in self._ended.items()),
            recorded_tokens=self._recorded,
            gradient_tokens=self._gradient,
            masked_tokens=dict(self._masked),
        )

    def restore(self, state: BooksState) -> None:
        """Be as `state` says. Raises BooksError when that does not balance."""
        self._last_opened = state.last_opened
        self._opened = state.opened
        self._open = {entry.occurrence: entry for entry in state.open}
        self._trained = state.trained
        self._given_up: Counter[Fate] = Counter(state.given_up)
        self._started = state.started
        self._live = {attempt.trajectory: attempt for attempt in state.live}
        self._ended: Counter[tuple[AttemptState, Fate | None]] = Counter(
            {(item.state, item.fate): item.count for item in state.ended}
        )
        self._recorded = state.recorded_tokens
        self._gradient = state.gradient_tokens
        self._masked: Counter[MaskReason] = Counter(state.masked_tokens)
        self.check()

    def _open_next(self, occurrence: Occurrence) -> None:
        last = self._last_opened
        if last is not None and occurrence <= last:
            raise BooksError(f"occurrence {occurrence.name} is closed: it cannot be run again")
        first_of_epoch = Occurrence(epoch=0 if last is None else last.epoch + 1, index=0)
        next_in_epoch = None if last is None else Occurrence(epoch=last.epoch, index=last.index + 1)
        if occurrence not in (first_of_epoch, next_in_epoch):
            raise BooksError(f"occurrence {occurrence.name} leaves a gap after {last.name if last else 'the start'}")
        self._last_opened = occurrence
        self._opened += 1
        self._open[occurrence] = OpenOccurrence(occurrence=occurrence, attempts_used=0, live=0)

    def _open_entry(self, occurrence: Occurrence, verb: str) -> OpenOccurrence:
        entry = self._open.get(occurrence)
        if entry is None or entry.live:
            found = "is not open" if entry is None else f"has {entry.live} attempts in flight or buffered"
            raise BooksError(f"cannot {verb} occurrence {occurrence.name}: it {found}")
        return entry

    def _expect(self, trajectory: TrajectoryId, state: AttemptState, verb: str) -> LiveAttempt:
        attempt = self._live.get(trajectory)
        if attempt is None or attempt.state is not state:
            found = attempt.state if attempt else "unknown or ended"
            raise BooksError(f"cannot {verb} {trajectory}: it must be {state} and is {found}")
        return attempt

    def _account(self, attempt: LiveAttempt, in_gradient: int, masked: Mapping[MaskReason, int]) -> None:
        accounted = in_gradient + sum(masked.values())
        if accounted != (attempt.tokens or 0) or any(count < 0 for count in masked.values()):
            raise BooksError(
                f"{attempt.trajectory} sampled {attempt.tokens} tokens, but {in_gradient} in the gradient "
                f"and {dict(masked)} masked are accounted for"
            )
        self._gradient += in_gradient
        self._masked.update({reason: count for reason, count in masked.items() if count})

    def _end(self, attempt: LiveAttempt, state: AttemptState, fate: Fate | None) -> None:
        del self._live[attempt.trajectory]
        self._ended[state, fate] += 1
        entry = self._open[attempt.occurrence]
        self._open[attempt.occurrence] = msgspec.structs.replace(entry, live=entry.live - 1)


def mask_reason(fate: Fate) -> MaskReason:
    """What the tokens of a trajectory with this fate are masked for."""
    match fate:
        case Fate.AGE:
            return MaskReason.AGE
        case Fate.TRUNCATED:
            return MaskReason.TRUNCATED
        case _:
            return MaskReason.NOT_TRAINED

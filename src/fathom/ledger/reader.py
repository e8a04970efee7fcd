"""Reads a run's history while it is being written."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, cast, final

import msgspec

from fathom.core.errors import LedgerError
from fathom.core.ids import GroupId, Occurrence, TaskId, TrajectoryId
from fathom.core.records.step import MaskReason, RowOutcome
from fathom.core.records.trajectory import Graded, Trajectory, TrajectoryStatus
from fathom.ledger import schema
from fathom.ledger.container import ContainerReader, Span
from fathom.ledger.entries import Recorded, RowUse, StoredTrajectory, TrajectoryEntry
from fathom.ledger.events import Event, IncarnationOpened, StepRows
from fathom.ledger.lineage import Lineage, Opening

E = TypeVar("E", bound=Event)

_SPAN = "segment, offset, skeleton_bytes, array_bytes, checksum"
_TRAJECTORY = (
    "seq, id, group_id, member, epoch, place, attempt, task, status, reward, sampled_tokens, started_s, ended_s"
)
_USE = """
SELECT u.seq, s.number, u.place, u.trajectory, u.branch, u.tokens, u.in_gradient,
       t.group_id, t.epoch, t.place, t.task
FROM row_use u JOIN step s ON s.seq = u.seq LEFT JOIN trajectory t ON t.id = u.trajectory
"""


@final
class LedgerReader:
    """Read-only; any number beside the writer. Each call sees what was committed when it began.

    Answers are about the surviving lineage; `include_undone` adds what a resume undid. All lists are in order of
    events. Any call raises LedgerError when the files cannot be read or are not as they were written.
    """

    def __init__(self, folder: Path) -> None:
        self._database = schema.connect(folder, read_only=True)
        self._container = ContainerReader(folder)
        self._decoder = msgspec.msgpack.Decoder(Event)

    def close(self) -> None:
        """Close the files."""
        self._database.close()
        self._container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the history -------------------------------------------------------------------------------------------

    @property
    def last_seq(self) -> int:
        """Number of the newest committed event; 0: none."""
        return int(self._query("SELECT coalesce(max(seq), 0) FROM event")[0][0])

    def lineage(self, until: int | None = None) -> Lineage:
        """The stretches of history that survive, seen from event `until` (None: from the newest)."""
        opened = self.events(IncarnationOpened, include_undone=True)
        openings = [Opening(seq=entry.seq, parent_seq=entry.event.parent_seq) for entry in opened]
        return Lineage.ending_at(openings, self.last_seq if until is None else until)

    def history(
        self,
        kinds: Sequence[type[Event]] = (),
        *,
        since: int = 0,
        until: int | None = None,
        limit: int | None = None,
        include_undone: bool = False,
    ) -> list[Recorded[Event]]:
        """Events of the given kinds (none given: all) with `since < seq <= until`, the first `limit` of them.

        A live follower polls with `since` set to the last number it saw. `until` also chooses the lineage.
        """
        conditions, values = ["seq > ?"], [since]
        if until is not None:
            conditions, values = [*conditions, "seq <= ?"], [*values, until]
        names = [schema.kind_of(kind) for kind in kinds]
        if names:
            conditions.append(f"kind IN ({', '.join('?' * len(names))})")
        if not include_undone:
            conditions.append(_within("seq", self.lineage(until)))
        rows = self._query(
            f"SELECT seq, at_s, body FROM event WHERE {' AND '.join(conditions)} ORDER BY seq LIMIT ?",
            (*values, *names, -1 if limit is None else limit),
        )
        return [self._recorded(row) for row in rows]

    def events(
        self, kind: type[E], *, since: int = 0, until: int | None = None, include_undone: bool = False
    ) -> list[Recorded[E]]:
        """`history` of one kind."""
        found = self.history((kind,), since=since, until=until, include_undone=include_undone)
        return cast(list[Recorded[E]], found)

    def latest(self, kind: type[E], *, until: int | None = None, include_undone: bool = False) -> Recorded[E] | None:
        """The newest event of a kind. None: there is none."""
        conditions, values = ["kind = ?"], [schema.kind_of(kind)]
        if until is not None:
            conditions.append(f"seq <= {until}")
        if not include_undone:
            conditions.append(_within("seq", self.lineage(until)))
        where = " AND ".join(conditions)
        rows = self._query(f"SELECT seq, at_s, body FROM event WHERE {where} ORDER BY seq DESC LIMIT 1", values)
        return cast("Recorded[E]", self._recorded(rows[0])) if rows else None

    # --- trajectories ------------------------------------------------------------------------------------------

    def trajectory(self, name: TrajectoryId) -> StoredTrajectory:
        """One trajectory, undone ones included.

        Raises:
            LedgerError: there is no such trajectory, its record is damaged, or the index says other things of it.
        """
        rows = self._query(f"SELECT {_TRAJECTORY}, {_SPAN} FROM trajectory WHERE id = ?", (name,))
        if not rows:
            raise LedgerError(f"the ledger holds no trajectory {name!r}")
        entry, found = _entry(rows[0]), self._container.read(Trajectory, _span(rows[0][-5:]))
        header, reward = found.header, found.header.reward
        if header.id != name:
            raise LedgerError(f"{name} holds the record of {header.id}; restore the ledger from a copy of its folder")
        told = (entry.group, entry.occurrence, entry.status, entry.reward, entry.sampled_tokens)
        total = reward.total if isinstance(reward, Graded) else None
        if told != (header.group, header.occurrence, header.status, total, found.payload.num_sampled):
            raise LedgerError(f"the index contradicts the record of {name}; restore the ledger from a copy")
        return StoredTrajectory(entry=entry, trajectory=found)

    def trajectories(self, *, until: int | None = None, include_undone: bool = False) -> list[TrajectoryEntry]:
        """Index entries of all trajectories that ended."""
        where = "1" if include_undone else _within("seq", self.lineage(until))
        return [_entry(row) for row in self._query(f"SELECT {_TRAJECTORY}, {_SPAN} FROM trajectory WHERE {where}")]

    # --- steps -------------------------------------------------------------------------------------------------

    def rows_at(self, step: int, *, include_undone: bool = False) -> list[RowUse]:
        """The rows that step `step` used, and where each came from. From the index alone: cheap."""
        return self._uses("s.number = ?", (step,), include_undone)

    def rows_of(self, trajectory: TrajectoryId, *, include_undone: bool = False) -> list[RowUse]:
        """Every use of rows of a trajectory."""
        return self._uses("u.trajectory = ?", (trajectory,), include_undone)

    def rows(self, *, until: int | None = None, include_undone: bool = False) -> list[RowUse]:
        """Every row of every step."""
        return self._uses("1", (), include_undone, until)

    def outcomes(self, seq: int) -> tuple[RowOutcome, ...]:
        """The rows of the `StepTaken` at `seq` with their arrays, by place in the batch.

        Raises:
            LedgerError: there is no such step, its rows are damaged, or the index says other things of them.
        """
        rows = self._query(f"SELECT {_SPAN} FROM step WHERE seq = ?", (seq,))
        if not rows:
            raise LedgerError(f"event {seq} is no step")
        found = self._container.read(StepRows, _span(rows[0])).rows
        uses = self._query(
            "SELECT place, trajectory, branch, tokens, in_gradient FROM row_use WHERE seq = ? ORDER BY place", (seq,)
        )
        masked: dict[int, dict[str, int]] = {}
        for place, reason, tokens in self._query("SELECT place, reason, tokens FROM masked WHERE seq = ?", (seq,)):
            masked.setdefault(place, {})[reason] = tokens
        told = [(*use, masked.pop(use[0], {})) for use in uses]
        right = [
            (place, row.trajectory, row.branch, len(row.positions), *schema.told_of(row))
            for place, row in enumerate(found)
        ]
        if masked or told != right:
            raise LedgerError(f"the index contradicts the rows of the step at event {seq}; restore it from a copy")
        return found

    def masked_tokens(self, *, until: int | None = None) -> list[tuple[int, TrajectoryId, MaskReason, int]]:
        """(seq of the step, trajectory, reason, tokens) for every row that had tokens without gradient."""
        rows = self._query(
            "SELECT m.seq, u.trajectory, m.reason, m.tokens FROM masked m JOIN row_use u USING (seq, place) "
            f"WHERE {_within('m.seq', self.lineage(until))} ORDER BY m.seq, place"
        )
        return [(seq, TrajectoryId(name), MaskReason(reason), tokens) for seq, name, reason, tokens in rows]

    # --- the ledger itself -------------------------------------------------------------------------------------

    def write_seconds(self) -> float:
        """Time it took to write the history that survives: appending and committing, as the writer measured it."""
        survives = _within("last_seq", self.lineage())
        return float(self._query(f"SELECT coalesce(sum(seconds), 0) FROM written WHERE {survives}")[0][0])

    def _uses(
        self, condition: str, values: Iterable[Any], include_undone: bool, until: int | None = None
    ) -> list[RowUse]:
        survives = "1" if include_undone else _within("u.seq", self.lineage(until))
        rows = self._query(f"{_USE} WHERE {condition} AND {survives} ORDER BY u.seq, u.place", values)
        return [_use(row) for row in rows]

    def _recorded(self, row: tuple[Any, ...]) -> Recorded[Event]:
        seq, at_s, body = row
        try:
            return Recorded(seq=seq, at_s=at_s, event=self._decoder.decode(body))
        except msgspec.DecodeError as error:
            raise LedgerError(f"event {seq} cannot be decoded by this version of Fathom: {error}") from error

    def _query(self, sql: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(sql, tuple(values)).fetchall()
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger cannot be read: {error}") from error


def _within(column: str, lineage: Lineage) -> str:
    ranges = [f"{column} BETWEEN {first} AND {last}" for first, last in lineage.ranges]
    return f"({' OR '.join(ranges)})" if ranges else "0"


def _span(row: Sequence[Any]) -> Span:
    segment, offset, skeleton_bytes, array_bytes, checksum = row
    return Span(
        segment=segment, offset=offset, skeleton_bytes=skeleton_bytes, array_bytes=array_bytes, checksum=checksum
    )


def _entry(row: tuple[Any, ...]) -> TrajectoryEntry:
    seq, name, group, member, epoch, place, attempt, task, status, reward, sampled, started, ended = row[:13]
    return TrajectoryEntry(
        seq=seq,
        id=TrajectoryId(name),
        group=GroupId(group),
        member=member,
        occurrence=Occurrence(epoch, place),
        attempt=attempt,
        task=TaskId(task),
        status=TrajectoryStatus(status),
        reward=reward,
        sampled_tokens=sampled,
        started_s=started,
        ended_s=ended,
        content_hash=row[-1].hex(),
    )


def _use(row: tuple[Any, ...]) -> RowUse:
    seq, step, place, trajectory, branch, tokens, in_gradient, group, epoch, index, task = row
    return RowUse(
        seq=seq,
        step=step,
        place=place,
        trajectory=TrajectoryId(trajectory),
        branch=branch,
        tokens=tokens,
        in_gradient=in_gradient,
        group=None if group is None else GroupId(group),
        occurrence=None if epoch is None else Occurrence(epoch, index),
        task=None if task is None else TaskId(task),
    )

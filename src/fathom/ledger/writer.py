"""The one writer of a run's history."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self, final

import msgspec

from fathom.core.errors import LedgerError
from fathom.core.records.step import RowOutcome
from fathom.core.records.trajectory import Graded, Trajectory
from fathom.ledger import schema
from fathom.ledger.container import ContainerWriter, Span
from fathom.ledger.events import Event, IncarnationOpened, StepRows, StepTaken, TrajectoryEnded

_SEGMENT_BYTES = 256 << 20
_Values = tuple[int | float | str | bytes | None, ...]


@final
class LedgerWriter:
    """Appends events; `commit` makes them visible and durable, all since the last commit together or none.

    After `commit` returns, its events survive the death of the process; with `fsync` also the loss of power.
    Bytes in the container are always written before the index that names them. Not thread-safe.
    """

    def __init__(self, folder: Path, *, fsync: bool, clock: Callable[[], float], segment_bytes: int) -> None:
        """Use `create` or `open`."""
        self._database = schema.connect(folder, read_only=False)
        try:
            self._lock = _lock(folder)
        except LedgerError:
            self._database.close()
            raise
        self._database.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
        self._container = ContainerWriter(folder, segment_bytes=segment_bytes, fsync=fsync)
        self._clock = clock
        self._last_seq = int(self._database.execute("SELECT coalesce(max(seq), 0) FROM event").fetchone()[0])
        self._incarnation: int | None = None
        self._pending: dict[str, list[_Values]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._seconds = 0.0

    @classmethod
    def create(
        cls,
        folder: Path,
        *,
        fsync: bool = False,
        clock: Callable[[], float] = time.time,
        segment_bytes: int = _SEGMENT_BYTES,
    ) -> Self:
        """Start a ledger in `folder`, which is made if needed. Raises LedgerError when it already holds one."""
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / schema.DATABASE).exists():
            raise LedgerError(f"{folder} already holds a ledger; resume that run or choose another folder")
        try:
            schema.create(folder)
        except sqlite3.Error as error:
            raise LedgerError(f"cannot create a ledger in {folder}: {error}") from error
        return cls(folder, fsync=fsync, clock=clock, segment_bytes=segment_bytes)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        fsync: bool = False,
        clock: Callable[[], float] = time.time,
        segment_bytes: int = _SEGMENT_BYTES,
    ) -> Self:
        """Go on with the ledger in `folder`. Raises LedgerError when there is none or it has a writer."""
        return cls(folder, fsync=fsync, clock=clock, segment_bytes=segment_bytes)

    @property
    def last_seq(self) -> int:
        """Sequence number of the last event appended; 0 in an empty ledger."""
        return self._last_seq

    def append(self, event: Event) -> int:
        """Add an event; returns its sequence number, counted from 1.

        Raises:
            LedgerError: the event has arrays (use `append_trajectory`, `append_step`), or no incarnation is open.
        """
        if isinstance(event, (TrajectoryEnded, StepTaken)):
            raise LedgerError(f"{type(event).__name__} comes with arrays: use append_trajectory or append_step")
        began = time.perf_counter()
        if isinstance(event, IncarnationOpened):
            self._open_incarnation(event)
        seq = self._append(event)
        self._seconds += time.perf_counter() - began
        return seq

    def append_trajectory(self, trajectory: Trajectory, event: TrajectoryEnded) -> int:
        """Add the end of a trajectory with its whole record; returns the event's sequence number."""
        began = time.perf_counter()
        header, sampled = trajectory.header, trajectory.payload.num_sampled
        if (event.trajectory, event.sampled_tokens) != (header.id, sampled):
            raise LedgerError(
                f"event of {event.trajectory} with {event.sampled_tokens} sampled tokens does not describe "
                f"trajectory {header.id} with {sampled}"
            )
        span = self._store(trajectory)
        seq = self._append(event)
        reward = header.reward.total if isinstance(header.reward, Graded) else None
        place = (seq, header.id, header.group, header.member, header.occurrence.epoch, header.occurrence.index)
        facts = (header.attempt, header.task, header.status.value, reward, sampled, header.started_s, header.ended_s)
        self._insert("trajectory", (*place, *facts, *_columns(span)))
        self._seconds += time.perf_counter() - began
        return seq

    def append_step(self, step: StepTaken, rows: tuple[RowOutcome, ...]) -> int:
        """Add an optimizer step with what happened to each of its rows; returns the event's sequence number."""
        began = time.perf_counter()
        span = self._store(StepRows(rows=rows))
        seq = self._append(step)
        self._insert("step", (seq, step.number, *_columns(span)))
        for place, row in enumerate(rows):
            in_gradient, masked = schema.told_of(row)
            self._insert("row_use", (seq, place, row.trajectory, row.branch, len(row.positions), in_gradient))
            for reason, tokens in masked.items():
                self._insert("masked", (seq, place, reason, tokens))
        self._seconds += time.perf_counter() - began
        return seq

    def commit(self) -> None:
        """Make everything appended so far visible and durable. Raises LedgerError when it cannot be written."""
        if not self._pending:
            return
        began = time.perf_counter()
        written: list[_Values] = [(self._last_seq, self._seconds)]  # not among the pending: one that failed comes again
        try:
            self._container.flush()
            self._database.execute("BEGIN IMMEDIATE")
            for table, rows in (*self._pending.items(), ("written", written)):
                marks = ", ".join("?" * len(rows[0]))
                self._database.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
            self._database.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise LedgerError(f"the ledger cannot be written: {error}; is the disk full?") from error
        self._pending = {}
        self._seconds = time.perf_counter() - began

    def close(self) -> None:
        """Commit and let the ledger go."""
        try:
            self.commit()
        finally:
            self._container.close()
            self._database.close()
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, event: Event) -> int:
        if self._incarnation is None:
            raise LedgerError(f"{type(event).__name__} before IncarnationOpened: open an incarnation first")
        self._last_seq += 1
        self._insert("event", (self._last_seq, self._clock(), schema.kind_of(type(event)), self._encoder.encode(event)))
        return self._last_seq

    def _open_incarnation(self, event: IncarnationOpened) -> None:
        opened = schema.kind_of(IncarnationOpened)
        (known,) = self._database.execute("SELECT count(*) FROM event WHERE kind = ?", (opened,)).fetchone()
        if self._incarnation is not None or event.incarnation != known + 1:
            raise LedgerError(f"incarnation {event.incarnation} cannot be opened: {known} are known, each by a writer")
        if event.parent_seq is not None and not 1 <= event.parent_seq <= self._last_seq:
            raise LedgerError(f"parent_seq {event.parent_seq} is no event of this ledger (1 to {self._last_seq})")
        self._incarnation = event.incarnation

    def _store(self, record: msgspec.Struct) -> Span:
        try:
            return self._container.append(record)
        except OSError as error:
            raise LedgerError(f"the ledger cannot be written: {error}; is the disk full?") from error

    def _insert(self, table: str, values: _Values) -> None:
        self._pending.setdefault(table, []).append(values)


def _columns(span: Span) -> _Values:
    return span.segment, span.offset, span.skeleton_bytes, span.array_bytes, span.checksum


def _lock(folder: Path) -> int:
    """Held while the process lives; a record lock, so that child processes do not inherit it."""
    handle = os.open(folder / "writer.lock", os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise LedgerError(f"the ledger in {folder} is being written by another process; stop that run first") from None
    return handle

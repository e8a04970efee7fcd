"""The database: events in order, and the indexes that make questions about rows and trajectories cheap."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from fathom.core.errors import LedgerError
from fathom.core.records.step import MaskReason, RowOutcome
from fathom.ledger.events import Event

DATABASE = "ledger.sqlite"
VERSION = 1
_REASONS = tuple(MaskReason)

_SPAN = (
    "segment INTEGER NOT NULL, offset INTEGER NOT NULL, skeleton_bytes INTEGER NOT NULL, "
    "array_bytes INTEGER NOT NULL, checksum BLOB NOT NULL"
)

TABLES = f"""
CREATE TABLE event (seq INTEGER PRIMARY KEY, at_s REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL);
CREATE INDEX event_kind ON event (kind, seq);

CREATE TABLE trajectory (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, group_id TEXT NOT NULL, member INTEGER NOT NULL,
    epoch INTEGER NOT NULL, place INTEGER NOT NULL, attempt INTEGER NOT NULL, task TEXT NOT NULL,
    status TEXT NOT NULL, reward REAL, sampled_tokens INTEGER NOT NULL, started_s REAL NOT NULL, ended_s REAL NOT NULL,
    {_SPAN});

CREATE TABLE step (seq INTEGER PRIMARY KEY, number INTEGER NOT NULL, {_SPAN});
CREATE INDEX step_number ON step (number);

CREATE TABLE row_use (
    seq INTEGER NOT NULL, place INTEGER NOT NULL, trajectory TEXT NOT NULL, branch INTEGER NOT NULL,
    tokens INTEGER NOT NULL, in_gradient INTEGER NOT NULL, PRIMARY KEY (seq, place)) WITHOUT ROWID;
CREATE INDEX row_use_trajectory ON row_use (trajectory);

CREATE TABLE masked (
    seq INTEGER NOT NULL, place INTEGER NOT NULL, reason TEXT NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (seq, place, reason)) WITHOUT ROWID;

CREATE TABLE written (last_seq INTEGER PRIMARY KEY, seconds REAL NOT NULL);
"""
"""`row_use` says which rows a step used, `masked` why tokens of a row had no gradient, `written` what writing cost."""


def connect(folder: Path, *, read_only: bool) -> sqlite3.Connection:
    """Open the database of an existing ledger.

    Raises:
        LedgerError: there is none, or it was written by another version of Fathom.
    """
    path = folder / DATABASE
    if not path.is_file():
        raise LedgerError(
            f"no ledger in {folder}: {DATABASE} is missing; the run recorded nothing, or its folder is not whole"
        )
    uri = path.resolve().as_uri() + ("?mode=ro" if read_only else "?mode=rw")
    try:
        database = sqlite3.connect(uri, uri=True, isolation_level=None)
        (version,) = database.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:
        raise LedgerError(
            f"cannot open {path}: {error}; a damaged one is restored from a copy of its folder"
        ) from error
    if version != VERSION:
        database.close()
        if not version:
            raise LedgerError(f"{path} holds no history: it is empty or damaged; restore it from a copy of its folder")
        raise LedgerError(
            f"{path} has layout {version}, this Fathom reads layout {VERSION}; use the version of Fathom that wrote it"
        )
    return database


def create(folder: Path) -> None:
    """Make an empty database in `folder`, complete or not at all."""
    path = folder / DATABASE
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    database = sqlite3.connect(unfinished, isolation_level=None)
    database.executescript(f"PRAGMA journal_mode = WAL; BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
    database.close()
    unfinished.rename(path)


def told_of(row: RowOutcome) -> tuple[int, dict[str, int]]:
    """What `row_use` and `masked` say of a row's tokens: how many had a gradient, and how many had none, by reason."""
    # code -1 (in the gradient) comes first, then the reasons in their order
    in_gradient, *masked = np.bincount(row.mask_codes + 1, minlength=len(_REASONS) + 1).tolist()
    return in_gradient, {reason.value: tokens for reason, tokens in zip(_REASONS, masked, strict=True) if tokens}


def kind_of(event: type[Event]) -> str:
    """The versioned name under which events of a type are stored."""
    return str(event.__struct_config__.tag)

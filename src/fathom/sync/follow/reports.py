"""What those who follow a chain say of themselves: one small object each, beside the chain."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from fathom.core.errors import ConfigError, PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.ports.engine import DigestKind
from fathom.sync.chain.reader import ChainReader
from fathom.sync.chain.store import Store

BEAT_S = 15.0
"""A follower says at least this often that it is there."""
_SUFFIX = ".msgpack"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class FollowerReport(msgspec.Struct, frozen=True, tag="follower_report.1"):
    """How a follower stands."""

    name: str
    """Its name, unique among those who follow the chain."""
    version: PolicyVersion | None
    """What it serves, with the digest that it found. None: nothing yet."""
    proven: DigestKind | None
    """How it knows that digest. None: it serves nothing, or has done so since before it was started."""
    wanted: PolicyVersion | None
    """The newest version that it saw in the chain. None: the chain was empty."""
    at_s: float
    """Seconds since 1970 at which it wrote this."""
    moved_bytes: int
    """Bytes that its last pull read."""
    pull_s: float
    """Seconds from the beginning of that pull to the commit."""
    error: str
    """Why it does not serve what it wants. Empty: nothing is wrong."""
    following: bool
    """False: it has ended by itself; nothing newer will be pulled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A follower as seen from the chain."""

    report: FollowerReport
    """What it said last."""
    behind: int | None
    """Steps by which the chain is ahead. None: it serves nothing, or a version of another incarnation."""


def require_name(name: str) -> None:
    """Raise `ConfigError` unless a report can have this name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a follower; use letters, digits, '.', '_' and '-', at most 100")


def put_report(store: Store, report: FollowerReport) -> None:
    """Write or replace it, whole. Raises `DeliveryError`."""
    store.put(f"followers/{report.name}{_SUFFIX}", [msgspec.msgpack.encode(report)])


def standings(store: Store) -> tuple[Standing, ...]:
    """Everybody who ever followed the chain, by name. A report that cannot be read is told as its follower's error.

    Raises:
        PayloadError: the store cannot be read.
    """
    newest = ChainReader(store).newest()
    found = (_read(store, name) for name in sorted(store.list("followers")))
    return tuple(
        Standing(report=report, behind=_behind(report.version, newest.version if newest else None)) for report in found
    )


def _behind(version: PolicyVersion | None, newest: PolicyVersion | None) -> int | None:
    if version is None or newest is None or version.incarnation != newest.incarnation:
        return None
    return newest.number - version.number


def _read(store: Store, name: str) -> FollowerReport:
    try:
        return msgspec.msgpack.decode(store.get(name), type=FollowerReport)
    except (PayloadError, msgspec.MsgspecError) as error:
        return FollowerReport(
            name=name.partition("/")[2].removesuffix(_SUFFIX),
            version=None,
            proven=None,
            wanted=None,
            at_s=0.0,
            moved_bytes=0,
            pull_s=0.0,
            error=f"its report cannot be read: {error}",
            following=False,
        )

"""Readers that take long tell the writer what it must not drop meanwhile."""

from __future__ import annotations

import secrets
import threading
import time
from types import TracebackType
from typing import Self, final

import msgspec

from fathom.core.errors import FathomError, PayloadError
from fathom.core.ids import PolicyVersion
from fathom.sync.chain.links import LinkName
from fathom.sync.chain.store import Store

_SECONDS = 120.0
_GRACE_S = 60.0
"""How far the clocks of readers and writer may be apart."""


class LeaseRecord(msgspec.Struct, frozen=True, tag="lease.1"):
    """A lease object."""

    oldest: PolicyVersion
    """From this version on all links are needed, and the anchor that leads to it."""
    expires_at: float
    """Seconds since 1970, by the reader's clock."""


@final
class Lease:
    """While it is open, the writer drops nothing that leads to `oldest` or comes after it; renewed by a thread.

        with Lease(store, link.version):
            reader.materialise(link.version, into, None)

    A reader that dies with it holds the writer up for `seconds` at most.
    """

    def __init__(self, store: Store, oldest: PolicyVersion, seconds: float = _SECONDS) -> None:
        """Raises `DeliveryError` when the store cannot be written."""
        self._store = store
        self._oldest = oldest
        self._seconds = seconds
        self._name = f"leases/{secrets.token_hex(16)}.msgpack"
        self._closed = threading.Event()
        self._renew()
        self._thread = threading.Thread(target=self._keep_up, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give it up. Idempotent. Raises `DeliveryError`; it expires by itself then."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._store.delete(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _keep_up(self) -> None:
        while not self._closed.wait(self._seconds / 3):
            try:
                self._renew()
            except FathomError:  # tried again; once it has expired, reading says what is missing
                continue

    def _renew(self) -> None:
        record = LeaseRecord(oldest=self._oldest, expires_at=time.time() + self._seconds)
        self._store.put(self._name, [msgspec.msgpack.encode(record)])


def leased(store: Store, now: float) -> list[LinkName]:
    """The oldest version that each live lease needs; removes those that expired.

    Raises:
        PayloadError | DeliveryError: the store cannot be read. Nothing may be dropped then.
    """
    found: list[LinkName] = []
    for name in store.list("leases"):
        try:
            record = msgspec.msgpack.decode(store.get(name), type=LeaseRecord)
        except PayloadError:
            if name in store.list("leases"):
                raise
            continue  # given up since it was listed
        except msgspec.MsgspecError as error:
            raise PayloadError(f"{name} in {store.url} is no lease; remove it: {error}") from error
        if record.expires_at + _GRACE_S < now:
            store.delete(name)
        else:
            found.append(LinkName.of(record.oldest, anchor=False))
    return found

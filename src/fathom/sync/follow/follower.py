"""Keeps an engine that Fathom did not start at the newest version of a chain.

look --newer--> stage --> verify --digest right--> commit --> report --> look ...
                  any of them fails: rolled back; the old version serves on, and the report says why
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import final

import msgspec

from fathom.core.errors import ConfigError, DeliveryError, FathomError, PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import DeltaSource
from fathom.core.ports.engine import ReceivesInto
from fathom.core.records.sampling import InFlightMode
from fathom.sync.chain.leases import Lease
from fathom.sync.chain.links import Link
from fathom.sync.chain.reader import ChainReader
from fathom.sync.chain.store import Store
from fathom.sync.digest import few
from fathom.sync.follow.reports import BEAT_S, FollowerReport, put_report, require_name
from fathom.sync.receiver import Receiver

_RETRY_S = 10.0
"""How soon a pull that failed is tried again, at the earliest."""
_LEASE_S = 10.0
"""Deadline for giving a lease up."""

News = Callable[[FollowerReport], None]
"""Told when what a follower serves, or what keeps it from it, has changed."""


@final
class Follower:
    """Owns what its receiver serves: nobody else publishes to it. One pull at a time."""

    def __init__(
        self,
        store: Store,
        receiver: Receiver,
        name: str,
        *,
        serving: PolicyVersion | None = None,
        in_flight: InFlightMode = InFlightMode.CONTINUE,
        timeout_s: float = 600.0,
    ) -> None:
        """Follow the chain in `store` under a `name`; the receiver is said to be `serving` a version already.

        A pull that takes more than `timeout_s` has failed.

        Raises:
            ConfigError: it is no name, or this receiver cannot follow.
        """
        require_name(name)
        _require_able(receiver)
        self._store = store
        self._reader = ChainReader(store)
        self._receiver = receiver
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._written: FollowerReport | None = None
        self.report = FollowerReport(
            name=name,
            version=serving,
            proven=None,
            wanted=None,
            at_s=0.0,
            moved_bytes=0,
            pull_s=0.0,
            error="",
            following=True,
        )
        """How it stands."""

    async def follow(self, look_s: float, news: News) -> None:
        """Look for a newer version every `look_s` seconds, until it is cancelled. Whatever fails is reported."""
        try:
            while True:
                before = self.report
                await self.pull()
                if _said(self.report) != _said(before):
                    news(self.report)
                await asyncio.sleep(max(look_s, _RETRY_S) if self.report.error else look_s)
        finally:
            self.end()

    def end(self) -> None:
        """Report that it follows no more. What it serves is not touched."""
        self._note(following=False)
        with suppress(DeliveryError):  # the medium is gone: then the report says so by its age
            put_report(self._store, self.report)

    async def pull(self) -> FollowerReport:
        """Serve the newest version, if there is a newer one; returns how it stands. Never raises for what fails."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                newest = await asyncio.to_thread(self._reader.newest)
                self._note(wanted=newest.version if newest else None)
                if newest is not None and self._is_due(newest.version):
                    await self._take(newest)
            self._note(error="")
        except FathomError as error:
            self._note(error=str(error))
        except Exception as error:  # noqa: BLE001 - the boundary: an engine that is not ours raises what it likes
            self._note(error=f"{type(error).__name__}: {error}")
            if deadline.expired():
                self._note(
                    error=f"it was not done within {self._timeout_s:g} s; look at {self._store.url} and the engine"
                )
                self._reader = ChainReader(self._store)  # a thread may still use the other one
        await self._tell()
        return self.report

    def _is_due(self, newest: PolicyVersion) -> bool:
        """Another one, and not older. Raises `PayloadError` when it is older: links are missing or damaged."""
        serving = self.report.version
        if serving is not None and newest.order < serving.order:
            raise PayloadError(
                f"{serving.name} serves, and the newest in {self._store.url} is {newest.name}: newer links are missing "
                "or damaged, or it is the chain of another run"
            )
        return newest != serving

    async def _take(self, link: Link) -> None:
        """From what serves to `link`. Raises whatever goes wrong, after a rollback."""
        began_s = time.monotonic()
        source = DeltaSource(store=self._store.url, version=link.version)
        lease = await asyncio.to_thread(Lease, self._store, link.version)
        try:
            staged = await self._receiver.stage(link.manifest, source)
            found = await self._receiver.verify()
            if found.digest != link.version.digest:
                raise PayloadError(
                    f"{link.version.name} arrived with the digest {found.digest}, not {link.version.digest}; "
                    f"wrong tensors: {few(found.wrong)}"
                )
            await self._receiver.commit(link.version, self._in_flight)
        except BaseException:
            await self._roll_back()
            raise
        finally:
            await self._give_up(lease)
        self._note(
            version=link.version,
            proven=found.kind,
            moved_bytes=staged.moved_bytes,
            pull_s=time.monotonic() - began_s,
        )

    async def _roll_back(self) -> None:
        """An engine that does not even do that is found at the next pull, which stages anew in any case."""
        with suppress(Exception):
            async with asyncio.timeout(self._timeout_s):
                await self._receiver.rollback()

    async def _give_up(self, lease: Lease) -> None:
        with suppress(DeliveryError, TimeoutError):  # it expires by itself
            async with asyncio.timeout(_LEASE_S):
                await asyncio.to_thread(lease.close)

    async def _tell(self) -> None:
        """Write the report where it says something new, or was last written a while ago."""
        last = self._written
        if last is not None and _said(last) == _said(self.report) and self.report.at_s - last.at_s < BEAT_S:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.to_thread(put_report, self._store, self.report)
            self._written = self.report
        except DeliveryError as error:
            self._note(error=str(error))
        except TimeoutError:
            self._note(error=f"{self._store.url} did not take its report within {self._timeout_s:g} s; look at it")

    def _note(self, **changes: object) -> None:
        self.report = msgspec.structs.replace(self.report, at_s=time.time(), **changes)


def _said(report: FollowerReport) -> FollowerReport:
    """What of it is news."""
    return msgspec.structs.replace(report, at_s=0.0)


def _require_able(receiver: Receiver) -> None:
    able = receiver.capabilities
    if "delta" not in able.transports:
        raise ConfigError(f"{receiver.id} cannot read a chain: it has no transport `delta`")
    if able.receives_into is ReceivesInto.LIVE:
        raise ConfigError(
            f"{receiver.id} receives a version over the one that it serves: a pull that fails would leave it with "
            "nothing; only an engine that stages beside what serves can follow"
        )

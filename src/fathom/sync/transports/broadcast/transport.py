"""Weights broadcast to all engines of an offer at once."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from fathom.config.sync import BroadcastConfig
from fathom.core.errors import DeliveryError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import BroadcastSource, Manifest
from fathom.sync.held import host_block
from fathom.sync.transports.broadcast.bucket_source import BucketSource, FlatSource, layout_bytes
from fathom.sync.transports.broadcast.buckets import plan_buckets
from fathom.sync.transports.broadcast.roll_call import forget
from fathom.sync.transports.broadcast.sending import Kept, Sending
from fathom.sync.transports.broadcast.store import host_store

_MB = 1 << 20


@final
class BroadcastTransport:
    """Sends, rather than being read: an offer waits for exactly its engines, then all get the bytes together.

    The group with them is kept while the same engines take part, and made anew after a transfer broke. Versions lie in
    host memory that is reused, as the first touch of a page is far dearer than a copy.
    """

    def __init__(self, config: BroadcastConfig) -> None:
        """Nothing listens before the first offer."""
        self._config = config
        self._held: list[_Held] = []
        self._free: list[FlatSource] = []
        self._store: TCPStore | None = None
        self._sending: Sending | None = None
        self._sent: tuple[PolicyVersion, BroadcastSource] | None = None
        self._kept: Kept | None = None
        self._over: BroadcastSource | None = None

    def hold(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors into free host memory."""
        flat = self._flat(layout_bytes(manifest))
        flat.hold(manifest, tensors)
        self.hold_source(manifest, flat, next(iter(tensors.values())).device)

    def hold_source(self, manifest: Manifest, source: BucketSource, device: torch.device) -> None:
        """Hold a version whose bytes are had from `source` until it is released; the trainer computes on `device`."""
        self._held.append(_Held(manifest=manifest, source=source, device=device))

    def offer(self, version: PolicyVersion, engines: Sequence[EngineId]) -> BroadcastSource:
        """Wait for these engines from now on, `stall_s` at most, and send. Returns at once."""
        held = next((held for held in self._held if held.manifest.version == version), None)
        if held is None:
            raise DeliveryError(f"{version.name} is not held; publish it again")
        self._give_up()
        if self._store is None:
            self._store = host_store(self._config.host)
        source = BroadcastSource(
            host=self._config.host,
            port=self._store.port,
            transfer=secrets.token_hex(16),
            ranks={engine: rank for rank, engine in enumerate(engines, start=1)},
            bucket_bytes=self._config.bucket_mb * _MB,
            stall_s=self._config.stall_s,
        )
        buckets = plan_buckets(held.manifest, source.bucket_bytes)
        self._sending = Sending(source, self._store, buckets, held.source, held.device, self._kept, self._config)
        self._sent, self._kept = (version, source), None
        return source

    def release(self, version: PolicyVersion) -> None:
        """Give up an offer of it, and keep the memory for a later version."""
        if self._sent is not None and self._sent[0] == version:
            self._give_up()
        for held in [held for held in self._held if held.manifest.version == version]:
            self._held.remove(held)
            held.source.close()
            if isinstance(held.source, FlatSource):
                self._free.append(held.source)

    def close(self) -> None:
        """End the offer, leave the group, close the store."""
        self._give_up()
        if self._kept is not None:
            self._kept.group.close()
        self._kept = self._store = self._over = None
        for held in self._held:
            held.source.close()
        self._held, self._free = [], []

    def _give_up(self) -> None:
        """End the last transfer, if it still runs, and take its group back."""
        if self._sending is None or self._sent is None or self._store is None:
            return
        self._kept = self._sending.give_up()
        if self._over is not None:  # not yet those of the last one: an engine may be about to read its verdict
            forget(PrefixStore(self._over.transfer, self._store), self._over.ranks.values())
        self._over = self._sent[1]
        self._sending = self._sent = None

    def _flat(self, size_bytes: int) -> FlatSource:
        while self._free:
            flat = self._free.pop()
            if len(flat.memory) == size_bytes:
                return flat
        try:
            return FlatSource(torch.from_numpy(host_block(size_bytes)))  # of zeros: padding travels too
        except MemoryError as error:
            raise DeliveryError(
                f"no {size_bytes / 1e6:.0f} MB of memory for a version ({error}); make room, or set sync.transport "
                "= 'disk'"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A version that can be offered."""

    manifest: Manifest
    source: BucketSource
    device: torch.device

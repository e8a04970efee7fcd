"""Sync: how weights reach the engines."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from fathom.config.families import CollectiveBackend, FabricKind, TransportKind
from fathom.config.section import Section


class BroadcastConfig(Section):
    """Weights by collectives over `torch.distributed`."""

    bucket_mb: int = Field(default=16, gt=0)
    """MB (2^20 bytes) of weights that travel in one broadcast; two are under way at once."""
    host: str = "127.0.0.1"
    """Address of the trainer at which engines meet it. Beyond loopback only where every host of the network is trusted:
    the collectives of torch neither encrypt nor authenticate."""
    stall_s: float = Field(default=10.0, gt=0)
    """A transfer that makes no progress for so long, for one engine, is broken off for all and begun again without it;
    two buckets must travel within it. Less than `sync.timeout_s`."""
    backend: CollectiveBackend = CollectiveBackend.AUTO
    """What carries it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.host in ("", "0.0.0.0", "::"):
            raise ValueError(f"engines cannot meet the trainer at host = '{self.host}'; name one of its addresses")
        return self


class ChainConfig(Section):
    """The chain of versions: every run keeps it, so that versions can be rebuilt bit for bit (`fathom weights`)."""

    store: str | None = Field(default=None, min_length=1)
    """A folder, or what fsspec reaches, e.g. `s3://bucket/prefix`; the chain lies in a folder of the run's name in it.
    Credentials come from that backend's environment, never from here. None: the run's own folder."""
    budget_mb: int = Field(default=1024, ge=0)
    """MB (2^20 bytes) that the chain may take; the oldest versions are dropped. 0: no chain is kept."""
    keep_steps: int = Field(default=0, ge=0)
    """Versions of so many last steps are kept even over the budget; never fewer than
    `staleness.max_staleness + staleness.publish_every`."""
    anchor_every: int = Field(default=20, gt=0)
    """Versions told by what changed before all of one is written again."""
    level: int = Field(default=1, ge=1, le=19)
    """Compression level of zstd."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        scheme, separator, place = (self.store or "").partition("://")
        if separator and "@" in place.partition("/")[0]:
            raise ValueError("store must not hold credentials; give them to the backend by its environment")
        if separator and scheme == "memory":
            raise ValueError("store = 'memory://...' is seen by one process only; name a folder or an object store")
        return self


class PeerConfig(Section):
    """Weights written into each engine's memory by those who hold them."""

    fabric: FabricKind = FabricKind.NIXL
    """What writes."""
    host: str = "127.0.0.1"
    """Address of the trainer at which engines ask. Beyond loopback only where every host of the network is trusted:
    fabrics neither encrypt nor authenticate."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port at which engines ask. 0: any free one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.host in ("", "0.0.0.0", "::"):
            raise ValueError(f"engines cannot reach the trainer at host = '{self.host}'; name one of its addresses")
        return self


class SyncConfig(Section):
    """How weights reach the engine."""

    transport: TransportKind = TransportKind.SHARED
    """The transport."""
    min_engines: int = Field(default=1, gt=0)
    """A publication needs at least this many engines to commit; at most `engine.count`."""
    broadcast: BroadcastConfig | None = None
    """Of `transport = "broadcast"` only. None: its defaults."""
    p2p: PeerConfig | None = None
    """Of `transport = "p2p"` only. None: its defaults."""
    chain: ChainConfig = ChainConfig()
    """The chain of versions, whatever the transport."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of each phase."""
    gap_rows: int = Field(default=4, ge=0)
    """Recorded rows scored by engine and trainer at each publication (the same-version gap). 0: not measured."""
    probe_tolerance: float | None = Field(default=None, gt=0)
    """Nats, on average, by which an engine that cannot digest the memory it computes with may differ from the trainer
    when it is probed at each commit. None: 0.001 in float32, 0.15 in bfloat16."""

    @model_validator(mode="after")
    def _check_p2p(self) -> Self:
        if self.p2p is not None and self.transport is not TransportKind.P2P:
            raise ValueError(f"sync.p2p changes nothing with sync.transport = '{self.transport}'; remove it")
        return self

    @model_validator(mode="after")
    def _check_chain(self) -> Self:
        if self.transport is TransportKind.DELTA and self.chain.budget_mb == 0:
            raise ValueError(
                "sync.transport = 'delta' travels through the chain of versions, but sync.chain.budget_mb = 0 keeps "
                "none; raise it, or choose another transport"
            )
        return self

    @model_validator(mode="after")
    def _check_broadcast(self) -> Self:
        if self.transport is not TransportKind.BROADCAST:
            if self.broadcast is not None:
                raise ValueError(f"sync.broadcast changes nothing with sync.transport = '{self.transport}'; remove it")
            return self
        stall_s = (self.broadcast or BroadcastConfig()).stall_s
        if stall_s >= self.timeout_s:
            raise ValueError(
                f"sync.broadcast.stall_s = {stall_s:g} must be less than sync.timeout_s = {self.timeout_s:g}, so that "
                "an engine that stalls is left out in time; lower the one or raise the other"
            )
        return self

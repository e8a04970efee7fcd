"""A publication: what a version of the weights consists of, so that every engine can prove what it holds."""

from __future__ import annotations

import msgspec

from fathom.core.adapter import AdapterIdentity
from fathom.core.ids import EngineId, PolicyVersion


class TensorFormat(msgspec.Struct, frozen=True, tag="format.1"):
    """How a tensor is coded that does not go out as the trainer cast it."""

    name: str
    """The format: `int8_rows`, ..."""
    dtype: str
    """Element type that the trainer cast it to, before it was coded."""
    scales: tuple[str, ...]
    """Tensors of the same manifest that hold its scales, in the order that the format defines."""


class TensorEntry(msgspec.Struct, frozen=True, tag="tensor.2"):
    """One published tensor, after the cast, tied names resolved to one."""

    name: str
    """Canonical parameter name."""
    dtype: str
    """Element type as safetensors writes it: `F32`, `BF16`, ..."""
    shape: tuple[int, ...]
    """Sizes of the dimensions."""
    offset: int
    """First byte of the tensor in the publication's flat layout."""
    size_bytes: int
    """Number of bytes."""
    checksum: str
    """BLAKE3 (hex) of the bytes."""
    format: TensorFormat | None = None
    """How it is coded. None: it is as the trainer cast it, or it holds scales."""


class Manifest(msgspec.Struct, frozen=True, tag="manifest.2"):
    """One version made available."""

    version: PolicyVersion
    """The version published; its digest is the root digest of `tensors`."""
    parent: PolicyVersion | None
    """The version published before it. None: the first publication of this incarnation."""
    tensors: tuple[TensorEntry, ...]
    """Every published tensor, ordered by name."""
    cast_digest: str | None = None
    """Root digest (hex) of the trainer's cast, of which a quantiser made these tensors: the digest of the step. None:
    nothing was coded, it is that of the version."""
    adapter: AdapterIdentity | None = None
    """The LoRA adapter whose tensors these are, and the base that it is for. None: they are a whole model."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.size_bytes for entry in self.tensors)


class SharedMemorySource(msgspec.Struct, frozen=True, tag="source.shared.1"):
    """Bytes lie in a shared-memory file on the same host, in the manifest's layout."""

    path: str
    """File below /dev/shm (or the run's directory where there is none)."""


class DiskSource(msgspec.Struct, frozen=True, tag="source.disk.1"):
    """Bytes lie in a safetensors file."""

    path: str
    """The file."""


class BroadcastSource(msgspec.Struct, frozen=True, tag="source.broadcast.1"):
    """Bytes are broadcast to the engines of the offer once all of them are there. The contract on the wire is in
    `sync/transports/broadcast/roll_call.py`."""

    host: str
    """Address of the key-value store at which sender and engines meet."""
    port: int
    """Its port."""
    transfer: str
    """Unguessable name of this transfer."""
    ranks: dict[EngineId, int]
    """Each engine's rank in the group, from 1; the sender is 0."""
    bucket_bytes: int
    """At most so many bytes travel in one broadcast."""
    stall_s: float
    """A transfer that makes no progress for so long is broken off."""


class DeltaSource(msgspec.Struct, frozen=True, tag="source.delta.1"):
    """Bytes lie in a chain of versions: what changed since earlier ones, and now and then all of one."""

    store: str
    """Folder or URL of the chain."""
    version: PolicyVersion
    """The version in it."""


class PeerShard(msgspec.Struct, frozen=True, tag="peer_shard.1"):
    """What one source rank holds of one tensor."""

    name: str
    """The tensor."""
    bounds: tuple[tuple[int, int], ...]
    """Per dimension: the first index and the one after the last."""


class PeerRank(msgspec.Struct, frozen=True, tag="peer_rank.1"):
    """One source rank: a process that writes from its memory into that of engines."""

    host: str
    """Address of its control socket."""
    port: int
    """Its port."""
    token: str
    """Unguessable; who knows it may have the version written into memory of its own."""
    shards: tuple[PeerShard, ...] | None
    """What it holds. None: every tensor, whole."""


class PeerSource(msgspec.Struct, frozen=True, tag="source.peer.1"):
    """Bytes are written into the memory of each engine rank that asks for them, by the source ranks that hold them."""

    fabric: str
    """What writes: `nixl`, `mooncake`, ..."""
    engines: tuple[EngineId, ...]
    """The engines that may ask, in the order in which sources are assigned to them."""
    ranks: tuple[PeerRank, ...]
    """The source ranks. Together they hold every tensor."""
    timeout_s: float
    """An engine rank that has not received everything by then gives up."""


WeightSource = SharedMemorySource | DiskSource | BroadcastSource | PeerSource | DeltaSource

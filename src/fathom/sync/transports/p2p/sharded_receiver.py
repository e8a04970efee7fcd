"""The weight half of an engine of several ranks, each of which holds slices in memory of its own, in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import final

import msgspec
import numpy as np
import torch
from torch import Tensor

from fathom.config.families import TransportKind
from fathom.core.errors import EngineError, EngineRefusedError
from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, PeerSource, TensorEntry, WeightSource
from fathom.core.ports.engine import (
    Capabilities,
    CommitReport,
    DigestKind,
    ReceivesInto,
    ScoreRequest,
    ScoreResult,
    StageReport,
    VerifyReport,
)
from fathom.core.records.sampling import InFlightMode
from fathom.sync.digest import byte_view, checksum, root_digest
from fathom.sync.held import check_fit, host_room
from fathom.sync.quantise.formats import check_known
from fathom.sync.shards import Box, uncovered
from fathom.sync.transports.p2p.held import Slice, byte_array, byte_index, item_bytes
from fathom.sync.transports.p2p.landing import Landing

Slices = Mapping[str, Slice]
"""What one rank holds, by tensor."""


@final
class ShardedReceiver:
    """One engine to the publisher. Each rank receives what it needs, and nothing else; then all ranks commit together.

    It digests whole tensors, put together from what lies in the ranks' memory, so that the root digest is that of the
    manifest and every byte of every rank counts. Ranks on several hosts could not without moving everything again.
    """

    def __init__(
        self,
        engine_id: EngineId,
        template: Mapping[str, Tensor],
        layout: Sequence[Mapping[str, Box]],
        receives_into: ReceivesInto = ReceivesInto.STAGING,
    ) -> None:
        """Each rank holds slices of the template's tensors as `layout` says; nothing serves yet.

        Raises:
            ValueError: a part of a tensor is held by no rank.
        """
        for name, tensor in template.items():
            gap = uncovered(Box.whole(tensor.shape), [rank[name] for rank in layout if name in rank])
            if gap is not None:
                raise ValueError(f"no rank of {engine_id} holds {gap.bounds} of {name!r}; complete the layout")
        self._id = engine_id
        self._form = {name: torch.empty_like(tensor, device="meta") for name, tensor in template.items()}
        self._landings = [Landing(engine_id, rank, len(layout)) for rank in range(len(layout))]
        self._serving = [_slices(template, rank) for rank in layout]
        self._live = receives_into is ReceivesInto.LIVE
        self._staging = self._serving if self._live else [_slices(template, rank) for rank in layout]
        self._version: PolicyVersion | None = None
        self._staged: Manifest | None = None
        self._receiving = asyncio.Lock()
        self._paused_at_s: float | None = None
        self.rank_bytes: tuple[int, ...] = ()
        """Bytes that each rank received at the last stage."""

    @property
    def id(self) -> EngineId:
        """Its name in records."""
        return self._id

    @property
    def capabilities(self) -> Capabilities:
        """It generates nothing, and receives slices."""
        return Capabilities(
            kept_sets=False,
            routes=False,
            kv_versions=False,
            raw_logprobs=False,
            barriers=False,
            pinned_versions=False,
            double_buffered=not self._live,
            receives_into=ReceivesInto.LIVE if self._live else ReceivesInto.STAGING,
            in_flight=frozenset(InFlightMode),
            transports=frozenset({TransportKind.P2P}),
            digest=DigestKind.MEMORY,
            max_context_tokens=0,
        )

    @property
    def version(self) -> PolicyVersion | None:
        """What serves. None: no weights yet, or it is paused while it receives over them."""
        return self._version

    @property
    def weights(self) -> Sequence[Slices]:
        """By rank, the slices that serve."""
        return self._serving

    async def stage(self, manifest: Manifest, source: WeightSource) -> StageReport:
        """Receive into the slices that do not serve, all ranks at once.

        Raises:
            PayloadError: the version does not fit.
            EngineRefusedError: it is not sent by peers.
            EngineError: a rank did not receive all of it. Names the ranks on both sides and the tensor.
        """
        started = time.perf_counter()
        if not isinstance(source, PeerSource):
            raise EngineRefusedError(self._id, "its ranks receive slices; set sync.transport = 'p2p'")
        async with self._receiving:
            self._staged = None
            check_fit(manifest, self._form)
            check_known(manifest, {})
            if self._live and self._version is not None:
                self._version, self._paused_at_s = None, time.perf_counter()
            self.rank_bytes = await self._receive(manifest, source)
            self._staged = manifest
        return StageReport(
            size_bytes=manifest.size_bytes,
            moved_bytes=sum(self.rank_bytes),
            receive_s=time.perf_counter() - started,
        )

    async def verify(self) -> VerifyReport:
        """Digest what the ranks hold; name the tensors that differ from the manifest, or between ranks."""
        started = time.perf_counter()
        manifest = self._require_staged()
        found = await asyncio.to_thread(lambda: [_found(entry, self._staging) for entry in manifest.tensors])
        return VerifyReport(
            digest=root_digest(found),
            kind=DigestKind.MEMORY,
            verify_s=time.perf_counter() - started,
            wrong=tuple(own.name for own, entry in zip(found, manifest.tensors, strict=True) if own != entry),
        )

    async def commit(self, version: PolicyVersion, mode: InFlightMode) -> CommitReport:
        """Swap, all ranks at once. Raises `EngineError` on another version."""
        if self._require_staged().version != version:
            raise EngineError(self._id, f"asked to commit {version.name}, but another one is staged; stage it first")
        self._serving, self._staging = self._staging, self._serving
        self._version, self._staged = version, None
        pause_s = 0.0 if self._paused_at_s is None else time.perf_counter() - self._paused_at_s
        self._paused_at_s = None
        return CommitReport(version=version, pause_s=pause_s, running=0)

    async def rollback(self) -> None:
        """Forget what is staged."""
        self._staged = None

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Refused: it holds tensors, not a model."""
        raise EngineRefusedError(self._id, "it has no model to score with")

    def close(self) -> None:
        """Let go of what was registered. Idempotent."""
        for landing in self._landings:
            landing.close()

    async def _receive(self, manifest: Manifest, source: PeerSource) -> tuple[int, ...]:
        """A thread for each rank. When one fails the others give up; none writes any more when this raises."""
        given_up = threading.Event()

        async def one(landing: Landing, slices: Slices) -> int:
            try:
                return await asyncio.to_thread(landing.receive, source, manifest, slices, given_up.is_set)
            except BaseException:
                given_up.set()
                raise

        ranks = [
            asyncio.create_task(one(landing, slices))
            for landing, slices in zip(self._landings, self._staging, strict=True)
        ]
        try:
            await asyncio.wait(ranks)
        except asyncio.CancelledError:
            given_up.set()
            await asyncio.wait(ranks)
            raise
        finally:
            failures = [failure for rank in ranks if rank.done() and (failure := rank.exception()) is not None]
        if failures:
            raise failures[0]
        return tuple(rank.result() for rank in ranks)

    def _require_staged(self) -> Manifest:
        if self._staged is None:
            raise EngineError(self._id, "nothing is staged; call stage first")
        return self._staged


def _slices(template: Mapping[str, Tensor], layout: Mapping[str, Box]) -> Slices:
    room = host_room({name: (template[name].dtype, box.shape) for name, box in layout.items()})
    return {name: Slice(box=box, tensor=room[name]) for name, box in layout.items()}


def _found(entry: TensorEntry, ranks: Sequence[Slices]) -> TensorEntry:
    """What the ranks hold of a tensor, described. Its checksum is empty where two hold the same part differently."""
    whole, item = Box.whole(entry.shape), item_bytes(entry)
    memory = torch.empty(entry.size_bytes, dtype=torch.uint8)
    tensor = byte_array(memory, whole, item)
    seen: list[Box] = []
    for held in [rank[entry.name] for rank in ranks if entry.name in rank]:
        part = byte_array(byte_view(held.tensor), held.box, item)
        for common in filter(None, [held.box.intersect(other) for other in seen]):
            if not np.array_equal(tensor[byte_index(common, item)], part[byte_index(common.within(held.box), item)]):
                return msgspec.structs.replace(entry, checksum="")
        tensor[byte_index(held.box, item)] = part
        seen.append(held.box)
    return msgspec.structs.replace(entry, checksum=checksum(memory))

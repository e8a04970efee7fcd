"""A receiving rank: registers its memory, asks the sources for what it needs, and waits until it has been written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import final

import torch
from torch import Tensor

from fathom.config.families import FabricKind
from fathom.core.errors import EngineError, PayloadError
from fathom.core.ids import EngineId
from fathom.core.manifest import Manifest, PeerRank, PeerShard, PeerSource
from fathom.sync.digest import byte_view, checksum, few
from fathom.sync.shards import Box
from fathom.sync.transports.p2p.asking import Asking, BrokenTransferError
from fathom.sync.transports.p2p.fabrics import FABRICS
from fathom.sync.transports.p2p.fabrics.fabric import Fabric, FabricError, Region, Stop, joined_regions, overlap
from fathom.sync.transports.p2p.held import Slice, address, byte_array, byte_index, region
from fathom.sync.transports.p2p.messages import Ask, Place
from fathom.sync.transports.p2p.plan import Holding, Piece, Wanted, pieces, team
from fathom.sync.transports.reception import Reception

_NAMING_S = 2.0
"""So long the tensor that did not arrive is looked for."""
_STOP_S = 10.0
_KEPT_SETS = 3
"""Sets of tensors that stay registered: two that alternate, and one more while a pinned version keeps one from use."""


@final
class Landing:
    """Memory of one rank of an engine. Receives one version at a time.

    What is registered stays so, and alive, from one version to the next. After a failure all is set up anew.
    """

    def __init__(
        self,
        engine: EngineId,
        rank: int = 0,
        ranks: int = 1,
        fabrics: Mapping[FabricKind, Callable[[str], Fabric]] = FABRICS,
        stop_s: float = _STOP_S,
    ) -> None:
        """Rank `rank` of `ranks` of an engine; `fabrics` are opened as sources ask for them.

        A source may take `stop_s` to confirm that it stopped. Where one does not, this memory is not used again.
        """
        self._engine = engine
        self._rank, self._ranks = rank, ranks
        self._fabrics = fabrics
        self._fabric: Fabric | None = None
        self._opened_as: tuple[str, str] | None = None
        self._sets: dict[_Memory, _Registered] = {}
        self._planned: tuple[_Question, list[Piece]] | None = None
        self._scratch: Tensor | None = None
        self._stop_s = stop_s
        self._spoiled = False

    def read(self, source: PeerSource, reception: Reception) -> int:
        """Receive whole tensors. As `receive`."""
        whole = {name: Slice(box=Box.whole(tensor.shape), tensor=tensor) for name, tensor in reception.into.items()}
        return self.receive(source, reception.manifest, whole, reception.given_up.is_set)

    def receive(
        self, source: PeerSource, manifest: Manifest, slices: Mapping[str, Slice], given_up: Callable[[], bool]
    ) -> int:
        """Overwrite `slices` (contiguous, of the manifest's tensors) with a version; returns the bytes written here.

        Once `given_up` is true it returns soon, whatever was written.

        Raises:
            PayloadError: the version is not what the sources hold, or nobody holds a part of it.
            EngineError: the transfer failed. Names the source rank and a tensor that is not whole.
        """
        if self._spoiled:
            reason = "a source did not confirm that it stopped writing into this memory; replace the engine"
            raise EngineError(self._engine, reason)
        deadline, asking = time.monotonic() + source.timeout_s, Asking(self._stop_s)

        def stop() -> str | None:
            if given_up():
                return "nobody waits for it any more"
            late = time.monotonic() > deadline
            return f"not everything was written within {source.timeout_s:g} s" if late else None

        try:
            plan = self._plan(source, manifest, slices)
            scratched = self._begin(asking, source, manifest, slices, plan, stop)
            moved_bytes = asking.wait(self._progress, stop)
            _unpack(scratched, slices)
            return moved_bytes
        except BrokenTransferError as error:
            self._drop(asking)
            if given_up():
                return 0
            if error.payload:
                raise PayloadError(error.reason) from error
            what = _missing(error.suspects, manifest, slices)
            raise EngineError(self._engine, f"rank {self._rank}{what}: {error.reason}") from error
        except FabricError as error:
            self._drop(asking)
            raise EngineError(self._engine, f"rank {self._rank}: {error.reason}") from error
        except BaseException:
            self._drop(asking)
            raise

    def close(self) -> None:
        """Unregister everything. Idempotent."""
        if self._fabric is not None:
            self._fabric.close()
        self._fabric = self._scratch = None
        self._sets.clear()

    def _plan(self, source: PeerSource, manifest: Manifest, slices: Mapping[str, Slice]) -> list[Piece]:
        """Who sends what, by source."""
        if self._engine not in source.engines:
            raise EngineError(self._engine, f"{manifest.version.name} is not offered to it; stage it anew")
        number = source.engines.index(self._engine)
        preferred = team(len(source.ranks), len(source.engines), self._ranks, number, self._rank)
        wanted = tuple(
            Wanted(name=name, box=slices[name].box, item_bytes=slices[name].tensor.element_size())
            for name in sorted(slices)  # as sources lay them out, so that neighbours there are neighbours here
        )
        question: _Question = (wanted, preferred, tuple(rank.shards for rank in source.ranks))
        if self._planned is None or self._planned[0] != question:  # a version is asked for as the one before was
            holdings = [_holding(rank) for rank in source.ranks]
            plan = sorted(pieces(wanted, holdings, preferred), key=lambda piece: piece.source)
            self._planned = (question, plan)
        return self._planned[1]

    def _begin(
        self,
        asking: Asking,
        source: PeerSource,
        manifest: Manifest,
        slices: Mapping[str, Slice],
        plan: Sequence[Piece],
        stop: Stop,
    ) -> list[_Scratched]:
        """Register what has to be, and ask; returns what will have to be unpacked."""
        by_source = {number: list(group) for number, group in groupby(plan, key=lambda piece: piece.source)}
        if (reason := stop()) is not None:
            raise BrokenTransferError(reason)
        hosts = [asking.connect(number, source.ranks[number], parts) for number, parts in by_source.items()]
        if not hosts:
            return []
        fabric = self._open(source.fabric, hosts[0])
        registered = self._register(fabric, slices)
        if registered.plan is not plan:
            places, scratched = self._place(fabric, slices, plan)
            if not scratched:  # else where they are may change
                registered.plan, registered.places = plan, places
        else:
            places, scratched = registered.places, []
        description = fabric.describe()
        for number in by_source:
            message = Ask(
                engine=self._engine,
                rank=self._rank,
                version=manifest.version,
                fabric=description,
                places=tuple(place for piece, place in zip(plan, places, strict=True) if piece.source == number),
            )
            asking.ask(number, message)
        return scratched

    def _open(self, fabric: str, host: str) -> Fabric:
        if self._fabric is None or self._opened_as != (fabric, host):
            self.close()
            self._fabric, self._opened_as = self._fabrics[FabricKind(fabric)](host), (fabric, host)
        return self._fabric

    def _register(self, fabric: Fabric, slices: Mapping[str, Slice]) -> _Registered:
        """Register the memory of `slices`, unless it is. The oldest of too many sets is let go."""
        ordered = [slices[name].tensor for name in sorted(slices)]
        tensors = [tensor for tensor in ordered if tensor.device.type == "cpu" and tensor.numel()]
        memory: _Memory = tuple((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
        if memory in self._sets:
            self._sets[memory] = self._sets.pop(memory)  # the newest
            return self._sets[memory]
        regions = joined_regions([Region(*each) for each in memory])
        stale = [known for known, each in self._sets.items() if overlap(each.regions, regions)]
        for known in [*stale, *list(self._sets)[: len(self._sets) - _KEPT_SETS + 1]]:
            gone = self._sets.pop(known, None)
            if gone is not None and gone.regions:
                fabric.unregister(gone.regions)
        if regions:
            fabric.register(regions)
        self._sets[memory] = _Registered(regions=regions, tensors=tensors)
        return self._sets[memory]

    def _place(
        self, fabric: Fabric, slices: Mapping[str, Slice], plan: Sequence[Piece]
    ) -> tuple[list[Place], list[_Scratched]]:
        """Where each piece goes: right into its tensor where it lies there in one piece, else into scratch memory."""
        direct: list[int | None] = []
        for piece in plan:
            into = slices[piece.name]
            reachable = into.tensor.device.type == "cpu"
            first = address(piece.box, into.box, into.tensor.data_ptr(), into.tensor.element_size())
            direct.append(first if reachable else None)
        sizes = [0 if first is not None else piece.size_bytes for piece, first in zip(plan, direct, strict=True)]
        scratch = self._scratch_of(fabric, sum(sizes))
        places: list[Place] = []
        scratched: list[_Scratched] = []
        used = 0
        for piece, first, size_bytes in zip(plan, direct, sizes, strict=True):
            if first is None:
                part = scratch[used : used + size_bytes]
                scratched.append(_Scratched(piece=piece, memory=part))
                first, used = part.data_ptr(), used + size_bytes
            places.append(Place(piece.name, piece.box, first))
        return places, scratched

    def _scratch_of(self, fabric: Fabric, size_bytes: int) -> Tensor:
        """uint8 [at least size_bytes], registered unless it is empty."""
        if self._scratch is None or self._scratch.numel() < size_bytes:
            if self._scratch is not None and self._scratch.numel():
                fabric.unregister([region(self._scratch)])
            self._scratch = torch.empty(size_bytes, dtype=torch.uint8)
            if size_bytes:
                fabric.register([region(self._scratch)])
        return self._scratch

    def _progress(self) -> None:
        if self._fabric is not None:
            self._fabric.progress()

    def _drop(self, asking: Asking) -> None:
        """Afterwards nothing writes into the memory, or it is never used again."""
        if not asking.halt(self._progress):
            self._spoiled = True
        self.close()


_Memory = tuple[tuple[int, int], ...]
"""Address and bytes of each tensor of a set."""


@dataclass(slots=True, kw_only=True)
class _Registered:
    """A set of tensors that stays registered, and alive."""

    regions: tuple[Region, ...]
    tensors: list[Tensor]
    plan: Sequence[Piece] | None = None
    """By which it was received last, if all lands in place."""
    places: list[Place] = field(default_factory=list[Place])
    """Where the pieces of `plan` go."""


_Question = tuple[tuple[Wanted, ...], tuple[int, ...], tuple[tuple[PeerShard, ...] | None, ...]]
"""What a plan follows from: what is wanted, who is preferred, and what each source holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scratched:
    """A piece that did not land in place."""

    piece: Piece
    memory: Tensor


def _unpack(scratched: Sequence[_Scratched], slices: Mapping[str, Slice]) -> None:
    for part in scratched:
        into = slices[part.piece.name]
        item = into.tensor.element_size()
        index = byte_index(part.piece.box.within(into.box), item)
        if into.tensor.device.type == "cpu":
            place = byte_array(byte_view(into.tensor), into.box, item)[index]
            place[...] = part.memory.numpy().reshape(place.shape)
        else:
            *outer, last = into.box.shape or (1,)
            target = byte_view(into.tensor).reshape(*outer, last * item)[index]
            target.copy_(part.memory.reshape(target.shape))


def _holding(rank: PeerRank) -> Holding:
    return None if rank.shards is None else {shard.name: Box(shard.bounds) for shard in rank.shards}


def _missing(suspects: Sequence[str], manifest: Manifest, slices: Mapping[str, Slice]) -> str:
    """Names what did not arrive. Of several suspects the first that is not whole, where its checksum is known."""
    if len(suspects) > 1:
        until = time.monotonic() + _NAMING_S
        entries = [entry for entry in manifest.tensors if entry.name in set(suspects)]
        for entry in entries:
            held = slices.get(entry.name)
            if held is None or held.box.shape != entry.shape or time.monotonic() > until:
                break
            if checksum(held.tensor) != entry.checksum:
                suspects = [entry.name]
                break
    match len(suspects):
        case 0:
            return ""
        case 1:
            return f" did not receive tensor {suspects[0]!r} whole"
        case _:
            return f" did not receive one of the tensors {few(suspects)} whole"

"""A version that is spread over several trainer ranks, gathered bucket by bucket at the root and never whole.

Each trainer rank holds boxes of tensors: FSDP shards, tensor-parallel slices, a pipeline stage's own tensors. All ranks
know the whole layout, so all know which bytes of a bucket come from whom. The root asks the ranks that have some for
them, bucket by bucket, and puts them together; it has memory for two buckets and for what one rank sends of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import Work

from fathom.core.errors import DeliveryError, PayloadError
from fathom.core.manifest import Manifest
from fathom.sync.digest import byte_view
from fathom.sync.shards import Box, Shard, span_boxes
from fathom.sync.transports.broadcast.buckets import Bucket, Piece, plan_buckets

_END = -1
_UNTIL_ASKED = timedelta(days=7)
"""A rank waits for the root's next request while the run trains and generates; the root's end breaks the wait."""
_WORDS: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Elements are moved as words of their size."""

Words = NDArray[np.unsignedinteger]


class TrainerRanks(Protocol):
    """A Gloo group of the trainer's ranks, as torch makes it. The root is rank 0."""

    def rank(self) -> int:
        """This one."""
        ...

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Work:  # noqa: N803 - torch's name
        """Begin to send."""
        ...

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Work:  # noqa: N803 - torch's name
        """Begin to receive."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank sends of one tensor: each element of a version is in one share of one rank."""

    name: str
    """The tensor."""
    box: Box
    """Which part of it."""
    shard: Box
    """The shard in whose memory it lies."""


def share_out(manifest: Manifest, layout: Sequence[Sequence[Shard]]) -> tuple[tuple[Share, ...], ...]:
    """Who sends what, by rank: what several ranks hold, the first of them sends.

    Raises:
        PayloadError: an element is held by no rank. Names the tensor.
    """
    shares: list[list[Share]] = [[] for _ in layout]
    holders: dict[str, list[tuple[int, Shard]]] = {}
    for rank, shards in enumerate(layout):
        for shard in shards:
            holders.setdefault(shard.name, []).append((rank, shard))
    for entry in manifest.tensors:
        whole = Box.whole(entry.shape)
        rest = [whole] if whole.elements else []
        for rank, shard in holders.get(entry.name, ()):
            taken = [common for box in rest if (common := box.intersect(shard.box)) is not None]
            shares[rank] += [Share(name=entry.name, box=box, shard=shard.box) for box in taken]
            rest = [left for box in rest for left in box.without(shard.box)]
        if rest:
            raise PayloadError(
                f"elements {rest[0].bounds} of tensor {entry.name!r} are held by no trainer rank; check the layout"
            )
    return tuple(map(tuple, shares))


@final
class GatheredSource:
    """The root's side: a `BucketSource`."""

    def __init__(
        self,
        manifest: Manifest,
        layout: Sequence[Sequence[Shard]],
        mine: Mapping[Shard, Tensor],
        ranks: TrainerRanks,
        tag: int,
        bucket_bytes: int,
        within_s: float,
    ) -> None:
        """Ask nobody yet.

        Args:
            manifest: what is sent.
            layout: the shards of every trainer rank, the root's first.
            mine: contiguous tensors on the host, by shard; they must not change before `close`.
            ranks: the trainer's ranks. Each of the others calls `serve_shards` for this version.
            tag: of this version's messages; two versions that are held at once have different ones.
            bucket_bytes: as the transport's.
            within_s: how soon a rank must have sent what it was asked for.

        Raises:
            PayloadError: an element is held by no rank.
        """
        self._shares = [_Holding(shares) for shares in share_out(manifest, layout)]
        self._mine = _words(mine)
        self._ranks = ranks
        self._tag = tag
        self._within = timedelta(seconds=within_s)
        self._numbers = {bucket.start: number for number, bucket in enumerate(plan_buckets(manifest, bucket_bytes))}
        self._slots = [torch.zeros(bucket_bytes, dtype=torch.uint8) for _ in range(2)]
        self._mixed = torch.empty(bucket_bytes, dtype=torch.uint8)

    @property
    def buffer_bytes(self) -> int:
        """Memory that gathering takes on the root."""
        return sum(map(len, (*self._slots, self._mixed)))

    def fill(self, bucket: Bucket) -> Tensor:
        """See `BucketSource`."""
        self._slots.reverse()
        slot = self._slots[0][: bucket.size_bytes]
        cuts = [list(shares.cuts(bucket)) for shares in self._shares]
        senders = [rank for rank in range(1, len(cuts)) if cuts[rank]]
        try:
            for rank in senders:
                self._ask(rank, self._numbers[bucket.start])
            for cut in cuts[0]:
                cut.place(slot)[...] = cut.taken_from(self._mine)
            for rank in senders:
                self._receive(rank, cuts[rank], slot)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise DeliveryError(f"a trainer rank did not send its part of a bucket: {reason}") from error
        return slot

    def close(self) -> None:
        """Tell the other ranks that no more will be asked for. One that is gone is no matter any more."""
        for rank in range(1, len(self._shares)):
            try:
                self._ask(rank, _END)
            except RuntimeError:
                continue

    def _ask(self, rank: int, number: int) -> None:
        self._ranks.send([torch.tensor([number])], rank, self._tag).wait(self._within)

    def _receive(self, rank: int, cuts: Sequence[_Cut], slot: Tensor) -> None:
        """One message with all cuts of the rank; into their place at once, where they are one range of the bucket."""
        size_bytes = sum(cut.size_bytes for cut in cuts)
        if len(cuts) == 1 and cuts[0].place(slot).flags.c_contiguous:
            message = torch.from_numpy(cuts[0].place(slot).reshape(-1).view(np.uint8))
        else:
            message = self._mixed[:size_bytes]
        self._ranks.recv([message], rank, self._tag).wait(self._within)
        if message.data_ptr() != self._mixed.data_ptr():
            return
        first = 0
        for cut in cuts:
            place = cut.place(slot)
            place[...] = message[first : first + cut.size_bytes].numpy().view(place.dtype).reshape(place.shape)
            first += cut.size_bytes


def serve_shards(
    manifest: Manifest,
    layout: Sequence[Sequence[Shard]],
    mine: Mapping[Shard, Tensor],
    ranks: TrainerRanks,
    tag: int,
    bucket_bytes: int,
) -> None:
    """Send the root what it asks for, until it closes its source; arguments as of `GatheredSource`. Blocks.

    Raises:
        DeliveryError: the root is gone.
    """
    holding, words = _Holding(share_out(manifest, layout)[ranks.rank()]), _words(mine)
    buckets = plan_buckets(manifest, bucket_bytes)
    message = np.empty(bucket_bytes, dtype=np.uint8)
    request = torch.empty(1, dtype=torch.int64)
    try:
        while True:
            ranks.recv([request], 0, tag).wait(_UNTIL_ASKED)
            number = int(request)
            if number == _END:
                return
            first = 0
            for cut in holding.cuts(buckets[number]):
                part = cut.taken_from(words)
                message[first : first + cut.size_bytes].view(part.dtype)[:] = part.reshape(-1)
                first += cut.size_bytes
            ranks.send([torch.from_numpy(message[:first])], 0, tag).wait()
    except RuntimeError as error:
        raise DeliveryError(f"the root of the trainer is gone: {str(error).partition(chr(10))[0]}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Elements of one share in one bucket; they lie in one contiguous box of the tensor."""

    share: Share
    box: Box
    span: Box
    """The contiguous box."""
    first: int
    """Byte of the bucket at which that one begins."""
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.box.elements * self.item_bytes

    def place(self, bucket: Tensor) -> Words:
        """Its elements in the bucket's memory, in the shape of `box`."""
        span_bytes = self.span.elements * self.item_bytes
        words = bucket[self.first : self.first + span_bytes].numpy().view(_WORDS[self.item_bytes])
        return _part(words.reshape(self.span.shape), self.box, self.span)

    def taken_from(self, shards: Mapping[tuple[str, Box], Words]) -> Words:
        """Its elements in the rank's memory."""
        return _part(shards[self.share.name, self.share.shard], self.box, self.share.shard)


@final
class _Holding:
    """The shares of one rank."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self._by_name: dict[str, list[Share]] = {}
        for share in shares:
            self._by_name.setdefault(share.name, []).append(share)

    def cuts(self, bucket: Bucket) -> Iterator[_Cut]:
        """What this rank sends of a bucket, in the order of its message."""
        for piece in bucket.pieces:
            if piece.entry.name in self._by_name:
                yield from self._cut(bucket, piece)

    def _cut(self, bucket: Bucket, piece: Piece) -> Iterator[_Cut]:
        item_bytes = piece.entry.size_bytes // math.prod(piece.entry.shape)
        first = bucket.place(piece).start
        for span in span_boxes(piece.entry.shape, piece.start // item_bytes, piece.stop // item_bytes):
            for share in self._by_name[piece.entry.name]:
                if (box := share.box.intersect(span)) is not None:
                    yield _Cut(share=share, box=box, span=span, first=first, item_bytes=item_bytes)
            first += span.elements * item_bytes


def _part(words: Words, box: Box, outer: Box) -> Words:
    """A view, of a scalar too."""
    return words[(..., *box.within(outer).slices)]


def _words(tensors: Mapping[Shard, Tensor]) -> dict[tuple[str, Box], Words]:
    """Shards as arrays of words, in the shapes of their boxes; the memory is shared."""
    words: dict[tuple[str, Box], Words] = {}
    for shard, tensor in tensors.items():
        array = byte_view(tensor).numpy().view(_WORDS[tensor.element_size()]).reshape(shard.box.shape)
        words[shard.name, shard.box] = array
    return words

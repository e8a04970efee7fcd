"""Where the sender of a broadcast gets the bytes of a bucket from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, final

import torch
from torch import Tensor

from fathom.core.manifest import Manifest
from fathom.sync.digest import copy_bytes
from fathom.sync.transports.broadcast.buckets import Bucket


class BucketSource(Protocol):
    """A version that can be had bucket by bucket, again and again, until it is released."""

    def fill(self, bucket: Bucket) -> Tensor:
        """The bucket's bytes, uint8 [bucket.size_bytes], contiguous on the host.

        They stay until the next but one call: one bucket may be under way while the next is fetched. Blocks.

        Raises:
            DeliveryError: they cannot be had.
        """
        ...

    def close(self) -> None:
        """No bucket will be asked for any more."""
        ...


def layout_bytes(manifest: Manifest) -> int:
    """Size of the manifest's flat layout."""
    last = manifest.tensors[-1]
    return last.offset + last.size_bytes


@final
class FlatSource:
    """The whole version in host memory, in the manifest's layout. Buckets are views of it: nothing is copied."""

    def __init__(self, memory: Tensor) -> None:
        """`memory` is uint8 [size of the layout]."""
        self.memory = memory

    def hold(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite it with a version of its size."""
        for entry in manifest.tensors:
            place = self.memory[entry.offset : entry.offset + entry.size_bytes]
            copy_bytes(tensors[entry.name].detach().contiguous(), place)

    def fill(self, bucket: Bucket) -> Tensor:
        """See `BucketSource`."""
        return self.memory[bucket.start : bucket.stop]

    def close(self) -> None:
        """Keeps its memory, for another version."""


@final
class DeviceBuckets:
    """Buckets of a source on a GPU, two at a time."""

    def __init__(self, host: BucketSource, device: torch.device, bucket_bytes: int) -> None:
        """Takes the memory of two buckets on the device."""
        self._host = host
        self._slots = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._turns = 0

    def fill(self, bucket: Bucket) -> Tensor:
        """As `BucketSource.fill`, on the device."""
        slot = self._slots[self._turns % 2][: bucket.size_bytes]
        self._turns += 1
        slot.copy_(self._host.fill(bucket))
        return slot

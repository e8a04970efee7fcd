"""What a source rank holds: slices of a version, in registered memory that is used again for later versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from fathom.core.errors import DeliveryError, PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest, TensorEntry
from fathom.sync.digest import copy_bytes, dtype_name
from fathom.sync.held import host_block
from fathom.sync.shards import Box
from fathom.sync.transports.p2p.fabrics.fabric import Fabric, FabricError, Region

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Some part of a tensor, and memory for exactly that part."""

    box: Box
    """Which part."""
    tensor: Tensor
    """Its elements, of the box's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSlice:
    """Some part of a tensor in registered memory."""

    box: Box
    """Which part."""
    memory: Tensor
    """uint8 [its size], contiguous, row-major."""
    item_bytes: int
    """Bytes of one element."""

    def address(self, box: Box) -> int | None:
        """Where the bytes of `box`, a part of it, begin. None: they do not lie in one piece."""
        return address(box, self.box, self.memory.data_ptr(), self.item_bytes)

    def pack(self, box: Box, into: Tensor) -> None:
        """Copy the bytes of `box`, a part of it, into uint8 [its size], in row-major order of the box."""
        array = byte_array(self.memory, self.box, self.item_bytes)
        part = array[byte_index(box.within(self.box), self.item_bytes)]
        into.numpy().reshape(part.shape)[...] = part


def address(box: Box, outer: Box, start: int, item_bytes: int) -> int | None:
    """Where the elements of `box` begin in the memory of `outer` at `start`. None: they do not lie in one piece."""
    if box == outer:  # as most are
        return start
    runs = box.runs(outer)
    first, _ = next(runs)
    return None if next(runs, None) else start + first * item_bytes


def item_bytes(entry: TensorEntry) -> int:
    """Bytes of one element; of an empty tensor 1."""
    return max(1, entry.size_bytes // max(1, Box.whole(entry.shape).elements))


def byte_array(memory: Tensor, box: Box, item_bytes: int) -> np.ndarray:
    """Memory of a slice, on the CPU, as uint8 [*sizes but the last, last size * item_bytes], shared."""
    *outer, last = box.shape or (1,)
    return memory.numpy().reshape(*outer, last * item_bytes)


def byte_index(box: Box, item_bytes: int) -> tuple[slice, ...]:
    """How to index such an array with a box that counts from its first corner."""
    *outer, last = box.slices or (slice(0, 1),)
    return (*outer, slice(last.start * item_bytes, last.stop * item_bytes))


@final
class HeldVersions:
    """Versions of one source rank. With one delivered and the next on its way there are two buffers, used in turn."""

    def __init__(self, fabric: Fabric) -> None:
        """Buffers are registered with `fabric` once."""
        self._fabric = fabric
        self._buffers: list[_Buffer] = []

    def hold(self, manifest: Manifest, slices: Mapping[str, Slice]) -> None:
        """Copy slices of the manifest's tensors, one after the other by name.

        Raises:
            PayloadError: a slice is of no tensor of the manifest, or has another shape than its box.
            DeliveryError: there is no room.
        """
        entries = {entry.name: entry for entry in manifest.tensors}
        places: dict[str, slice] = {}
        end = 0
        for name, each in sorted(slices.items()):
            _check(name, each, entries)
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            end = start + each.tensor.numel() * each.tensor.element_size()
            places[name] = slice(start, end)
        buffer = self._free_buffer(max(1, end))
        buffer.version, buffer.slices = manifest.version, {}
        for name, place in places.items():
            memory = buffer.memory[place]
            copy_bytes(slices[name].tensor.detach().contiguous(), memory)
            buffer.slices[name] = HeldSlice(box=slices[name].box, memory=memory, item_bytes=item_bytes(entries[name]))

    def find(self, version: PolicyVersion) -> Mapping[str, HeldSlice]:
        """Its slices, by tensor. Raises `DeliveryError` when it is not held."""
        for buffer in self._buffers:
            if buffer.version == version:
                return buffer.slices
        raise DeliveryError(f"{version.name} is not held; publish it again")

    def release(self, version: PolicyVersion) -> None:
        """Its buffer may be used again."""
        for buffer in self._buffers:
            if buffer.version == version:
                buffer.version, buffer.slices = None, {}

    def close(self) -> None:
        """Drop all. The fabric is closed by its owner, before."""
        self._buffers.clear()

    def _free_buffer(self, size_bytes: int) -> _Buffer:
        for buffer in [buffer for buffer in self._buffers if buffer.version is None]:
            if buffer.memory.numel() == size_bytes:
                return buffer
            self._buffers.remove(buffer)
            self._fabric.unregister([region(buffer.memory)])
        self._buffers.append(_Buffer(memory=registered_memory(self._fabric, size_bytes), version=None, slices={}))
        return self._buffers[-1]


@dataclass(slots=True, kw_only=True)
class _Buffer:
    """`version` is what it holds; None: it is free."""

    memory: Tensor
    version: PolicyVersion | None
    slices: dict[str, HeldSlice]


def _check(name: str, held: Slice, entries: Mapping[str, TensorEntry]) -> None:
    entry = entries.get(name)
    if entry is None:
        raise PayloadError(f"tensor {name!r} is held, but not in the manifest; publish the same model")
    if (dtype_name(name, held.tensor), tuple(held.tensor.shape)) != (entry.dtype, held.box.shape):
        raise PayloadError(
            f"the slice of {name!r} to hold is {held.tensor.dtype} {tuple(held.tensor.shape)}, "
            f"not {entry.dtype} {held.box.shape} as said"
        )


def region(memory: Tensor) -> Region:
    """Where a contiguous tensor lies."""
    return Region(memory.data_ptr(), memory.numel() * memory.element_size())


def registered_memory(fabric: Fabric, size_bytes: int) -> Tensor:
    """uint8 [size_bytes], registered. Raises `DeliveryError` when there is none."""
    try:
        memory = torch.from_numpy(host_block(size_bytes))
        fabric.register([region(memory)])
    except (MemoryError, FabricError) as error:
        raise DeliveryError(
            f"no {size_bytes / 1e6:.0f} MB of memory to send weights from ({error}); make room, "
            "or set sync.transport = 'disk'"
        ) from error
    return memory

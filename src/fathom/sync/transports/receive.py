"""The engine's side of every transport: bytes of a version into the engine's own staging tensors."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import Iterator, Mapping

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fathom.core.errors import PayloadError
from fathom.core.manifest import DiskSource, Manifest, SharedMemorySource, TensorEntry, WeightSource
from fathom.core.ports.faults import Faults, NoFaults
from fathom.sync.digest import byte_view, copy_bytes, dtype_name, few

Pieces = Iterator[tuple[TensorEntry, Tensor]]
"""Each entry with its bytes as uint8 [size_bytes]; valid until the next one."""

_NO_FAULTS = NoFaults()


async def receive(
    source: WeightSource, manifest: Manifest, into: Mapping[str, Tensor], faults: Faults = _NO_FAULTS
) -> None:
    """Overwrite `into` (contiguous, any device) with the version in `source`. The copy runs in a thread.

    When this raises or is cancelled, `into` may hold anything and must not serve, but nothing writes there any more.
    What arrived is proven by `digest(into)` later. `faults` reaches `receive.before` and `receive.after`.

    Raises:
        PayloadError: a tensor is missing, unknown, of another shape or element type, or the source cannot be read as
            the manifest says. Names the tensor. Nothing was written when the names or forms do not fit.
    """
    check_fit(manifest, into)
    await faults.reach("receive.before")
    await _copy_in_thread(source, manifest, into)
    await faults.reach("receive.after")


def check_fit(manifest: Manifest, into: Mapping[str, Tensor]) -> None:
    """Raise `PayloadError` unless `into` has exactly the manifest's names, shapes and element types."""
    promised = {entry.name for entry in manifest.tensors}
    missing, unknown = sorted(into.keys() - promised), sorted(promised - into.keys())
    if missing or unknown:
        raise PayloadError(
            f"{manifest.version.name} does not fit the engine's model: without a value {few(missing)}, "
            f"without a place {few(unknown)}; publish the same model, tied names resolved to one"
        )
    for entry in manifest.tensors:
        tensor = into[entry.name]
        form, place = (entry.dtype, entry.shape), (dtype_name(entry.name, tensor), tuple(tensor.shape))
        if form != place:
            raise PayloadError(f"tensor {entry.name!r} is {form} in {manifest.version.name}, {place} in the engine")
        if not tensor.is_contiguous():
            raise PayloadError(f"tensor {entry.name!r} is not contiguous in the engine; stage into contiguous memory")


async def _copy_in_thread(source: WeightSource, manifest: Manifest, into: Mapping[str, Tensor]) -> None:
    given_up = threading.Event()
    copying = asyncio.create_task(asyncio.to_thread(_copy, source, manifest, into, given_up))
    try:
        await asyncio.shield(copying)
    except asyncio.CancelledError:
        given_up.set()
        await asyncio.wait([copying])  # a late write would spoil what is staged next
        raise


def _copy(source: WeightSource, manifest: Manifest, into: Mapping[str, Tensor], given_up: threading.Event) -> None:
    try:
        for entry, piece in _pieces(source, manifest):
            if given_up.is_set():
                return
            copy_bytes(piece, into[entry.name])
    except (OSError, SafetensorError) as error:
        raise PayloadError(f"{manifest.version.name} cannot be read from {source.path}: {error}") from error


def _pieces(source: WeightSource, manifest: Manifest) -> Pieces:
    match source:
        case SharedMemorySource(path):
            return _from_memory(path, manifest)
        case DiskSource(path):
            return _from_disk(path, manifest)


def _from_memory(path: str, manifest: Manifest) -> Pieces:
    last = manifest.tensors[-1]
    size_bytes = last.offset + last.size_bytes
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_size < size_bytes:
            raise PayloadError(f"{path} is shorter than {manifest.version.name}; publish it again")
        memory = torch.frombuffer(mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(descriptor)
    for entry in manifest.tensors:
        yield entry, memory[entry.offset : entry.offset + entry.size_bytes]


def _from_disk(path: str, manifest: Manifest) -> Pieces:
    with safe_open(path, framework="pt") as file:
        for entry in manifest.tensors:
            tensor = file.get_tensor(entry.name)
            if (dtype_name(entry.name, tensor), tuple(tensor.shape)) != (entry.dtype, entry.shape):
                raise PayloadError(f"tensor {entry.name!r} in {path} is not of the form its manifest says")
            yield entry, byte_view(tensor)

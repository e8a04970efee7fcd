"""A whole version in memory, and what a version must look like to fit a model's tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fathom.core.adapter import AdapterIdentity, why_another
from fathom.core.errors import PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest
from fathom.sync.digest import dtype_name, few
from fathom.sync.quantise.formats import check_scales

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A whole version in an engine's memory."""

    version: PolicyVersion
    """Which one."""
    tensors: Mapping[str, Tensor]
    """Its tensors. They do not change while a version is received."""


def host_block(size_bytes: int) -> np.ndarray:
    """uint8 [size_bytes], zeros, from a 64-byte boundary on, as torch's own memory begins.

    numpy asks the system for huge pages where it takes megabytes, which torch does not. The kernel copies from one
    process into another nearly twice as fast when it need not look up each 4 KiB of where they go.
    """
    memory = np.zeros(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + size_bytes]


def host_room(forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Tensors of zeros by element type and shape, in one block of memory, in the order of a manifest's layout.

    To torch each has a storage of its own, that shares nothing with the others.
    """
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name in sorted(forms):
        dtype, shape = forms[name]
        start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        end = start + math.prod(shape) * dtype.itemsize
        places[name] = start, end
    block = host_block(end)
    return {
        name: torch.from_numpy(block[slice(*places[name])]).view(dtype).view(shape)
        if math.prod(shape)
        else torch.zeros(shape, dtype=dtype)
        for name, (dtype, shape) in forms.items()
    }


def room_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Memory for another version of `tensors`, on the same devices, of zeros; see `host_room`."""
    on_host = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    room = host_room({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in on_host.items()})
    return {name: room[name] if name in room else torch.zeros_like(tensor) for name, tensor in tensors.items()}


def check_adapter(manifest: Manifest, adapter: AdapterIdentity | None) -> None:
    """Raise `PayloadError` unless the version is of the adapter that is computed with, None being the whole model."""
    if why := why_another(adapter, manifest.adapter):
        raise PayloadError(f"{manifest.version.name} is not for this engine: {why}")


def check_fit(manifest: Manifest, into: Mapping[str, Tensor]) -> None:
    """Raise `PayloadError` unless `into` has the manifest's names, shapes and element types; see `check_scales`."""
    entries = {entry.name: entry for entry in manifest.tensors}
    if len(entries) < len(manifest.tensors):
        names = [entry.name for entry in manifest.tensors]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise PayloadError(f"{manifest.version.name} has two tensors of the same name: {few(twice)}")
    promised = entries.keys()
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
    check_scales(entries)

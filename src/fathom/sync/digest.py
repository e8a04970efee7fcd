"""Digests: how trainer and engine prove to each other that they hold the same bytes.

The checksum of a tensor is BLAKE3 over its contiguous bytes. The root digest is BLAKE3 over one line per tensor,
ordered by name: the JSON array `[name, dtype, shape, checksum]` and a newline. So the root digest changes with any
byte, name, shape or element type, and does not depend on the order in which tensors are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from fathom.core.errors import PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest, TensorEntry

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Element types that can be published, as safetensors writes them."""

_ALIGNMENT_BYTES = 64


def digest(tensors: Mapping[str, Tensor], *, threads: int = 1) -> str:
    """Root digest (hex) of `tensors` as they lie in memory now."""
    return root_digest(layout(tensors, threads=threads))


def root_digest(entries: Iterable[TensorEntry]) -> str:
    """Root digest (hex) of a listing, whatever its order."""
    listing = blake3()
    for entry in sorted(entries, key=lambda entry: entry.name):
        listing.update(msgspec.json.encode((entry.name, entry.dtype, entry.shape, entry.checksum)) + b"\n")
    return listing.hexdigest()


def checksum(tensor: Tensor, *, threads: int = 1) -> str:
    """BLAKE3 (hex) of the tensor's contiguous bytes. No copy is made of a contiguous CPU tensor."""
    return blake3(byte_view(tensor.detach().cpu().contiguous()).numpy().data, max_threads=threads).hexdigest()


def copy_bytes(source: Tensor, into: Tensor) -> None:
    """Copy a contiguous tensor's bytes into another of that size.

    On CPUs without torch: in whichever thread torch copies much, it leaves a second team of OpenMP threads behind, and
    from then on all of the process's teams sleep between their regions instead of spinning, so that a decode step with
    two threads takes half as long again.
    """
    if source.device.type == into.device.type == "cpu":
        byte_view(into).numpy()[:] = byte_view(source).numpy()
    else:
        byte_view(into).copy_(byte_view(source))


def byte_view(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8 [size_bytes], shared with it."""
    if not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor has its bytes in order; call .contiguous() first")
    return tensor.detach().view(-1).view(torch.uint8)


def layout(tensors: Mapping[str, Tensor], *, threads: int = 1) -> tuple[TensorEntry, ...]:
    """One entry per tensor, ordered by name, laid one after the other at 64-byte boundaries.

    Raises:
        PayloadError: a tensor has an element type that cannot be published.
    """
    entries: list[TensorEntry] = []
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        size_bytes = tensor.numel() * tensor.element_size()
        entries.append(
            TensorEntry(
                name=name,
                dtype=dtype_name(name, tensor),
                shape=tuple(tensor.shape),
                offset=offset,
                size_bytes=size_bytes,
                checksum=checksum(tensor, threads=threads),
            )
        )
        offset += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return tuple(entries)


def dtype_name(name: str, tensor: Tensor) -> str:
    """Element type as safetensors writes it. Raises `PayloadError` naming the tensor when it has none."""
    if tensor.dtype not in DTYPE_NAMES:
        raise PayloadError(f"tensor {name!r} is {tensor.dtype}; publish one of {', '.join(DTYPE_NAMES.values())}")
    return DTYPE_NAMES[tensor.dtype]


def build_manifest(
    number: int, incarnation: int, parent: PolicyVersion | None, tensors: Mapping[str, Tensor], *, threads: int = 1
) -> Manifest:
    """Describe `tensors` (after the cast, tied names resolved to one) as the version `number` of `incarnation`.

    Raises:
        PayloadError: nothing to publish, an element type that cannot be, or two names for the same memory.
    """
    if not any(tensor.numel() for tensor in tensors.values()):
        raise PayloadError("there are no bytes to publish; pass the model's parameters after the cast")
    _refuse_tied(tensors)
    entries = layout(tensors, threads=threads)
    version = PolicyVersion(incarnation=incarnation, number=number, digest=root_digest(entries))
    return Manifest(version=version, parent=parent, tensors=entries)


def wrong_tensors(manifest: Manifest, held: Mapping[str, Tensor], *, threads: int = 1) -> tuple[str, ...]:
    """Names under which `held` differs from the manifest: missing, unknown, of another form or with other bytes."""
    promised = {entry.name: (entry.dtype, entry.shape, entry.checksum) for entry in manifest.tensors}
    found = {entry.name: (entry.dtype, entry.shape, entry.checksum) for entry in layout(held, threads=threads)}
    return tuple(sorted(name for name in promised | found if promised.get(name) != found.get(name)))


def few(names: Sequence[str]) -> str:
    """The first names of a listing and how many more there are, for messages."""
    return f"{list(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _refuse_tied(tensors: Mapping[str, Tensor]) -> None:
    owners: dict[tuple[torch.device, int], str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        owner = owners.setdefault((tensor.device, tensor.data_ptr()), name)
        if owner != name:
            raise PayloadError(f"{name!r} is tied to {owner!r}: publish one of them, so that no copy can go stale")

"""Digests: how trainer and engine prove to each other that they hold the same bytes.

The checksum of a tensor is BLAKE3 over its contiguous bytes. The root digest is BLAKE3 over one line per tensor,
ordered by name: the JSON array `[name, dtype, shape, checksum]` and a newline; of a tensor that is coded,
`[name, dtype, shape, checksum, [format, dtype before, [names of its scales]]]`. So the root digest changes with any
byte, name, shape, element type or format, and does not depend on the order in which tensors are given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from fathom.core.adapter import AdapterIdentity
from fathom.core.errors import PayloadError
from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest, TensorEntry, TensorFormat
from fathom.sync.quantise.formats import check_scales
from fathom.sync.tree_hash import tree_hashes

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

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_PLAIN: Mapping[str, TensorFormat] = {}
_ALIGNMENT_BYTES = 64
_TASK_BYTES, _LARGE_BYTES = 1 << 20, 1 << 26
"""A thread hashes so much at a time, because handing over costs too; all together hash a large one, which takes 0.1 ms
to begin."""

_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_READ = 0x100
"""`PyBUF_READ`."""


def digest(tensors: Mapping[str, Tensor], *, formats: Mapping[str, TensorFormat] = _PLAIN, threads: int = 1) -> str:
    """Root digest (hex) of `tensors` as they lie in memory now, coded as `formats` says, by name."""
    return root_digest(layout(tensors, formats=formats, threads=threads))


def root_digest(entries: Iterable[TensorEntry]) -> str:
    """Root digest (hex) of a listing, whatever its order."""
    listing = blake3()
    for entry in sorted(entries, key=lambda entry: entry.name):
        line = (entry.name, entry.dtype, entry.shape, entry.checksum)
        if entry.format is not None:
            line = (*line, (entry.format.name, entry.format.dtype, entry.format.scales))
        listing.update(msgspec.json.encode(line) + b"\n")
    return listing.hexdigest()


def checksum(tensor: Tensor, *, threads: int = 1) -> str:
    """BLAKE3 (hex) of the tensor's contiguous bytes. No copy is made of a contiguous tensor, wherever it lies."""
    return checksums([tensor], threads=threads)[0]


def checksums(tensors: Sequence[Tensor], *, threads: int = 1) -> list[str]:
    """BLAKE3 (hex) of each tensor's contiguous bytes, by `threads` threads. On a device it is computed there."""
    found = [""] * len(tensors)
    places: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(index)
    for device, indices in places.items():
        here = [tensors[index] for index in indices]
        hashes = _on_host(here, threads) if device.type == "cpu" else tree_hashes(here)
        for index, each in zip(indices, hashes, strict=True):
            found[index] = each
    return found


def copy_bytes(source: Tensor, into: Tensor) -> None:
    """Copy a contiguous tensor's bytes into another of that size.

    On CPUs without torch: in whichever thread torch copies much, it leaves a second team of OpenMP threads behind, and
    from then on all of the process's teams sleep between their regions instead of spinning, so that a decode step with
    two threads takes half as long again. And straight from address to address: an adapter has hundreds of small
    tensors, and views of both would take several times as long as their bytes.
    """
    if not source.device.type == into.device.type == "cpu":
        byte_view(into).copy_(byte_view(source))
        return
    _require_contiguous(source)
    _require_contiguous(into)
    size_bytes = source.nbytes
    if size_bytes != into.nbytes:
        raise ValueError(f"{size_bytes} bytes cannot be copied into {into.nbytes}; give tensors of the same size")
    ctypes.memmove(into.data_ptr(), source.data_ptr(), size_bytes)


def byte_view(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as uint8 [size_bytes], shared with it."""
    _require_contiguous(tensor)
    return tensor.detach().view(-1).view(torch.uint8)


def shaped(memory: Tensor, entry: TensorEntry) -> Tensor:
    """The tensor that uint8 [size_bytes] are, by its entry; the memory is shared.

    Raises:
        PayloadError: an element type that nothing is published in.
    """
    if entry.dtype not in _DTYPES:
        raise PayloadError(f"tensor {entry.name!r} is {entry.dtype}; known are {', '.join(_DTYPES)}")
    return memory.view(_DTYPES[entry.dtype]).view(entry.shape)


def layout(
    tensors: Mapping[str, Tensor], *, formats: Mapping[str, TensorFormat] = _PLAIN, threads: int = 1
) -> tuple[TensorEntry, ...]:
    """One entry per tensor, ordered by name, laid one after the other at 64-byte boundaries.

    Raises:
        PayloadError: a tensor has an element type that cannot be published.
    """
    entries: list[TensorEntry] = []
    offset = 0
    ordered = {name: tensors[name] for name in sorted(tensors)}
    dtypes = {name: dtype_name(name, tensor) for name, tensor in ordered.items()}
    hashes = checksums(list(ordered.values()), threads=threads)
    for (name, tensor), found in zip(ordered.items(), hashes, strict=True):
        size_bytes = tensor.nbytes
        entries.append(
            TensorEntry(
                name=name,
                dtype=dtypes[name],
                shape=tuple(tensor.shape),
                offset=offset,
                size_bytes=size_bytes,
                checksum=found,
                format=formats.get(name),
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
    number: int,
    incarnation: int,
    parent: PolicyVersion | None,
    tensors: Mapping[str, Tensor],
    *,
    formats: Mapping[str, TensorFormat] = _PLAIN,
    cast_digest: str | None = None,
    adapter: AdapterIdentity | None = None,
    entries: Sequence[TensorEntry] | None = None,
    threads: int = 1,
) -> Manifest:
    """Describe `tensors` (after the cast, tied names resolved to one) as the version `number` of `incarnation`.

    `formats`: how tensors are coded, by name. `cast_digest` and `adapter`: see `Manifest`. `entries`: the `layout` of
    `tensors`; None: not known yet.

    Raises:
        PayloadError: nothing to publish, an element type that cannot be, two names for the same memory, or scales that
            do not belong to what they are said to.
    """
    if not any(tensor.numel() for tensor in tensors.values()):
        raise PayloadError("there are no bytes to publish; pass the model's parameters after the cast")
    _refuse_tied(tensors)
    listing = layout(tensors, formats=formats, threads=threads) if entries is None else tuple(entries)
    forms = {name: (dtype_name(name, tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    if forms != {entry.name: (entry.dtype, entry.shape) for entry in listing}:
        raise PayloadError("the entries are of other tensors than those to publish; list them anew")
    check_scales({entry.name: entry for entry in listing})
    version = PolicyVersion(incarnation=incarnation, number=number, digest=root_digest(listing))
    return Manifest(version=version, parent=parent, tensors=listing, cast_digest=cast_digest, adapter=adapter)


def wrong_tensors(
    manifest: Manifest,
    held: Mapping[str, Tensor],
    *,
    formats: Mapping[str, TensorFormat] = _PLAIN,
    threads: int = 1,
) -> tuple[str, ...]:
    """Names under which `held` differs from the manifest: missing, unknown, of another form or with other bytes."""
    entries = layout(held, formats=formats, threads=threads)
    promised = {entry.name: (entry.dtype, entry.shape, entry.checksum, entry.format) for entry in manifest.tensors}
    found = {entry.name: (entry.dtype, entry.shape, entry.checksum, entry.format) for entry in entries}
    return tuple(sorted(name for name in promised | found if promised.get(name) != found.get(name)))


def few(names: Sequence[str]) -> str:
    """The first names of a listing and how many more there are, for messages."""
    return f"{list(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _on_host(tensors: Sequence[Tensor], threads: int) -> list[str]:
    """In the order given. Longest first where several threads share the work, so that they end together."""
    found = [""] * len(tensors)

    def hash_task(task: Sequence[int], threads: int = 1) -> None:
        for index in task:
            tensor = tensors[index].contiguous()  # named, so that it outlives the look at its memory
            found[index] = blake3(_content(tensor), max_threads=threads).hexdigest()

    if threads == 1:
        hash_task(range(len(tensors)))
        return found
    large, tasks = _tasks([tensor.numel() * tensor.element_size() for tensor in tensors])
    hash_task(large, threads)
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        list(pool.map(hash_task, tasks))
    return found


def _content(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, good for as long as the tensor lives."""
    return _memory_at(tensor.data_ptr(), tensor.nbytes, _READ) if tensor.numel() else memoryview(b"")


def _require_contiguous(tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor has its bytes in order; call .contiguous() first")


def _tasks(sizes: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Indices of those large enough for all threads together, and of the rest in tasks for one thread each."""
    large: list[int] = []
    tasks: list[list[int]] = [[]]
    room = _TASK_BYTES
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if sizes[index] >= _LARGE_BYTES:
            large.append(index)
            continue
        if tasks[-1] and sizes[index] > room:
            tasks.append([])
            room = _TASK_BYTES
        tasks[-1].append(index)
        room -= sizes[index]
    return large, tasks


def _refuse_tied(tensors: Mapping[str, Tensor]) -> None:
    owners: dict[tuple[torch.device, int], str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        owner = owners.setdefault((tensor.device, tensor.data_ptr()), name)
        if owner != name:
            raise PayloadError(f"{name!r} is tied to {owner!r}: publish one of them, so that no copy can go stale")

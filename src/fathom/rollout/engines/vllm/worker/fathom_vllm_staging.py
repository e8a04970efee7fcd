"""Runs inside vLLM's worker process: receives versions into memory of its own, beside the weights that serve.

A thread does it while the worker goes on computing. It copies with numpy: in whichever thread torch copies much, it
leaves a second team of OpenMP threads behind, and from then on decoding with two threads takes half as long again.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import fathom_vllm_broadcast as broadcast
import msgspec
import numpy as np
import torch
from blake3 import blake3
from safetensors import safe_open

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
"""Element types as safetensors writes them."""
SHARED, DISK = "source.shared.1", "source.disk.1"
"""Tags of sources."""


@dataclass
class Order:
    """What the adapter asks for."""

    engine: str
    """Name of the engine that this worker is."""
    source: dict[str, Any]
    """Where the version is: a tagged source of Fathom's, as JSON."""
    entries: list[list[Any]]
    """[name, dtype, shape, offset, size_bytes] per tensor, in the order of the flat layout."""
    buckets: list[list[int]]
    """[start, stop] in the flat layout of what travels at once. Empty where nothing is sent."""

    @property
    def size_bytes(self) -> int:
        """Of the flat layout."""
        return max((offset + size for _, _, _, offset, size in self.entries), default=0)


@dataclass
class Arrival:
    """One version on its way, or here."""

    order: Order
    """What was asked for."""
    checksums: dict[str, str] = field(default_factory=dict)
    """BLAKE3 of the bytes received."""
    digest: str = ""
    """Root digest of the bytes received. Empty: not whole."""
    failure: str = ""
    """Why it could not be received."""
    interrupted: bool = False
    """It broke elsewhere: nothing is wrong with the version, nor here."""
    moved_bytes: int = 0
    """Bytes that came from the source."""
    receive_s: float = 0.0
    """Seconds to receive."""
    verify_s: float = 0.0
    """Seconds to digest."""
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set when nobody waits for it any more, or it has been loaded: it is not staged."""


class Staging:
    """At most one version beside what serves."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        """uint8 [size of the layout]; kept for the next version, because first touches are dear."""
        self._arrival = Arrival(Order("", {}, [], []))
        self._thread: threading.Thread | None = None
        self._seat = broadcast.Seat()

    @property
    def busy(self) -> bool:
        """Something may still write."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def digest(self) -> str:
        """Root digest of what is staged. Empty: nothing whole is."""
        return "" if self._arrival.given_up.is_set() else self._arrival.digest

    def begin(self, order: Order) -> None:
        """Begin to receive a version. Raises RuntimeError while an earlier one is on its way: forget it, and wait."""
        if self.busy:
            raise RuntimeError("an earlier version is still being received")
        self._arrival = Arrival(order)
        self._thread = threading.Thread(target=self._receive, args=(self._arrival,), name="fathom-stage", daemon=True)
        self._thread.start()

    def facts(self) -> dict[str, Any]:
        """How far that is (`StagedFacts` on the other side)."""
        busy, arrival = self.busy, self._arrival
        return {
            "busy": busy,
            "failure": arrival.failure,
            "interrupted": arrival.interrupted,
            "digest": self.digest,
            "checksums": arrival.checksums if not busy else {},
            "moved_bytes": arrival.moved_bytes,
            "receive_s": arrival.receive_s,
            "verify_s": arrival.verify_s,
        }

    def forget(self) -> None:
        """Nothing is staged any more. What is on its way ends soon; the worker has to compute meanwhile."""
        self._arrival.given_up.set()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is staged, under the names of the checkpoint."""
        for name, dtype, shape, offset, size in self._arrival.order.entries:
            yield name, self._memory[offset : offset + size].view(DTYPES[dtype]).view(shape)

    def _receive(self, arrival: Arrival) -> None:
        started = time.perf_counter()
        try:
            if len(self._memory) != arrival.order.size_bytes:
                self._memory = torch.empty(arrival.order.size_bytes, dtype=torch.uint8)
            arrival.moved_bytes = self._read(arrival)
            received = time.perf_counter()
            self._digest(arrival)
        except broadcast.InterruptedTransfer as error:
            arrival.interrupted, arrival.failure = True, str(error)
        except Exception as error:  # noqa: BLE001 - told to the adapter, which raises it
            arrival.failure = f"{type(error).__name__}: {error}"
        else:
            arrival.receive_s, arrival.verify_s = received - started, time.perf_counter() - received

    def _read(self, arrival: Arrival) -> int:
        """Receive every tensor; returns the bytes that came."""
        order, kind = arrival.order, arrival.order.source["type"]
        if kind == broadcast.TAG:
            return self._seat.receive(order.engine, order.source, self._memory, order.buckets, arrival.given_up)
        pieces = {SHARED: _shared_pieces, DISK: _disk_pieces}[kind]
        memory = self._memory.numpy()
        moved_bytes = 0
        for offset, piece in pieces(order):
            if arrival.given_up.is_set():
                break
            memory[offset : offset + piece.size] = piece
            moved_bytes += piece.size
        return moved_bytes

    def _digest(self, arrival: Arrival) -> None:
        """Of what lies here now."""
        memory = self._memory.numpy()
        root = blake3()
        for name, dtype, shape, offset, size in sorted(arrival.order.entries, key=lambda entry: entry[0]):
            if arrival.given_up.is_set():
                return
            arrival.checksums[name] = blake3(memory[offset : offset + size].data).hexdigest()
            root.update(msgspec.json.encode((name, dtype, shape, arrival.checksums[name])) + b"\n")
        arrival.digest = root.hexdigest()


def _shared_pieces(order: Order) -> Iterator[tuple[int, np.ndarray]]:
    """Each tensor's offset and bytes, from a file that has the same layout."""
    path = order.source["path"]
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_size < order.size_bytes:
            raise ValueError(f"{path} is shorter than its manifest says")
        memory = np.frombuffer(mmap.mmap(descriptor, order.size_bytes, access=mmap.ACCESS_READ), dtype=np.uint8)
    finally:
        os.close(descriptor)
    for _, _, _, offset, size in order.entries:
        yield offset, memory[offset : offset + size]


def _disk_pieces(order: Order) -> Iterator[tuple[int, np.ndarray]]:
    """Each tensor's offset and bytes, from a safetensors file. Raises ValueError on a tensor of another form."""
    with safe_open(order.source["path"], framework="pt") as file:
        for name, dtype, shape, offset, _ in order.entries:
            tensor = file.get_tensor(name)
            if (tensor.dtype, list(tensor.shape)) != (DTYPES[dtype], shape):
                raise ValueError(f"tensor {name!r} is not of the form its manifest says")
            yield offset, tensor.contiguous().view(-1).view(torch.uint8).numpy()

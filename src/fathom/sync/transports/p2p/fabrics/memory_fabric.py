"""A fabric within one process, with faults on demand. For tests: two landings and their sources share a process."""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final
from weakref import WeakValueDictionary

from fathom.sync.transports.p2p.fabrics.fabric import FabricError, Region, Stop, Write, overlap

_NAP_S = 0.001
_OPEN: WeakValueDictionary[str, MemoryFabric] = WeakValueDictionary()
"""Every fabric of this process, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFaults:
    """What goes wrong, on the writing side. Writes are counted over the life of the fabric, from 0."""

    fail_at: int | None = None
    """This write fails. None: none does."""
    partial_bytes: int = 0
    """So many of its bytes arrive all the same."""
    slow_s: float = 0.0
    """Seconds that each write takes longer."""
    lose_at: int | None = None
    """This write is reported to have arrived and did not. None: none is."""


_NO_FAULTS = FabricFaults()


@final
class MemoryFabric:
    """Copies between addresses of this process, after it has checked that both are registered."""

    def __init__(self, faults: FabricFaults = _NO_FAULTS) -> None:
        self.faults = faults
        """May be replaced at any time."""
        self.writes = 0
        """Writes that it began."""
        self.written_bytes = 0
        """Bytes that arrived elsewhere."""
        self._name = secrets.token_hex(8)
        self._regions: set[Region] = set()
        self._met: set[str] = set()
        self._lock = threading.Lock()
        _OPEN[self._name] = self

    @property
    def registered(self) -> frozenset[Region]:
        """What is registered now."""
        return frozenset(self._regions)

    @property
    def met(self) -> frozenset[str]:
        """Names of those it knows."""
        return frozenset(self._met)

    def register(self, regions: Sequence[Region]) -> None:
        """Remember them. Raises `FabricError` when one overlaps another."""
        with self._lock:
            for region in regions:
                if overlap([region], self._regions):
                    raise FabricError(f"{region} overlaps a region that is registered; unregister that first")
                self._regions.add(region)

    def unregister(self, regions: Sequence[Region]) -> None:
        """Forget them."""
        with self._lock:
            self._regions.difference_update(regions)

    def describe(self) -> bytes:
        """Its name and what is registered: a description changes with either, as with real fabrics."""
        listing = sorted((region.address, region.size_bytes) for region in self._regions)
        return f"{self._name} {listing}".encode()

    def meet(self, description: bytes) -> str:
        """Remember the name. Raises `FabricError` when it is not open in this process."""
        name = description.decode(errors="replace").split(" ")[0]
        if name not in _OPEN:
            raise FabricError("the other side is not in this process; use another sync.p2p.fabric between processes")
        self._met.add(name)
        return name

    def forget(self, peer: str) -> None:
        """Forget the name."""
        self._met.discard(peer)

    def write(self, peer: str, writes: Sequence[Write], stop: Stop) -> None:
        """Copy one after the other. Raises `FabricError` that tells which one did not arrive."""
        for index, write in enumerate(writes):
            try:
                self._write(peer, write, stop)
            except FabricError as error:
                self.forget(peer)
                raise FabricError(error.reason, range(index, index + 1)) from None

    def progress(self) -> None:
        """Nothing: the writing side does it all."""

    def close(self) -> None:
        """Nobody finds it any more."""
        with self._lock:
            self._regions.clear()
        self._met.clear()
        _OPEN.pop(self._name, None)

    def _write(self, peer: str, write: Write, stop: Stop) -> None:
        with self._lock:
            number, self.writes = self.writes, self.writes + 1
        faults, until = self.faults, time.monotonic() + self.faults.slow_s
        while (reason := stop()) is None and time.monotonic() < until:
            time.sleep(_NAP_S)
        if reason is not None:
            raise FabricError(reason)
        target = _OPEN.get(peer)
        if target is None or peer not in self._met:
            raise FabricError("the other side has left")
        arriving = min(faults.partial_bytes, write.size_bytes) if number == faults.fail_at else write.size_bytes
        if number == faults.lose_at:
            arriving = 0
        with target._lock:
            _require(self._regions, Region(write.source, write.size_bytes), "here")
            _require(target._regions, Region(write.target, write.size_bytes), "there")
            ctypes.memmove(write.target, write.source, arriving)
        self.written_bytes += arriving
        if number == faults.fail_at:
            raise FabricError(f"it was cut after {arriving} of {write.size_bytes} bytes, on purpose")


def _require(regions: set[Region], wanted: Region, where: str) -> None:
    end = wanted.address + wanted.size_bytes
    if not any(known.address <= wanted.address and end <= known.address + known.size_bytes for known in regions):
        raise FabricError(f"the memory is not registered {where}")

"""The port of a fabric: what writes from memory here into the memory of another process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

JOINED_BYTES = 256 << 20
"""A system call copies 2 GiB at most, and what is less than this costs no more in parts."""

Stop = Callable[[], str | None]
"""Asked again and again while a write runs. Not None: why it has to end now."""


class FabricError(Exception):
    """The fabric failed. Of a write: one of those whose index is in `suspects` did not arrive, or not whole.

    None: any of them.
    """

    def __init__(self, reason: str, suspects: range | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.suspects = suspects


@dataclass(frozen=True, slots=True)
class Region:
    """A range of this process's memory. Whoever registers it keeps it alive until it is unregistered."""

    address: int
    """Its first byte."""
    size_bytes: int
    """Its length, > 0."""


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes on their way."""

    source: int
    """Address of the first byte here, in a region registered here."""
    target: int
    """Address of the first byte there, in a region registered there."""
    size_bytes: int
    """How many, > 0."""


class Fabric(Protocol):
    """Registers memory, and writes into memory registered elsewhere. Threads may share one."""

    def register(self, regions: Sequence[Region]) -> None:
        """Let others write into these regions, and write from them. They overlap no region that is registered.

        Raises:
            FabricError: they cannot be registered.
        """
        ...

    def unregister(self, regions: Sequence[Region]) -> None:
        """Undo a `register` of exactly these."""
        ...

    def describe(self) -> bytes:
        """What another process needs in order to write into what is registered now."""
        ...

    def meet(self, description: bytes) -> str:
        """Get to know another process; returns its name, for `write`. Descriptions of the same process have one name.

        Raises:
            FabricError: it is no description of this kind of fabric.
        """
        ...

    def forget(self, peer: str) -> None:
        """Break the connection with another process. Unknown names are ignored."""
        ...

    def write(self, peer: str, writes: Sequence[Write], stop: Stop) -> None:
        """Write them all; returns when all have arrived.

        Raises:
            FabricError: not all arrived, or `stop` said why not to go on. The peer is forgotten then.
        """
        ...

    def progress(self) -> None:
        """Let the library handle what comes in. The side written to calls it, often, while it waits."""
        ...

    def close(self) -> None:
        """Unregister everything and leave; nothing is written from or into this process any more. Idempotent."""
        ...


def joined_regions(regions: Iterable[Region]) -> tuple[Region, ...]:
    """The same memory, ascending, in as few regions as there can be: those that touch are one."""
    joined: list[Region] = []
    for region in sorted(regions, key=lambda region: region.address):
        if joined and joined[-1].address + joined[-1].size_bytes == region.address:
            joined[-1] = Region(joined[-1].address, joined[-1].size_bytes + region.size_bytes)
        else:
            joined.append(region)
    return tuple(joined)


def joined_writes(writes: Iterable[Write]) -> list[Write]:
    """The same bytes, in the same order: writes that touch the one before on both sides are one with it.

    None is larger than `JOINED_BYTES`, unless it was before.
    """
    joined: list[Write] = []
    for write in writes:
        last = joined[-1] if joined else None
        if (
            last
            and (last.source + last.size_bytes, last.target + last.size_bytes) == (write.source, write.target)
            and last.size_bytes + write.size_bytes <= JOINED_BYTES
        ):
            joined[-1] = Write(last.source, last.target, last.size_bytes + write.size_bytes)
        else:
            joined.append(write)
    return joined


def overlap(ones: Iterable[Region], others: Iterable[Region]) -> bool:
    """Whether some memory lies in both. Within either no regions overlap."""
    ascending = sorted((*ones, *others), key=lambda region: region.address)
    return any(one.address + one.size_bytes > other.address for one, other in pairwise(ascending))

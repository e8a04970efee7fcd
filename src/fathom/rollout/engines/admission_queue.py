"""Generations that wait for their turn, in the order in which they get one. Shared by all engines that queue."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar, final

from fathom.core.ports.engine import GenerateRequest


class Waiting(Protocol):
    """What the queue needs to know of an entry."""

    @property
    def request(self) -> GenerateRequest:
        """What was asked for."""
        ...

    @property
    def ended(self) -> bool:
        """It was aborted meanwhile: it is passed over."""
        ...


Entry = TypeVar("Entry", bound=Waiting)


@final
class AdmissionQueue(Generic[Entry]):
    """Smallest priority first, then arrival. Requests of a barrier arrive together, in id order, when all are there."""

    def __init__(self) -> None:
        self._open: list[tuple[int, int, Entry]] = []
        self._pinned: list[tuple[int, int, Entry]] = []
        self._barriers: dict[str, list[Entry]] = {}
        self._arrivals = 0

    def push(self, entry: Entry) -> None:
        """Add an entry, or hold it until its barrier is complete."""
        barrier = entry.request.barrier
        if barrier is None:
            self._enter(entry, entry.request.priority)
            return
        if barrier.name not in self._barriers:  # of those that nobody waits at any more, none will be completed
            self._barriers = {name: held for name, held in self._barriers.items() if not all(e.ended for e in held)}
        waiting = self._barriers.setdefault(barrier.name, [])
        waiting.append(entry)
        present = [other for other in waiting if not other.ended]
        if len(present) < barrier.size:
            return
        del self._barriers[barrier.name]
        priority = min(other.request.priority for other in present)
        for member in sorted(present, key=lambda other: other.request.request_id):
            self._enter(member, priority)

    def first(self, pinned_only: bool) -> Entry | None:
        """Whose turn it is. None: nobody's. `pinned_only`: leave those that follow the live version (a drain)."""
        heap = self._first(pinned_only)
        return heap[0][2] if heap else None

    def pop(self, pinned_only: bool) -> Entry | None:
        """The same, and it waits no more."""
        heap = self._first(pinned_only)
        return heapq.heappop(heap)[2] if heap else None

    def _first(self, pinned_only: bool) -> list[tuple[int, int, Entry]]:
        """The heap whose first entry is the one. Empty: there is none."""
        heaps = [self._pinned] if pinned_only else [self._open, self._pinned]
        for heap in heaps:
            while heap and heap[0][2].ended:
                heapq.heappop(heap)
        return min((heap for heap in heaps if heap), key=lambda heap: heap[0][:2], default=[])

    def _enter(self, entry: Entry, priority: int) -> None:
        self._arrivals += 1
        heap = self._open if entry.request.pinned is None else self._pinned
        heapq.heappush(heap, (priority, self._arrivals, entry))

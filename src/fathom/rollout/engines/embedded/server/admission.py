"""Generations that wait for a slot, in the order in which they get one."""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field
from typing import final

import numpy as np

from fathom.core.ports.engine import GenerateRequest
from fathom.rollout.engines.embedded.messages import Streamed
from fathom.rollout.engines.embedded.server.weights import WeightSet

Stream = asyncio.Queue[Streamed | None]
"""Where the chunks of a generation go; belongs to the event loop's thread. None: its reader has gone."""


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One generation, from arrival to end."""

    request: GenerateRequest
    """What was asked for."""
    stream: Stream
    """Where its chunks go."""
    arrived_s: float
    """Monotonic time of arrival."""
    pinned: WeightSet | None
    """The weights it must be served by. None: whichever are live."""
    started_s: float = 0.0
    """Monotonic time of the first computation."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was copied."""
    kept: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """Kept ids of each sampled token that was not sent yet (empty array: full)."""
    ended: bool = False
    """Nothing more will be sent."""


@final
class AdmissionQueue:
    """Smallest priority first, then arrival. Requests of a barrier arrive together, in id order, when all are there."""

    def __init__(self) -> None:
        self._open: list[tuple[int, int, Job]] = []
        self._pinned: list[tuple[int, int, Job]] = []
        self._barriers: dict[str, list[Job]] = {}
        self._arrivals = 0

    def push(self, job: Job) -> None:
        """Add a job, or hold it until its barrier is complete."""
        barrier = job.request.barrier
        if barrier is None:
            self._enter(job, job.request.priority)
            return
        waiting = self._barriers.setdefault(barrier.name, [])
        waiting.append(job)
        present = [other for other in waiting if not other.ended]
        if len(present) < barrier.size:
            return
        del self._barriers[barrier.name]
        priority = min(other.request.priority for other in present)
        for member in sorted(present, key=lambda other: other.request.request_id):
            self._enter(member, priority)

    def pop(self, pinned_only: bool) -> Job | None:
        """The next job to run. None: nothing that may run now. Ended jobs are forgotten on the way."""
        heaps = [self._pinned] if pinned_only else [self._open, self._pinned]
        for heap in heaps:
            while heap and heap[0][2].ended:
                heapq.heappop(heap)
        ready = [heap for heap in heaps if heap]
        return heapq.heappop(min(ready, key=lambda heap: heap[0][:2]))[2] if ready else None

    def _enter(self, job: Job, priority: int) -> None:
        self._arrivals += 1
        heapq.heappush(self._open if job.pinned is None else self._pinned, (priority, self._arrivals, job))

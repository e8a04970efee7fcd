"""The KV of running sequences: found in the cache or computed, given up, remembered."""

from __future__ import annotations

import time
from typing import final

import numpy as np

from fathom.core.ids import PolicyVersion
from fathom.rollout.engines.embedded.server.decode.slot_table import SlotTable
from fathom.rollout.engines.embedded.server.job import Job
from fathom.rollout.engines.embedded.server.kv.kv_memory import KvMemory
from fathom.rollout.engines.embedded.server.kv.prefix_tree import Hit
from fathom.rollout.engines.embedded.server.weight_sets import WeightSet

Origin = tuple[PolicyVersion, str, bool]
"""Version, barrier name, and whether routes are recorded: sequences of one origin that begin alike may share KV.

The barrier is part of it because KV found and KV computed may differ in the last bit, and what was there before a
barrier must not show in its results.
"""

_NO_VERSION = np.iinfo(np.int32).max


def origin_of(job: Job, live: WeightSet) -> Origin:
    """The origin of what a job would compute now."""
    version = (job.pinned or live).version
    assert version is not None, "weights without a version compute nothing"
    return version, job.request.barrier.name if job.request.barrier else "", job.request.want_routes


@final
class Contexts:
    """Keeps slot table and KV memory in step."""

    def __init__(self, table: SlotTable, memory: KvMemory) -> None:
        self._table = table
        self._memory = memory
        self._origins: dict[int, Origin] = {}

    def origin(self, slot: int) -> Origin | None:
        """Where all KV of a slot comes from. None: there is none, or it is of several versions."""
        return self._origins.get(slot)

    def find(self, slot: int, origin: Origin) -> Hit:
        """What is cached of a slot's context. The last token is computed in any case: its logits are needed."""
        return self._memory.find(origin, self._table.context(slot)[:-1])

    def begin(self, slot: int, job: Job, origin: Origin, hit: Hit, spare: int) -> bool:
        """Start to compute a context after what was found. False: fewer than `spare` pages would be left."""
        table = self._table
        there = self._memory.begin(slot, int(table.length[slot]), hit, spare)
        if there is None:
            return False
        table.computed[slot] = there
        table.kv_oldest[slot] = _NO_VERSION
        self._origins[slot] = origin
        if job.started_s is None:
            job.started_s, job.cached_tokens = time.monotonic(), there
        return True

    def advance(self, rows: np.ndarray, lengths: np.ndarray, version: int) -> None:
        """So many more tokens of these rows were computed, by `version`."""
        self._table.computed[rows] += lengths
        self._table.kv_oldest[rows] = np.minimum(self._table.kv_oldest[rows], version)

    def remember(self, slot: int) -> None:
        """Let others find what was computed, if it is all of one version."""
        origin = self._origins.get(slot)
        if origin is not None and self._table.computed[slot]:
            self._memory.remember(slot, origin, self._table.tokens[slot, : self._table.computed[slot]])

    def release(self, slot: int) -> None:
        """Give the slot's pages back; its context is to be computed again, if it goes on."""
        self._memory.release(slot)
        self._table.computed[slot] = 0
        self._origins.pop(slot, None)

    def mix(self, slot: int) -> None:
        """The slot goes on under other weights: its KV is no longer what one version computes."""
        self._origins.pop(slot, None)

    def clear(self) -> None:
        """Nothing computed so far may be found by a new request."""
        self._memory.clear()

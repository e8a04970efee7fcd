"""Expert routes of running sequences on their way to whoever asked for them. Letters: L layers, E experts per token."""

from __future__ import annotations

from typing import final

import numpy as np

from fathom.rollout.engines.embedded.server.decode.forward import Forward
from fathom.rollout.engines.embedded.server.decode.slot_table import SlotTable
from fathom.rollout.engines.embedded.server.kv.kv_memory import KvMemory


@final
class RouteBook:
    """Collects the first routes recorded for each input. What is computed again later is not recorded again.

    Routes of cached tokens lie beside their KV, so a sequence that finds KV finds routes too.
    """

    def __init__(self, table: SlotTable, memory: KvMemory, forward: Forward) -> None:
        self._table = table
        self._memory = memory
        self._forward = forward
        self._wanted = np.zeros(len(table.active), np.bool_)
        self._recorded = np.zeros(len(table.active), np.int64)
        """Leading inputs of each slot whose routes were collected."""
        self._unsent: dict[int, list[np.ndarray]] = {}

    def open(self, slot: int, *, wanted: bool) -> None:
        """A new sequence has the slot."""
        self._wanted[slot] = wanted
        self._recorded[slot] = 0
        self._unsent[slot] = []

    def wants(self, rows: np.ndarray) -> bool:
        """True when one of these rows needs its routes recorded."""
        return bool(self._wanted[rows].any())

    def collect(self, rows: np.ndarray) -> None:
        """Take over what was recorded, or found in the cache, of these rows."""
        rows = rows[self._wanted[rows]]
        counts = self._table.computed[rows] - self._recorded[rows]
        rows, counts = rows[counts > 0], counts[counts > 0]
        if not len(rows):
            return
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + np.repeat(self._recorded[rows] - (ends - counts), counts)
        routes = self._forward.routes(*self._memory.places(np.repeat(rows, counts), positions))
        for slot, end, count in zip(rows.tolist(), ends.tolist(), counts.tolist(), strict=True):
            self._unsent[slot].append(routes[end - count : end])
        self._recorded[rows] += counts

    def restart(self, slot: int) -> None:
        """A prompt is to be computed anew, by other weights, and no token came after it: nobody has its routes yet."""
        self._recorded[slot] = 0
        self._unsent[slot].clear()

    def take(self, slot: int) -> np.ndarray | None:
        """[inputs, L, E] of the inputs that were not taken before. None: nobody wants them, or there are none."""
        parts = self._unsent[slot]
        if not self._wanted[slot] or not parts:
            return None
        taken = np.concatenate(parts)
        parts.clear()
        return taken

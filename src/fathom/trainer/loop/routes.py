"""Recorded expert routes beside the trainer's own choice. Letters: T input tokens, L layers, E experts per token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

import numpy as np

from fathom.core.records.row import Row
from fathom.core.records.step import RouteMetrics
from fathom.model.routing import Routing
from fathom.trainer.backends.packed import PackedRows


@final
class RouteTally:
    """What the micro-batches of a step tell of routes."""

    def __init__(self) -> None:
        self._tokens = 0
        self._forced = 0
        self._agreeing = 0
        self._by_layer = np.zeros(0, np.int64)
        self._shared = 0
        self._chosen = 0
        self._margins: list[np.ndarray] = []
        self._seconds = 0.0

    def add(self, packed: PackedRows, routing: Routing) -> np.ndarray:
        """Compare; int16 [T]: the layers in which the trainer's choice is another than the recorded one."""
        started = time.perf_counter()
        recorded, live, margins = packed.routes, routing.chosen, routing.margins
        assert recorded is not None, "a backend returns routing only where there are routes"
        assert margins is not None, "and then it measures margins"
        same = same_routes(recorded, live)
        self._tokens += len(same)
        self._forced += len(same) if packed.forced else 0
        self._agreeing += int(same.all(axis=1).sum())
        self._by_layer = same.sum(axis=0) + (self._by_layer if len(self._by_layer) else 0)
        self._shared += int((recorded[..., :, None] == live[..., None, :]).sum())
        self._chosen += recorded.size
        self._margins.append(margins[np.isfinite(margins)])
        self._seconds += routing.seconds + time.perf_counter() - started
        return (~same).sum(axis=1).astype(np.int16)

    def metrics(self, rows: Sequence[Row]) -> RouteMetrics | None:
        """The numbers of a step that trained these rows. None: nothing was compared."""
        if not self._tokens:
            return None
        margins = np.concatenate(self._margins)
        mixed = [row.mixed_routes for row in rows if row.mixed_routes is not None]
        return RouteMetrics(
            tokens=self._tokens,
            agreement=self._agreeing / self._tokens,
            layer_agreement=tuple((self._by_layer / self._tokens).tolist()),
            overlap=self._shared / self._chosen,
            forced_share=self._forced / self._tokens,
            mixed_share=float(np.concatenate(mixed).mean()) if mixed else 0.0,
            margin_mean=float(margins.mean()) if len(margins) else None,
            margin_p01=float(np.percentile(margins, 1)) if len(margins) else None,
            size_bytes=sum(row.routes.nbytes for row in rows if row.routes is not None),
            seconds=self._seconds,
        )


def same_routes(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """bool [T, L]: the same experts, in whatever order."""
    return np.all(np.sort(left, axis=-1) == np.sort(right, axis=-1), axis=-1)

"""A transport that remembers how long its calls took."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import final

from torch import Tensor

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource
from fathom.sync.transports.transport import Transport


@final
class TimedTransport:
    """Passes every call on. With a storage speed, taking a version sleeps as long as writing it would last."""

    def __init__(self, inner: Transport, storage_bytes_per_s: float | None = None) -> None:
        self.hold_s = 0.0
        """Seconds that the last `hold` took."""
        self.offer_s = 0.0
        """Seconds that the last `offer` took."""
        self._inner = inner
        self._storage_bytes_per_s = storage_bytes_per_s

    def hold(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """See `Transport.hold`."""
        began = time.perf_counter()
        self._inner.hold(manifest, tensors)
        if self._storage_bytes_per_s is not None:
            time.sleep(manifest.size_bytes / self._storage_bytes_per_s)
        self.hold_s = time.perf_counter() - began

    def offer(self, version: PolicyVersion, engines: Sequence[EngineId]) -> WeightSource:
        """See `Transport.offer`."""
        began = time.perf_counter()
        source = self._inner.offer(version, engines)
        self.offer_s = time.perf_counter() - began
        return source

    def release(self, version: PolicyVersion) -> None:
        """See `Transport.release`."""
        self._inner.release(version)

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()

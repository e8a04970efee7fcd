"""The port of a transport: how the bytes of a version come to engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from fathom.core.ids import EngineId, PolicyVersion
from fathom.core.manifest import Manifest, WeightSource


class Transport(Protocol):
    """Holds versions and gives them out. Its calls block; the publisher makes them in one thread of its own.

    The other half is a reading side in the engine's process, which `transports/inbox.py` chooses by the source.
    """

    def hold(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Take the bytes of a version. Afterwards `tensors` may change; the version stays whole until it is released.

        Raises:
            DeliveryError: there is no room, or the medium failed.
        """
        ...

    def offer(self, version: PolicyVersion, engines: Sequence[EngineId]) -> WeightSource:
        """Say where these engines get a version that is held.

        A transport that sends, rather than being read, begins to wait for them here, and gives up any earlier offer:
        it is called anew for each attempt, with the engines that take part in it.

        Raises:
            DeliveryError: the version is not held, or nothing can be sent.
        """
        ...

    def release(self, version: PolicyVersion) -> None:
        """No engine will be offered this version again; its room may be used. Unknown versions are ignored."""
        ...

    def close(self) -> None:
        """Remove everything. Idempotent."""
        ...

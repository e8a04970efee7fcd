"""The port of a transport: how the bytes of a version become readable for engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from fathom.core.ids import PolicyVersion
from fathom.core.manifest import Manifest, WeightSource


class Transport(Protocol):
    """Makes versions readable. Its calls block; the publisher makes them in one thread of its own."""

    def publish(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> WeightSource:
        """Make the version readable and say where. It stays whole until it is released.

        Raises:
            DeliveryError: there is no room, or the medium failed.
        """
        ...

    def release(self, version: PolicyVersion) -> None:
        """No engine will be asked to read this version again; its room may be used. Unknown versions are ignored."""
        ...

    def close(self) -> None:
        """Remove everything. Idempotent."""
        ...

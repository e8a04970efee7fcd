"""One module per transport; `receive` is the engine's side of all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fathom.config.families import TransportKind
from fathom.sync.transports.disk import DiskTransport
from fathom.sync.transports.shared import SharedTransport
from fathom.sync.transports.transport import Transport

TRANSPORTS: dict[TransportKind, Callable[[Path], Transport]] = {
    TransportKind.SHARED: SharedTransport,
    TransportKind.DISK: DiskTransport,
}
"""How each transport is opened for a run's folder."""

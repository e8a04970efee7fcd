"""One module per transport; `inbox` is the engine's side of all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fathom.config.families import TransportKind
from fathom.config.sync import BroadcastConfig, PeerConfig, SyncConfig
from fathom.sync.transports.broadcast.transport import BroadcastTransport
from fathom.sync.transports.delta import DeltaTransport
from fathom.sync.transports.disk import DiskTransport
from fathom.sync.transports.p2p.peer_transport import PeerTransport
from fathom.sync.transports.shared import SharedTransport
from fathom.sync.transports.transport import Transport

TRANSPORTS: dict[TransportKind, Callable[[Path, SyncConfig], Transport]] = {
    TransportKind.SHARED: lambda run_folder, config: SharedTransport(run_folder),
    TransportKind.DISK: lambda run_folder, config: DiskTransport(run_folder),
    TransportKind.BROADCAST: lambda run_folder, config: BroadcastTransport(config.broadcast or BroadcastConfig()),
    TransportKind.P2P: lambda run_folder, config: PeerTransport.open(config.p2p or PeerConfig(), config.timeout_s),
    TransportKind.DELTA: lambda run_folder, config: DeltaTransport.open(run_folder, config.chain),
}
"""How each transport is opened for a run's folder."""

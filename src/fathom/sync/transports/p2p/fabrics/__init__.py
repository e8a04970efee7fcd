"""One module per library that moves memory; each is imported when it is opened, not before."""

from __future__ import annotations

from collections.abc import Callable

from fathom.config.families import FabricKind
from fathom.sync.transports.p2p.fabrics.fabric import Fabric
from fathom.sync.transports.p2p.fabrics.memory_fabric import MemoryFabric
from fathom.sync.transports.p2p.fabrics.mooncake_fabric import open_mooncake
from fathom.sync.transports.p2p.fabrics.nixl_fabric import open_nixl

FABRICS: dict[FabricKind, Callable[[str], Fabric]] = {
    FabricKind.NIXL: open_nixl,
    FabricKind.MOONCAKE: open_mooncake,
    FabricKind.MEMORY: lambda host: MemoryFabric(),
}
"""How each fabric is opened, given the address under which the other side reaches this process."""

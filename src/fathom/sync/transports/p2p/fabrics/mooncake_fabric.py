"""Mooncake's Transfer Engine as a fabric, over TCP. The only importer of `mooncake`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from fathom.core.errors import ConfigError, MissingDependencyError
from fathom.sync.transports.p2p.fabrics.fabric import FabricError, Region, Stop, Write

if TYPE_CHECKING:
    from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]  # an extra

_CALL_WRITES, _CALL_BYTES = 256, 64 << 20
"""Writes and bytes in one call at most: it refuses long lists, and cannot be stopped before it returns."""


def open_mooncake(host: str) -> MooncakeFabric:
    """An engine of this process, reached by others at `host`.

    Raises:
        MissingDependencyError: the library is not installed.
        ConfigError: a library of the system is missing, or it does not start.
    """
    option = "sync.p2p.fabric = 'mooncake'"
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else it tells on stderr what it found, at each start
    try:
        from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]  # an extra
    except ModuleNotFoundError as error:
        raise MissingDependencyError(option, "mooncake-transfer-engine-non-cuda", "mooncake") from error
    except ImportError as error:
        raise ConfigError(
            f"{option} needs RDMA libraries of the system ({error}); on Debian or Ubuntu run: "
            "apt-get install --no-install-recommends libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200"
        ) from error
    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
        raise ConfigError(f"{option} does not start at {host!r}; is that an address of this machine? See its log above")
    return MooncakeFabric(engine, host)


@final
class MooncakeFabric:
    """One engine. It checks by itself that what is written lies in registered memory of the side written to."""

    def __init__(self, engine: TransferEngine, host: str) -> None:
        self._engine: Any = engine
        self._name = f"{host}:{engine.get_rpc_port()}"
        self._registered: set[Region] = set()

    def register(self, regions: Sequence[Region]) -> None:
        """Register them. Raises `FabricError` when the library refuses."""
        code = self._engine.batch_register_memory([r.address for r in regions], [r.size_bytes for r in regions])
        if code:
            raise FabricError(f"Mooncake cannot register memory (code {code})")
        self._registered.update(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        """Undo `register`."""
        self._registered.difference_update(regions)
        code = self._engine.batch_unregister_memory([region.address for region in regions])
        if code:
            raise FabricError(f"Mooncake cannot unregister memory (code {code})")

    def describe(self) -> bytes:
        """Its address: what is registered is asked for when something is written."""
        return self._name.encode()

    def meet(self, description: bytes) -> str:
        """The address is the name."""
        return description.decode()

    def forget(self, peer: str) -> None:
        """Nothing: the library keeps connections by itself."""

    def write(self, peer: str, writes: Sequence[Write], stop: Stop) -> None:
        """In calls of bounded size. Raises `FabricError` that tells which call failed."""
        first = 0
        while first < len(writes):
            if (reason := stop()) is not None:
                raise FabricError(reason, range(first, len(writes)))
            end, size_bytes = first, 0
            while end < len(writes) and end - first < _CALL_WRITES and (end == first or size_bytes < _CALL_BYTES):
                size_bytes += writes[end].size_bytes
                end += 1
            call = writes[first:end]
            code = self._engine.batch_transfer_sync_write(
                peer, [w.source for w in call], [w.target for w in call], [w.size_bytes for w in call]
            )
            if code:
                raise FabricError(
                    f"Mooncake says that one of {len(call)} writes failed (code {code})", range(first, end)
                )
            first = end

    def progress(self) -> None:
        """Nothing: threads of the library do it."""

    def close(self) -> None:
        """Unregister all memory; the engine ends with its last reference."""
        if self._engine is not None and self._registered:
            self._engine.batch_unregister_memory([region.address for region in self._registered])
        self._registered.clear()
        self._engine = None

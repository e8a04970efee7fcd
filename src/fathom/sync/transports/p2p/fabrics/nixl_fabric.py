"""NIXL (over UCX) as a fabric: RDMA, shared memory or TCP, whichever UCX finds. The only importer of `nixl_cu12`."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fathom.core.errors import ConfigError, MissingDependencyError
from fathom.sync.transports.p2p.fabrics.fabric import FabricError, Region, Stop, Write, joined_writes

if TYPE_CHECKING:
    from nixl_cu12 import nixl_agent  # pyright: ignore[reportMissingImports]  # an extra

_POLL_S = 0.0002
_MEMORY = "DRAM"
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_RDMA_DEVICES = Path("/sys/class/infiniband")


def open_nixl(host: str) -> NixlFabric:
    """An agent of this process. Where others reach it by loopback, UCX listens on nothing else.

    Raises:
        MissingDependencyError: the library is not installed.
        ConfigError: it does not start.
    """
    if host in _LOOPBACK:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if not (_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())):
        # The wheel's RDMA libraries beside a distribution's end the process with a segmentation fault at its exit.
        os.environ.setdefault("UCX_MODULES", "^ib")
    try:
        from nixl_cu12 import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError as error:
        raise MissingDependencyError("sync.p2p.fabric = 'nixl'", "nixl-cu12", "nixl") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to stdout, which belongs to others
    try:
        # Its own thread would poll for ever and take a third of a core; here both sides poll while they wait.
        agent = nixl_agent(secrets.token_hex(8), nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
    except Exception as error:  # the library raises its own types for whatever UCX does not like
        raise ConfigError(f"sync.p2p.fabric = 'nixl' does not start here: {error}; try 'mooncake'") from error
    return NixlFabric(agent)


@final
class NixlFabric:
    """One agent. The library is not told to be safe for threads: one lock is."""

    def __init__(self, agent: nixl_agent) -> None:
        self._agent: Any = agent
        self._registered: dict[tuple[Region, ...], Any] = {}
        self._lock = threading.Lock()

    def register(self, regions: Sequence[Region]) -> None:
        """Register them as host memory. Raises `FabricError` when the library refuses."""
        ranges = [(region.address, region.size_bytes, 0, "") for region in regions]
        with self._lock, _typed("register memory"):
            self._registered[tuple(regions)] = self._agent.register_memory(ranges, _MEMORY)

    def unregister(self, regions: Sequence[Region]) -> None:
        """Undo `register`."""
        with self._lock, _typed("unregister memory"):
            self._agent.deregister_memory(self._registered.pop(tuple(regions)))

    def describe(self) -> bytes:
        """The agent's metadata: addresses of its workers, keys of its memory."""
        with self._lock, _typed("describe itself"):
            return self._agent.get_agent_metadata()

    def meet(self, description: bytes) -> str:
        """Load the metadata. Raises `FabricError` when it is none."""
        with self._lock, _typed("read the other side's description"):
            return self._agent.add_remote_agent(description).decode()

    def forget(self, peer: str) -> None:
        """Disconnect."""
        with self._lock, suppress(Exception):  # it is not known any more, which is what was asked for
            self._agent.remove_remote_agent(peer)

    def write(self, peer: str, writes: Sequence[Write], stop: Stop) -> None:
        """One request for all. Raises `FabricError`; which of the writes failed is not told by the library."""
        writes = joined_writes(writes)  # each costs microseconds, which is much for small tensors
        try:
            with self._lock, _typed("begin to write"):
                handle = self._agent.initialize_xfer(
                    "WRITE",
                    self._agent.get_xfer_descs(_ranges([(w.source, w.size_bytes) for w in writes]), _MEMORY),
                    self._agent.get_xfer_descs(_ranges([(w.target, w.size_bytes) for w in writes]), _MEMORY),
                    peer,
                )
            try:
                self._finish(handle, stop)
            finally:
                with self._lock, suppress(Exception):  # what cannot be taken back ends with the connection
                    handle.release()
        except FabricError:
            self.forget(peer)
            raise

    def progress(self) -> None:
        """Let UCX work: without it a peer's write by TCP does not arrive, and no write ends."""
        with self._lock, _typed("receive"):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Unregister all memory and end the agent."""
        with self._lock:
            if self._agent is None:
                return
            for registered in self._registered.values():
                self._agent.deregister_memory(registered)
            self._registered.clear()
            self._agent = None

    def _finish(self, handle: Any, stop: Stop) -> None:
        with self._lock, _typed("write"):
            state = self._agent.transfer(handle)
        while state == "PROC":
            if (reason := stop()) is not None:
                raise FabricError(reason)
            time.sleep(_POLL_S)
            with self._lock, _typed("write"):
                state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise FabricError("NIXL says that the write failed")


def _ranges(ranges: list[tuple[int, int]]) -> np.ndarray:
    """uint64 [writes, 3]: address, bytes, device 0."""
    table = np.zeros((len(ranges), 3), dtype=np.uint64)
    table[:, :2] = ranges
    return table


@contextmanager
def _typed(doing: str) -> Generator[None]:
    """Errors of the library become `FabricError`."""
    try:
        yield
    except FabricError:
        raise
    except Exception as error:
        raise FabricError(f"NIXL cannot {doing}: {error}") from error

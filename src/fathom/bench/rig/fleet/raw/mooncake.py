"""One write of a flat registered buffer into each receiver's, by the Mooncake Transfer Engine over TCP."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import msgspec
import numpy as np
from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]  # an extra

from fathom.bench.rig.fleet.messages import RawOpenCall


class _Address(msgspec.Struct, frozen=True):
    """A receiver's engine and buffer."""

    session: str
    """Host and port of its engine."""
    place: int
    """Address of the buffer in that process."""


@final
class MooncakeSender:
    """Writes, to all at once."""

    def __init__(self, buffer: np.ndarray, host: str) -> None:
        self._buffer = buffer
        self._engine = _engine(host, buffer)
        self._addresses: list[_Address] = []

    @property
    def invitation(self) -> bytes:
        """Nothing: it is the sender that connects."""
        return b""

    def join(self, addresses: Sequence[bytes]) -> None:
        """Remember them; the first write connects."""
        self._addresses = [msgspec.msgpack.decode(address, type=_Address) for address in addresses]

    def send(self) -> None:
        """See `RawSender.send`."""
        with ThreadPoolExecutor(len(self._addresses)) as threads:
            list(threads.map(self._write, self._addresses))

    def close(self) -> None:
        """See `RawSender.close`."""
        self._engine.unregister_memory(self._buffer.ctypes.data)

    def _write(self, address: _Address) -> None:
        done = self._engine.transfer_sync_write(
            address.session, self._buffer.ctypes.data, address.place, self._buffer.nbytes
        )
        if done != 0:
            raise OSError(f"a raw Mooncake write to {address.session} failed: {done}")


@final
class MooncakeReceiver:
    """Is written to."""

    def __init__(self, call: RawOpenCall, buffer: np.ndarray) -> None:
        self._buffer = buffer
        self._engine = _engine(call.host, buffer)
        session = f"{call.host}:{self._engine.get_rpc_port()}"
        self._address = _Address(session=session, place=buffer.ctypes.data)

    @property
    def address(self) -> bytes:
        """Its engine, and where the buffer is."""
        return msgspec.msgpack.encode(self._address)

    def join(self) -> None:
        """It is found."""

    def receive(self) -> None:
        """It is written."""

    def close(self) -> None:
        """See `RawReceiver.close`."""
        self._engine.unregister_memory(self._buffer.ctypes.data)


def _engine(host: str, buffer: np.ndarray) -> Any:
    engine: Any = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
        raise OSError(f"Mooncake cannot listen on {host}")
    if engine.register_memory(buffer.ctypes.data, buffer.nbytes) != 0:
        raise OSError(f"Mooncake cannot register {buffer.nbytes} bytes")
    return engine

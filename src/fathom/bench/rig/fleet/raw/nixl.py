"""One write of a flat registered buffer into each receiver's, by NIXL."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any, final

import msgspec
import numpy as np

from fathom.bench.rig.fleet.messages import RawOpenCall

_POLL_S = 50e-6
_ARRIVED = b"raw"
_LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 120.0


class _Address(msgspec.Struct, frozen=True):
    """A receiver's agent and buffer."""

    agent: bytes
    """Its agent's metadata."""
    place: int
    """Address of the buffer in that process."""


@final
class NixlSender:
    """Writes."""

    def __init__(self, buffer: np.ndarray, host: str) -> None:
        self._region = _region(buffer)
        self._agent: Any = _agent(host)
        self._memory: Any = self._agent.register_memory([self._region], "DRAM")
        self._writes: list[Any] = []

    @property
    def invitation(self) -> bytes:
        """Nothing: it is the sender that connects."""
        return b""

    def join(self, addresses: Sequence[bytes]) -> None:
        """Prepare one write per receiver."""
        for address in map(msgspec.msgpack.Decoder(_Address).decode, addresses):
            peer = self._agent.add_remote_agent(address.agent)
            local = self._agent.get_xfer_descs([self._region[:3]], "DRAM")
            remote = self._agent.get_xfer_descs([(address.place, *self._region[1:3])], "DRAM")
            self._writes.append(self._agent.initialize_xfer("WRITE", local, remote, peer, _ARRIVED))

    def send(self) -> None:
        """Start all writes, then wait for all."""
        deadline = time.monotonic() + _TIMEOUT_S
        states = [self._agent.transfer(write) for write in self._writes]
        while any(state != "DONE" for state in states):
            if "ERR" in states or time.monotonic() > deadline:
                raise OSError(f"a raw NIXL write did not end: {states}")
            time.sleep(_POLL_S)
            states = [
                state if state == "DONE" else self._agent.check_xfer_state(write)
                for state, write in zip(states, self._writes, strict=True)
            ]

    def close(self) -> None:
        """See `RawSender.close`."""
        for write in self._writes:
            self._agent.release_xfer_handle(write)
        self._writes.clear()
        self._agent.deregister_memory(self._memory)


@final
class NixlReceiver:
    """Is written to, and told when that is done."""

    def __init__(self, call: RawOpenCall, buffer: np.ndarray) -> None:
        region = _region(buffer)
        self._agent: Any = _agent(call.host)
        self._memory: Any = self._agent.register_memory([region], "DRAM")
        self._address = _Address(agent=self._agent.get_agent_metadata(), place=region[0])

    @property
    def address(self) -> bytes:
        """Its agent, and where the buffer is."""
        return msgspec.msgpack.encode(self._address)

    def join(self) -> None:
        """It is found."""

    def receive(self) -> None:
        """Let the library work until it says so."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._agent.get_new_notifs():
            if time.monotonic() > deadline:
                raise OSError("a raw NIXL write did not arrive")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """See `RawReceiver.close`."""
        self._agent.deregister_memory(self._memory)


def _region(buffer: np.ndarray) -> tuple[int, int, int, str]:
    return buffer.ctypes.data, buffer.nbytes, 0, ""


def _agent(host: str) -> Any:
    """Without the library's own thread, which polls for ever and would take a third of a core from what is measured."""
    if host == _LOOPBACK:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    os.environ.setdefault("UCX_MODULES", "^ib")
    from nixl_cu12 import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports]  # an extra; reads the environment

    logging.getLogger("nixl").setLevel(logging.WARNING)
    return nixl_agent(secrets.token_hex(8), nixl_agent_config(backends=["UCX"], enable_prog_thread=False))

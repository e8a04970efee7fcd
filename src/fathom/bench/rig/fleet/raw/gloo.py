"""One broadcast of a flat tensor by Gloo."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import numpy as np
import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from fathom.bench.rig.fleet.messages import RawOpenCall

_TIMEOUT = timedelta(seconds=120)
_GLOO: Any = ProcessGroupGloo  # torch's stubs know neither its options nor its collectives


@final
class GlooSender:
    """Rank 0, and the rendezvous of all."""

    def __init__(self, buffer: np.ndarray, receivers: int, host: str) -> None:
        self._flat = torch.from_numpy(buffer)
        self._ranks = receivers + 1
        self._host = host
        self._store = TCPStore(host, 0, None, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
        self._group: Any = None

    @property
    def invitation(self) -> bytes:
        """Where the rendezvous is."""
        return f"{self._host}:{self._store.port}".encode()

    def join(self, addresses: Sequence[bytes]) -> None:
        """See `RawSender.join`."""
        self._group = _group(self._store, 0, self._ranks, self._host)

    def send(self) -> None:
        """See `RawSender.send`."""
        _broadcast(self._group, self._flat)

    def close(self) -> None:
        """See `RawSender.close`."""
        self._group = None


@final
class GlooReceiver:
    """Any other rank."""

    def __init__(self, call: RawOpenCall, buffer: np.ndarray) -> None:
        self._flat = torch.from_numpy(buffer)
        self._call = call
        self._group: Any = None

    @property
    def address(self) -> bytes:
        """Nothing: all meet at the rendezvous."""
        return b""

    def join(self) -> None:
        """See `RawReceiver.join`."""
        host, _, port = self._call.invitation.decode().rpartition(":")
        store = TCPStore(host, int(port), None, is_master=False, timeout=_TIMEOUT)
        self._group = _group(store, self._call.rank, self._call.ranks, self._call.host)

    def receive(self) -> None:
        """See `RawReceiver.receive`."""
        _broadcast(self._group, self._flat)

    def close(self) -> None:
        """See `RawReceiver.close`."""
        self._group = None


def _group(store: Any, rank: int, ranks: int, host: str) -> Any:
    options = _GLOO._Options()
    options._devices = [_GLOO.create_device(hostname=host)]
    options._timeout = _TIMEOUT
    return _GLOO(PrefixStore("raw", store), rank, ranks, options)


def _broadcast(group: Any, flat: torch.Tensor) -> None:
    if group is None:
        raise AssertionError("join comes before a transfer")
    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([flat], options).wait()

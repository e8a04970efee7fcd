"""The key-value store at which a sender and its engines meet: hosted by the sender, bound to one address."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from fathom.core.errors import DeliveryError

_ANSWER = timedelta(seconds=10)
"""How long one call of the store may take."""


def host_store(host: str) -> TCPStore:
    """Serve one on a free port of this address. It ends when the last reference to it does.

    Raises:
        DeliveryError: the address is not one of this machine.
    """
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise DeliveryError(
            f"no store can listen at {host} ({error}); set sync.broadcast.host to an own address"
        ) from error
    port = listener.getsockname()[1]  # by itself torch would listen at every address of the machine
    return TCPStore(host, port, None, True, _ANSWER, wait_for_workers=False, master_listen_fd=listener.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreVisit:
    """A connection to a store elsewhere."""

    store: TCPStore
    """The store."""
    address: str
    """This machine's address on the way to it: where other members can reach this one."""


def visit_store(host: str, port: int) -> StoreVisit:
    """Connect. Raises `OSError` or `RuntimeError` when nobody is there."""
    patience_s = _ANSWER.total_seconds()
    with socket.create_connection((host, port), patience_s) as probe:  # by itself torch tries on and on, loudly
        address = probe.getsockname()[0]
    store = TCPStore(host, port, None, False, _ANSWER, wait_for_workers=False)
    return StoreVisit(store=store, address=address)

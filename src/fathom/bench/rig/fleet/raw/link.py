"""The two ends of a raw transfer, and who provides them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Protocol

import numpy as np

from fathom.bench.rig.fleet.messages import RawKind, RawOpenCall


class RawSender(Protocol):
    """Sends one flat buffer to all receivers."""

    @property
    def invitation(self) -> bytes:
        """What receivers have to know of it."""
        ...

    def join(self, addresses: Sequence[bytes]) -> None:
        """Connect to all receivers, which do the same at this moment."""
        ...

    def send(self) -> None:
        """Return when every receiver has the bytes, as far as the library tells."""
        ...

    def close(self) -> None:
        """Let go of connections and registrations."""
        ...


class RawReceiver(Protocol):
    """Receives it."""

    @property
    def address(self) -> bytes:
        """How it is reached."""
        ...

    def join(self) -> None:
        """Connect, where the library needs both ends for that."""
        ...

    def receive(self) -> None:
        """Return when the bytes are there; at once where the sender writes without help."""
        ...

    def close(self) -> None:
        """Let go of connections and registrations."""
        ...


def open_sender(kind: RawKind, buffer: np.ndarray, receivers: int, host: str) -> RawSender:
    """The sending end. `buffer` is uint8 [size], contiguous, and stays where it is. Raises ImportError."""
    return _SENDERS[kind](buffer, receivers, host)


def open_receiver(call: RawOpenCall, buffer: np.ndarray) -> RawReceiver:
    """The receiving end. `buffer` is uint8 [call.size_bytes]. Raises ImportError."""
    return _RECEIVERS[call.kind](call, buffer)


def available(kind: RawKind) -> bool:
    """Whether its library is installed."""
    return find_spec(_MODULES[kind]) is not None


def _gloo_sender(buffer: np.ndarray, receivers: int, host: str) -> RawSender:
    from fathom.bench.rig.fleet.raw.gloo import GlooSender

    return GlooSender(buffer, receivers, host)


def _nixl_sender(buffer: np.ndarray, receivers: int, host: str) -> RawSender:
    from fathom.bench.rig.fleet.raw.nixl import NixlSender

    return NixlSender(buffer, host)


def _mooncake_sender(buffer: np.ndarray, receivers: int, host: str) -> RawSender:
    from fathom.bench.rig.fleet.raw.mooncake import MooncakeSender

    return MooncakeSender(buffer, host)


def _gloo_receiver(call: RawOpenCall, buffer: np.ndarray) -> RawReceiver:
    from fathom.bench.rig.fleet.raw.gloo import GlooReceiver

    return GlooReceiver(call, buffer)


def _nixl_receiver(call: RawOpenCall, buffer: np.ndarray) -> RawReceiver:
    from fathom.bench.rig.fleet.raw.nixl import NixlReceiver

    return NixlReceiver(call, buffer)


def _mooncake_receiver(call: RawOpenCall, buffer: np.ndarray) -> RawReceiver:
    from fathom.bench.rig.fleet.raw.mooncake import MooncakeReceiver

    return MooncakeReceiver(call, buffer)


_MODULES = {RawKind.GLOO: "torch", RawKind.NIXL: "nixl_cu12", RawKind.MOONCAKE: "mooncake"}
_SENDERS: dict[RawKind, Callable[[np.ndarray, int, str], RawSender]] = {
    RawKind.GLOO: _gloo_sender,
    RawKind.NIXL: _nixl_sender,
    RawKind.MOONCAKE: _mooncake_sender,
}
_RECEIVERS: dict[RawKind, Callable[[RawOpenCall, np.ndarray], RawReceiver]] = {
    RawKind.GLOO: _gloo_receiver,
    RawKind.NIXL: _nixl_receiver,
    RawKind.MOONCAKE: _mooncake_receiver,
}

"""What a receiving rank and a source rank say to each other."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from fathom.core.ids import EngineId, PolicyVersion
from fathom.sync.shards import Box


class Hello(msgspec.Struct, frozen=True, tag="peer_hello.1"):
    """First message of the receiving rank, and a short one: nothing else is read before the token is right."""

    token: str
    """The offer's token."""


class Place(msgspec.Struct, frozen=True, tag="peer_place.1"):
    """Where one piece has to go."""

    name: str
    """The tensor."""
    box: Box
    """Which part of it; its bytes are written in row-major order of this box."""
    address: int
    """First byte, in the receiving rank's registered memory."""


class Ask(msgspec.Struct, frozen=True, tag="peer_ask.1"):
    """The receiving rank asks for pieces. Then it only waits; closing its sending half means: stop."""

    engine: EngineId
    """Whose rank."""
    rank: int
    """Which rank of the engine."""
    version: PolicyVersion
    """What it wants."""
    fabric: bytes
    """Description of its registered memory, for the fabric."""
    places: tuple[Place, ...]
    """Every piece."""


class Done(msgspec.Struct, frozen=True, tag="peer_done.1"):
    """Every piece was written."""

    moved_bytes: int
    """Bytes of all pieces."""


class FailureKind(StrEnum):
    """Whose fault it is."""

    TRANSFER = "transfer"
    """The way between the two ranks."""
    PAYLOAD = "payload"
    """What is held is not what was asked for."""


class Failed(msgspec.Struct, frozen=True, tag="peer_failed.1"):
    """Not every piece was written, and nothing of it is being written any more."""

    kind: FailureKind
    """Whose fault."""
    reason: str
    """What happened."""
    suspects: tuple[str, ...] = ()
    """Tensors of which at least one did not arrive whole. Empty: nothing was written."""


Answer = Done | Failed
"""What the source says at the end."""

"""What a bench says to a receiver's process, besides the calls of the weight half of the engine port.

Each is one frame of `core/wire.py` on standard input, answered by one on standard output, in order.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from fathom.core.ports.engine import Capabilities, CommitReport, StageReport, VerifyReport
from fathom.rollout.engines.embedded.messages import CommitCall, Done, Failure, RollbackCall, StageCall, VerifyCall


class RawKind(StrEnum):
    """A library that moves bytes."""

    GLOO = "Gloo"
    """One broadcast of `torch.distributed` to all."""
    NIXL = "NIXL"
    """One write into the registered memory of each, all at once. Both ends let the library work."""
    MOONCAKE = "Mooncake"
    """The same by the Mooncake Transfer Engine."""

    @property
    def both_ends(self) -> bool:
        """True: receivers take part in a transfer. False: the sender writes into their memory."""
        return self is not RawKind.MOONCAKE


class TensorForm(msgspec.Struct, frozen=True, tag="bench_form.1"):
    """A tensor without its bytes."""

    name: str
    """Canonical parameter name."""
    dtype: str
    """Element type as safetensors writes it."""
    shape: tuple[int, ...]
    """Sizes of the dimensions."""


class OpenCall(msgspec.Struct, frozen=True, tag="bench_open.1"):
    """Be a receiver that holds nothing yet; what was held before is dropped. Answered by `Opened`."""

    forms: tuple[TensorForm, ...]
    """What will be published."""
    shards: int
    """Ranks of the receiver, each with memory of its own and a slice of every matrix. 1: it is whole."""
    storage_bytes_per_s: float | None
    """Speed of the simulated storage that files are read from. None: as it is."""


class Opened(msgspec.Struct, frozen=True, tag="bench_opened.1"):
    """The receiver is there."""

    capabilities: Capabilities
    """What it can do."""


class CloseCall(msgspec.Struct, frozen=True, tag="bench_close.1"):
    """Drop the receiver and its memory. Answered by `Done`."""


class RawOpenCall(msgspec.Struct, frozen=True, tag="bench_raw_open.1"):
    """Make a flat buffer ready for one library. Answered by `RawOpened`."""

    kind: RawKind
    """Which library."""
    rank: int
    """Place among the processes; the sender is 0."""
    ranks: int
    """Processes, sender included."""
    size_bytes: int
    """Bytes of the buffer."""
    host: str
    """Address to be reached at."""
    invitation: bytes
    """What the sender says of itself, by the library."""


class RawOpened(msgspec.Struct, frozen=True, tag="bench_raw_opened.1"):
    """The buffer is there."""

    address: bytes
    """How it is reached, by the library."""


class RawJoinCall(msgspec.Struct, frozen=True, tag="bench_raw_join.1"):
    """Connect; the sender does the same at this moment. Answered by `Done`."""


class RawReceiveCall(msgspec.Struct, frozen=True, tag="bench_raw_receive.1"):
    """Take part in one transfer, where the library needs that, and say what arrived. Answered by `RawReceived`."""


class RawReceived(msgspec.Struct, frozen=True, tag="bench_raw_received.1"):
    """The buffer after a transfer."""

    first: int
    """Its first byte."""
    last: int
    """Its last byte."""


class RawCloseCall(msgspec.Struct, frozen=True, tag="bench_raw_close.1"):
    """Drop the buffer and the connection. Answered by `Done`."""


Call = (
    OpenCall
    | CloseCall
    | StageCall
    | VerifyCall
    | CommitCall
    | RollbackCall
    | RawOpenCall
    | RawJoinCall
    | RawReceiveCall
    | RawCloseCall
)
Answer = Opened | StageReport | VerifyReport | CommitReport | RawOpened | RawReceived | Done | Failure

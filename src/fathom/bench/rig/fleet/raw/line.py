"""A raw transfer from this process to all receivers, round by round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Self, final

import numpy as np

from fathom.bench.rig.fleet.messages import RawKind, RawOpenCall
from fathom.bench.rig.fleet.raw.link import RawSender, open_sender
from fathom.bench.rig.fleet.receiver_process import ReceiverProcess
from fathom.core.errors import NoProgressError


@final
class RawLine:
    """One flat buffer here and one at each receiver, connected."""

    def __init__(
        self, kind: RawKind, buffer: np.ndarray, sender: RawSender, receivers: Sequence[ReceiverProcess]
    ) -> None:
        self._kind = kind
        self._buffer = buffer
        self._sender = sender
        self._receivers = receivers
        self._round = 0

    @classmethod
    async def open(cls, kind: RawKind, receivers: Sequence[ReceiverProcess], size_bytes: int, host: str) -> Self:
        """Connect. Raises ImportError or EngineError."""
        buffer = np.ones(size_bytes, np.uint8)  # zeros would be read from one page that the system has, and cached
        sender = open_sender(kind, buffer, len(receivers), host)
        calls = [
            RawOpenCall(
                kind=kind,
                rank=rank,
                ranks=len(receivers) + 1,
                size_bytes=size_bytes,
                host=receiver.host,
                invitation=sender.invitation,
            )
            for rank, receiver in enumerate(receivers, start=1)
        ]
        addresses = await asyncio.gather(*(r.raw_open(call) for r, call in zip(receivers, calls, strict=True)))
        await asyncio.gather(asyncio.to_thread(sender.join, addresses), *(r.raw_join() for r in receivers))
        return cls(kind, buffer, sender, receivers)

    async def round(self) -> float:
        """Seconds until all have the bytes. Raises NoProgressError when one has others."""
        self._round = self._round % 255 + 1
        self._buffer[0] = self._buffer[-1] = self._round
        began = time.perf_counter()
        sending = asyncio.create_task(asyncio.to_thread(self._sender.send))
        if not self._kind.both_ends:
            await sending
        seconds = time.perf_counter() - began
        received = await asyncio.gather(*(receiver.raw_receive() for receiver in self._receivers))
        if self._kind.both_ends:
            await sending
            seconds = time.perf_counter() - began
        for receiver, end in zip(self._receivers, received, strict=True):
            if (end.first, end.last) != (self._round, self._round):
                raise NoProgressError(f"{receiver.id} did not get round {self._round} of a raw transfer")
        return seconds

    async def close(self) -> None:
        """Disconnect."""
        self._sender.close()
        await asyncio.gather(*(receiver.raw_close() for receiver in self._receivers))

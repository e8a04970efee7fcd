"""What one receiving rank has asked of several sources, until each has answered."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from fathom.core.manifest import PeerRank
from fathom.sync.transports.p2p.line import Line, LineError
from fathom.sync.transports.p2p.messages import Answer, Ask, Failed, FailureKind, Hello
from fathom.sync.transports.p2p.plan import Piece

_CONNECT_S, _SEND_S = 10.0, 30.0
_ANSWER_S, _ANSWER_BYTES = 10.0, 16 << 20
_POLL_S = 0.0005


class BrokenTransferError(Exception):
    """A source did not deliver. `suspects` are tensors of which at least one is not whole; empty: nothing came."""

    def __init__(self, reason: str, suspects: Sequence[str] = (), *, payload: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.suspects = tuple(suspects)
        self.payload = payload
        """The source says that the version itself is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """One source, and what it has to send."""

    name: str
    line: Line
    pieces: Sequence[Piece]

    @property
    def tensors(self) -> list[str]:
        return list(dict.fromkeys(piece.name for piece in self.pieces))

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


@final
class Asking:
    """Connections to the sources of one transfer."""

    def __init__(self, stop_s: float) -> None:
        """A source may take `stop_s` to stop when it is told to."""
        self._stop_s = stop_s
        self._pending: dict[int, _Asked] = {}

    def connect(self, number: int, source: PeerRank, pieces: Sequence[Piece]) -> str:
        """Reach a source; returns the address under which it reaches us. Raises `BrokenTransferError`."""
        name = f"source rank {number} ({source.host} port {source.port})"
        try:
            line = Line.connect(source.host, source.port, _CONNECT_S)
            self._pending[number] = _Asked(name=name, line=line, pieces=pieces)
            line.send(Hello(source.token), _SEND_S)
        except LineError as error:
            raise BrokenTransferError(f"{name} {error}") from error
        return line.own_host

    def ask(self, number: int, message: Ask) -> None:
        """Let a source begin. Raises `BrokenTransferError`."""
        asked = self._pending[number]
        try:
            asked.line.send(message, _SEND_S)
        except LineError as error:
            raise BrokenTransferError(f"{asked.name} {error}") from error

    def wait(self, progress: Callable[[], None], stop: Callable[[], str | None]) -> int:
        """Return, when all sources have written everything, the bytes. `progress` lets the fabric work meanwhile.

        Raises:
            BrokenTransferError: one failed, left, wrote another number of bytes, or `stop` said why not to go on.
        """
        moved_bytes = 0
        while self._pending:
            if (reason := stop()) is not None:
                names = ", ".join(asked.name for asked in self._pending.values())
                suspects = [name for asked in self._pending.values() for name in asked.tensors]
                raise BrokenTransferError(f"{names}: {reason}", suspects)
            for number in self._ready(progress):
                moved_bytes += self._take(number)
        return moved_bytes

    def halt(self, progress: Callable[[], None]) -> bool:
        """Tell all that have not answered to stop. False: one did not say that it did; it may still write."""
        deadline = time.monotonic() + self._stop_s
        for asked in self._pending.values():
            asked.line.finish()
        while self._pending and time.monotonic() < deadline:
            for number in self._ready(progress):
                self._pending.pop(number).line.close()  # whatever it says, or that it left: it writes no more
        stopped = not self._pending
        for asked in self._pending.values():
            asked.line.close()
        self._pending.clear()
        return stopped

    def _ready(self, progress: Callable[[], None]) -> list[int]:
        """Sources that have something to say, after a moment."""
        progress()
        with selectors.DefaultSelector() as selector:
            for number, asked in self._pending.items():
                selector.register(asked.line, selectors.EVENT_READ, number)
            return [key.data for key, _ in selector.select(_POLL_S)]

    def _take(self, number: int) -> int:
        """The answer of a source; it is pending no longer."""
        asked = self._pending.pop(number)
        try:
            answer: Answer = asked.line.receive(Answer, _ANSWER_BYTES, _ANSWER_S)
        except LineError as error:
            raise BrokenTransferError(f"{asked.name} {error}", asked.tensors) from error
        finally:
            asked.line.close()
        if isinstance(answer, Failed):
            payload = answer.kind is FailureKind.PAYLOAD
            raise BrokenTransferError(f"{asked.name}: {answer.reason}", answer.suspects, payload=payload)
        if answer.moved_bytes != asked.size_bytes:
            reason = f"{asked.name} wrote {answer.moved_bytes} of {asked.size_bytes} bytes"
            raise BrokenTransferError(reason, asked.tensors)
        return answer.moved_bytes

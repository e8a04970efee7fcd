"""The control connection of a transfer: one message after the other, each with a deadline and a size limit."""

from __future__ import annotations

import select
import socket
import time
from typing import Any, final

import msgspec

_LENGTH_BYTES = 4


class LineError(Exception):
    """The other side left, was silent for too long, or said something that is no message."""


@final
class Line:
    """One connected socket. A message is its length (32 bits, big-endian) and that many bytes of msgpack."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    @classmethod
    def connect(cls, host: str, port: int, timeout_s: float) -> Line:
        """Raises `LineError` when nobody listens there, or not in time."""
        try:
            return cls(socket.create_connection((host, port), timeout_s))
        except OSError as error:
            raise LineError(f"cannot be reached ({error})") from error

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    @property
    def own_host(self) -> str:
        """Address under which the other side reaches this machine."""
        return str(self._socket.getsockname()[0])

    def send(self, message: msgspec.Struct, timeout_s: float) -> None:
        """Raises `LineError` when the other side has left or does not read."""
        body = msgspec.msgpack.encode(message)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
        except OSError as error:
            raise LineError(f"has left ({error})") from error

    def receive(self, kind: Any, limit_bytes: int, timeout_s: float) -> Any:
        """The next message, of type `kind`.

        Raises:
            LineError: none came in time, it is longer than the limit, or of another type.
        """
        deadline = time.monotonic() + timeout_s
        try:
            length = int.from_bytes(self._exactly(_LENGTH_BYTES, deadline), "big")
            if length > limit_bytes:
                raise LineError(f"announced {length} bytes where {limit_bytes} are the most")
            return msgspec.msgpack.decode(self._exactly(length, deadline), type=kind)
        except TimeoutError as error:
            raise LineError(f"was silent for {timeout_s:g} s") from error
        except OSError as error:
            raise LineError(f"has left ({error})") from error
        except msgspec.MsgspecError as error:
            raise LineError(f"sent something else than was expected ({error})") from error

    @property
    def left(self) -> bool:
        """True when the other side sends nothing any more. Only while no message is expected."""
        try:
            look = select.poll()
            look.register(self._socket, select.POLLIN)
            return bool(look.poll(0)) and not self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def finish(self) -> None:
        """Say that nothing more will be sent."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # it has left already
            return

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _exactly(self, size_bytes: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size_bytes:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._socket.recv(min(size_bytes - len(data), 1 << 20))
            if not part:
                raise LineError("has left without an answer")
            data += part
        return bytes(data)

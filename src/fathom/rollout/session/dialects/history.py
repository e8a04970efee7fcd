"""The part of a request that a session has read before: agents send their whole history with each call.

    last call    [{...}, {...}                           ]
    this call    [{...}, {...}, {answer}, {what is new}]
                  known by its digest    read

So what a turn costs follows what is new in it. Whatever is not as expected is read as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, final

import msgspec
from blake3 import blake3

from fathom.core.records.message import Message, Tool
from fathom.rollout.session.call import CallRefusedError

_Terms = TypeVar("_Terms")
_Asked = TypeVar("_Asked")
Settle = Callable[[Sequence[Message], Sequence[Tool]], tuple[Message, ...]]
Keep = Callable[[Sequence[Message], Sequence[Message], Sequence[Tool]], tuple[Message, ...]]
"""See `History.keep`."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@final
class History:
    """Of one session: the messages of its last request, and a digest of the bytes that said them."""

    def __init__(self, settle: Settle) -> None:
        """`settle`: gives equal messages as the objects that the session keeps."""
        self._settle = settle
        self._messages: tuple[Message, ...] = ()
        self._size_bytes = 0
        self._digest = b""
        self._api = ""
        self._read: tuple[int, bytes] | None = None

    def shortened(self, body: bytes, api: str, name: str = "messages") -> tuple[bytes, tuple[Message, ...]]:
        """The body without what is known of its messages, and what stands for that.

        Args:
            body: a request; may be anything.
            api: what reads it: the same bytes may be other messages for another.
            name: the field of the body that holds them.
        """
        self._read = None
        if api != self._api:
            self._api, self._size_bytes = api, 0
        try:
            fields = _FIELDS.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            return body, ()
        said = memoryview(fields.get(name, b""))
        if bytes(said[:1]) != b"[" or bytes(said[-1:]) != b"]":
            return body, ()
        end = min(self._size_bytes, len(said) - 1)
        digest, after = blake3(said[:end]), bytes(said[end : end + 1])
        is_known = 0 < end == self._size_bytes and digest.digest() == self._digest and after in (b",", b"]")
        self._read = len(said) - 1, digest.update(said[end:-1]).digest()  # all but the closing bracket
        if not is_known:
            return body, ()
        new = b"[" + bytes(said[end + 1 :]) if after == b"," else b"[]"
        return msgspec.json.encode(fields | {name: msgspec.Raw(new)}), self._messages

    def keep(
        self, before: Sequence[Message], messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Message, ...]:
        """A whole conversation, as the objects that the session keeps.

        Args:
            before: what precedes the messages of the body that was given last.
            messages: the messages of that body.
            tools: that may be called.
        """
        settled = self._settle((*before, *messages), tools)
        if self._read is not None:
            self._messages, (self._size_bytes, self._digest) = settled[len(before) :], self._read
            self._read = None
        return settled


def read_on(
    read: Callable[[bytes, _Terms, tuple[Message, ...], Keep], _Asked],
    body: bytes,
    terms: _Terms,
    history: History | None,
    api: str,
    name: str = "messages",
) -> _Asked:
    """A request, read from where the last one ended if there is a history.

    Args:
        read: reads a body behind the messages that are known, and says what the conversation is.
        body: the request.
        terms: for `read`.
        history: the session's, or None.
        api: names `read`.
        name: the field of the body that holds the messages.

    Raises:
        CallRefusedError: as `read`; it names places in the whole body.
    """
    if history is None:
        return read(body, terms, (), _joined)
    shortened, known = history.shortened(body, api, name)
    try:
        return read(shortened, terms, known, history.keep)
    except CallRefusedError:
        if not known:
            raise
    return read(body, terms, (), history.keep)


def _joined(before: Sequence[Message], messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Message, ...]:
    return (*before, *messages)

"""What a dialect is: an API's paths, its way to ask, to answer and to refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from fathom.core.records.sampling import SamplingParams
from fathom.rollout.session.call import CallRefusedError, Refusal, TurnBegan, TurnCall, TurnEnded
from fathom.rollout.session.dialects.history import History
from fathom.text.chat.deltas import Delta

STATUS: Mapping[Refusal, int] = {
    Refusal.INVALID: 400,
    Refusal.UNSUPPORTED: 400,
    Refusal.CONTEXT_FULL: 400,
    Refusal.NO_TURNS_LEFT: 400,
    Refusal.NO_TOKENS_LEFT: 400,
    Refusal.UNKNOWN_KEY: 401,
    Refusal.UNKNOWN_PATH: 404,
    Refusal.CONFLICT: 409,
    Refusal.ENDED: 410,
    Refusal.TOO_LARGE: 413,
    Refusal.INTERNAL: 500,
    Refusal.ENGINE_FAILED: 503,
}
"""HTTP status of each refusal, as the official clients understand it."""

RETRIED = frozenset({Refusal.ENGINE_FAILED})
"""Refusals after which the same call may be answered. Clients are told not to repeat any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What holds for every request of a session."""

    sampling: SamplingParams
    """The distribution, where a request does not override it."""
    ignored: frozenset[str] = frozenset()
    """Parameters that are left out of requests though they would change the answer, by name, at the user's wish."""


class Writer(Protocol):
    """Writes one answer. Either `whole` is called, or the others in the order in which they are heard."""

    def whole(self, ended: TurnEnded) -> bytes:
        """The body of a reply that is not streamed."""
        ...

    def begin(self, began: TurnBegan) -> bytes:
        """The first events of a stream."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """Events for what became known. May be empty."""
        ...

    def end(self, ended: TurnEnded) -> bytes:
        """The last events."""
        ...

    def fail(self, error: CallRefusedError) -> bytes:
        """The last events of a stream that broke off."""
        ...

    def wait(self) -> bytes:
        """What keeps a silent stream alive; clients ignore it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, read."""

    call: TurnCall
    """What is asked of the session."""
    stream: bool
    """Answer as a stream of events."""
    writer: Writer
    """Writes the answer."""


class Dialect(Protocol):
    """One API."""

    def read(self, body: bytes, terms: Terms, history: History | None = None) -> Asked:
        """A request. `history`: the session's, so that not all of it is read again; None: there is none.

        Raises CallRefusedError when it cannot be honoured, naming the parameter.
        """
        ...

    def refusal(self, error: CallRefusedError) -> bytes:
        """The body of a reply that says no."""
        ...


def event(data: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event. `name`: its type; empty: none is sent."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"

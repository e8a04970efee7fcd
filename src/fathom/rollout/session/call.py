"""What an agent asks of a session, and what it hears, in no dialect of any API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from fathom.core.records.message import Message, Tool
from fathom.core.records.sampling import FinishReason, SamplingParams
from fathom.text.chat.deltas import Delta


class Refusal(StrEnum):
    """Why a call is not answered."""

    INVALID = "invalid_request"
    """It contradicts itself, or the chat template refuses it. Sending it again changes nothing."""
    UNSUPPORTED = "unsupported_parameter"
    """It asks for what cannot be honoured. Sending it again changes nothing."""
    TOO_LARGE = "request_too_large"
    """Its body has more bytes than are read."""
    UNKNOWN_PATH = "not_found"
    """Nothing is served there."""
    UNKNOWN_KEY = "invalid_api_key"
    """Its key names no session."""
    CONTEXT_FULL = "context_length_exceeded"
    """The conversation leaves no room for an answer."""
    NO_TURNS_LEFT = "max_turns_reached"
    """The session has had its turns."""
    NO_TOKENS_LEFT = "max_tokens_reached"
    """The session has sampled its tokens."""
    CONFLICT = "idempotency_conflict"
    """Another call was sent with this idempotency key."""
    ENDED = "session_ended"
    """The session was closed."""
    ENGINE_FAILED = "engine_failed"
    """The engine failed; the call may be sent again."""
    INTERNAL = "internal_error"
    """Something broke here. The trajectory has failed."""


class CallRefusedError(Exception):
    """The call cannot be answered as asked; the session is as before.

    `param` names what is wrong with the request, as the agent called it; empty: nothing in particular.
    """

    def __init__(self, kind: Refusal, reason: str, param: str = "") -> None:
        super().__init__(reason)
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCall:
    """One request for an answer."""

    messages: tuple[Message, ...]
    """The whole conversation so far; at least one message."""
    tools: tuple[Tool, ...] = ()
    """Tools that may be asked for. Empty: none."""
    max_new_tokens: int | None = None
    """Tokens that may be sampled. None: as many as the session allows."""
    sampling: SamplingParams | None = None
    """The distribution. None: the session's."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end the answer; not told to the agent."""
    retry: str = field(default="", compare=False)
    """Calls with the same one are the same call, sent again. Empty: only an answer that nobody heard is given again."""
    resent: bool = field(default=False, compare=False)
    """The client says that it sent this call before. Then an answer that was sent is given again, too: it was lost on
    its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnBegan:
    """The first that is heard of an answer: the call was accepted."""

    prompt_tokens: int
    """Tokens of its context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded:
    """The last that is heard of an answer."""

    message: Message
    """All of it."""
    finish_reason: FinishReason
    """Why it ended."""
    prompt_tokens: int
    """Tokens of its context."""
    cached_tokens: int
    """Of those, tokens whose keys and values were there already."""
    sampled_tokens: int
    """Tokens of it, the one that ends it included."""
    by_stop_string: bool = False
    """It ended because one of the call's stop strings was said."""


Heard = TurnBegan | Delta | TurnEnded


class Renderer(Protocol):
    """Messages to ids, by a model's template. `text/chat/renderer.py` is the real one."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> np.ndarray:
        """int32 [P]: a whole conversation, opened for the assistant's answer. Raises DataError when refused."""
        ...

    def extend(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], last_token: int | None
    ) -> np.ndarray:
        """int32 [R]: what goes behind a sampled answer, so that the model may answer again.

        Args:
            before: the conversation, the sampled answer being its last message.
            new: what was said since; no assistant.
            tools: as in `render`.
            last_token: the last sampled id. None: nothing was sampled.

        Raises:
            NotAppendableError: by this template the conversation can only be rendered as a whole.
            DataError: the template refuses it.
        """
        ...


class Reader(Protocol):
    """Sampled ids to an answer, as they arrive. One answer long. Nothing sampled can make it raise."""

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """What these ids make known."""
        ...

    def end(self, finish_reason: FinishReason) -> tuple[list[Delta], Message]:
        """What was held back, and the whole answer."""
        ...


class Reads(Protocol):
    """Makes readers."""

    def reader(self, tools: Sequence[Tool], stop_strings: Sequence[str], turn: str) -> Reader:
        """One for the next answer, of the turn of that name. Text from a stop string on is not told."""
        ...

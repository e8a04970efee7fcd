"""What an agent asks of a session, and what it hears, in no dialect of any API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fathom.core.records.message import Message, Tool
from fathom.core.records.sampling import FinishReason, SamplingParams
from fathom.text.chat.deltas import Delta


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
    retry: str = ""
    """Calls with the same one are the same call, sent again. Empty: only an answer that nobody heard is given again."""


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


Heard = Delta | TurnEnded


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

    def reader(self, tools: Sequence[Tool], stop_strings: Sequence[str]) -> Reader:
        """One for the next answer. Text from a stop string on is not told."""
        ...

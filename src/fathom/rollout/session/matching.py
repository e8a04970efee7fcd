"""Which conversation a request goes on with: the message prefixes that a session knows, by digest.

Agents send their whole history with each call, and not always as they got it: tool arguments are written anew, the
reasoning is left out. So a prefix is looked up three times, from the strictest reading to the loosest, and how it was
found is part of the record.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import final

import msgspec
from blake3 import blake3

from fathom.core.records.message import Message, Tool, ToolCall


class Strictness(StrEnum):
    """How two messages were compared, the strictest first."""

    EXACT = "exact"
    """Every field is equal."""
    JSON = "json"
    """Equal, the arguments of tool calls read as JSON."""
    CONTENT = "content"
    """Role, content without whitespace at its ends, and tool calls by name and arguments as JSON. What the model
    thought, the names of calls and of speakers are not compared."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest known prefix of a request."""

    place: int
    """What was remembered for it."""
    messages: int
    """Messages that it covers."""
    strictness: Strictness
    """The strictest reading by which it is equal."""


@final
class Prefixes:
    """Conversations that a session knows. Cost of a look-up: that of comparing the history with the last one's."""

    def __init__(self) -> None:
        self._places: dict[Strictness, dict[bytes, int]] = {strictness: {} for strictness in Strictness}
        self._chain = _Chain()

    def find(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Match | None:
        """The longest prefix of `messages` that is known with these tools; of equal ones, the strictest reading."""
        best: Match | None = None
        for strictness, chain in self._chain.of(messages, tools).items():
            known = self._places[strictness]
            for count in range(len(messages), best.messages if best else 0, -1):
                if (place := known.get(chain[count])) is not None:
                    best = Match(place=place, messages=count, strictness=strictness)
                    break
            if best is not None and best.messages == len(messages):
                break
        return best

    def remember(self, messages: Sequence[Message], tools: Sequence[Tool], place: int) -> None:
        """From now on the whole of `messages` leads to `place`, and no longer to what it led to before."""
        for strictness, chain in self._chain.of(messages, tools).items():
            self._places[strictness][chain[-1]] = place

    def identity(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bytes:
        """Equal for equal conversations with equal tools."""
        return self._chain.of(messages, tools)[Strictness.EXACT][-1]

    def settled(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Message, ...]:
        """Equal messages, those that the last conversation began with as its own objects: kept and compared once."""
        self._chain.of(messages, tools)
        return tuple(self._chain.messages)


@final
class _Chain:
    """Digests of all prefixes of the last conversation: of the next one only what is new is digested."""

    def __init__(self) -> None:
        self._tools: tuple[Tool, ...] = ()
        self.messages: list[Message] = []
        """The last conversation's."""
        self._digests = _first_digests(())

    def of(self, messages: Sequence[Message], tools: Sequence[Tool]) -> dict[Strictness, list[bytes]]:
        """For each reading, the strictest first, one digest for each number of messages, from none to all."""
        if tuple(tools) != self._tools:
            self._tools, self.messages = tuple(tools), []
            self._digests = _first_digests(self._tools)
        same = _equal(self.messages, messages)
        for strictness, digests in self._digests.items():
            del digests[same + 1 :]
            for message in messages[same:]:
                digests.append(_digest(digests[-1], _reading(message, strictness)))
        self.messages[same:] = messages[same:]
        return self._digests


def _first_digests(tools: tuple[Tool, ...]) -> dict[Strictness, list[bytes]]:
    return {strictness: [_digest(b"", msgspec.json.encode(tools))] for strictness in Strictness}


def _equal(known: Sequence[Message], given: Sequence[Message]) -> int:
    """Messages at the beginning that are equal. Those that are the same objects cost next to nothing."""
    if len(known) <= len(given) and tuple(known) == tuple(given[: len(known)]):
        return len(known)
    for place, (one, other) in enumerate(zip(known, given, strict=False)):
        if one is not other and one != other:
            return place
    return min(len(known), len(given))


def _digest(before: bytes, reading: bytes) -> bytes:
    return blake3(before + reading).digest()


def _reading(message: Message, strictness: Strictness) -> bytes:
    match strictness:
        case Strictness.EXACT:
            return msgspec.json.encode(message)
        case Strictness.JSON:
            calls = tuple((call.id, *_call(call)) for call in message.tool_calls)
            fields = (message.role, message.content, message.reasoning, calls, message.tool_call_id, message.name)
            return msgspec.json.encode(fields)
        case Strictness.CONTENT:
            calls = tuple(_call(call) for call in message.tool_calls)
            return msgspec.json.encode((message.role, message.content.strip(), calls))


def _call(call: ToolCall) -> tuple[str, str]:
    parsed = call.parsed
    try:
        return call.name, call.arguments if parsed is None else json.dumps(parsed, sort_keys=True)
    except RecursionError:
        return call.name, call.arguments

"""Readers of sampled answers, for one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import msgspec
from blake3 import blake3

from fathom.core.records.message import Message, Role, Tool, ToolCall
from fathom.core.records.sampling import FinishReason
from fathom.text.chat.deltas import Delta, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallBegun
from fathom.text.chat.reading.answer import MarkedAnswer
from fathom.text.chat.reading.calls import CallReader, Named, Part, Spoken, Thought, Written
from fathom.text.chat.reading.channels import ChannelAnswer
from fathom.text.chat.reading.json_call import JsonCall
from fathom.text.chat.reading.marked_call import MarkedCall
from fathom.text.chat.reading.spelling import Spelling
from fathom.text.chat.reading.stops import Stops
from fathom.text.chat.reading.tagged_call import TaggedCall
from fathom.text.chat.reading.written import (
    CallsWritten,
    ChannelCalls,
    JsonCalls,
    MarkedCalls,
    TaggedCalls,
    ThoughtsWritten,
    marks_of,
)
from fathom.text.tokenizer import Tokenizer

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_ID_LENGTH = 9


class _Answer(Protocol):
    def feed(self, text: str) -> list[Part]: ...

    def end(self) -> list[Part]: ...


@final
class TurnReaders:
    """Makes readers. Formats are what was learned from the template (`TemplateProperties.calls`, `.thoughts`)."""

    def __init__(self, tokenizer: Tokenizer, calls: CallsWritten | None, thoughts: ThoughtsWritten | None) -> None:
        """`calls`, `thoughts`: None: answers are text."""
        self._tokenizer = tokenizer
        self._calls = calls
        self._thoughts = thoughts
        marks = marks_of(calls, thoughts)
        stops = tokenizer.special.stop_ids
        texts = {**tokenizer.special_ids, **{token_id: tokenizer.decode_token(token_id) for token_id in stops}}
        self._shown = {token_id: text if text in marks else "" for token_id, text in texts.items()}

    def reader(self, tools: Sequence[Tool], stop_strings: Sequence[str], turn: str = "") -> TurnReader:
        """One for the next answer.

        Args:
            tools: what may be called. None: whatever looks like a call is text.
            stop_strings: text from one of them on is not told.
            turn: names the turn. Ids of calls follow from it and from what was sampled, so they are the same in a run
                that is repeated, and others in each turn.
        """
        spelling = Spelling(self._tokenizer, self._shown)
        return TurnReader(spelling, Stops(stop_strings), self._answer(tools), turn)

    def _answer(self, tools: Sequence[Tool]) -> _Answer:
        if isinstance(self._calls, ChannelCalls):
            return ChannelAnswer(self._calls, calls=bool(tools))
        new_call = self._new_call(tools) if tools else None
        opens, between = [], ""
        match self._calls:
            case JsonCalls(opens=mark) | TaggedCalls(opens=mark):
                opens = [mark] if mark else []
            case MarkedCalls():
                opens = [mark for mark in (self._calls.all_open, self._calls.opens) if mark]
                between = self._calls.all_close
            case _:
                pass
        return MarkedAnswer(self._thoughts, opens, between, new_call)

    def _new_call(self, tools: Sequence[Tool]) -> Callable[[], CallReader] | None:
        match self._calls:
            case JsonCalls() as written:
                names = frozenset(tool.name for tool in tools)
                return lambda: JsonCall(written, names)
            case MarkedCalls() as written:
                return lambda: MarkedCall(written)
            case TaggedCalls() as written:
                types = {tool.name: _types(tool) for tool in tools}
                return lambda: TaggedCall(written, types)
            case _:
                return None


@final
class TurnReader:
    """Reads one answer. The deltas of a kind, joined, are what the message holds, however the ids were cut."""

    def __init__(self, spelling: Spelling, stops: Stops, answer: _Answer, turn: str) -> None:
        """See `TurnReaders.reader`."""
        self._spelling = spelling
        self._stops = stops
        self._answer = answer
        self._turn = turn
        self._sampled: list[int] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []

    def feed(self, token_ids: Sequence[int]) -> list[Delta]:
        """What these ids make known."""
        deltas: list[Delta] = []
        for token_id in token_ids:  # one by one: the id of a call follows from the ids up to its name
            self._sampled.append(token_id)
            text = self._stops.feed(self._spelling.feed([token_id]))
            if text:
                deltas += map(self._told, self._answer.feed(text))
        return deltas

    def end(self, finish_reason: FinishReason) -> tuple[list[Delta], Message]:
        """What was held back, and the whole answer."""
        rest = self._stops.feed(self._spelling.end()) + self._stops.end()
        events = [*self._answer.feed(rest), *self._answer.end()]
        deltas = [self._told(event) for event in events]
        message = Message(
            role=Role.ASSISTANT,
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(
                ToolCall(id=call_id, name=name, arguments="".join(parts)) for call_id, name, parts in self._calls
            ),
        )
        return deltas, message

    def _told(self, event: Part) -> Delta:
        match event:
            case Spoken(text):
                self._content.append(text)
                return TextDelta(text)
            case Thought(text):
                self._reasoning.append(text)
                return ReasoningDelta(text)
            case Named(name):
                call_id = self._new_id()
                self._calls.append((call_id, name, []))
                return ToolCallBegun(len(self._calls) - 1, call_id, name)
            case Written(text):
                self._calls[-1][2].append(text)
                return ToolArgumentsDelta(len(self._calls) - 1, text)

    def _new_id(self) -> str:
        """Nine letters and digits: some templates take no others."""
        seen = f"{self._turn} {len(self._calls)} {self._sampled}"
        number = int.from_bytes(blake3(seen.encode()).digest(length=8), "little")
        letters = ""
        for _ in range(_ID_LENGTH):
            number, place = divmod(number, len(_LETTERS))
            letters += _LETTERS[place]
        return letters


def _types(tool: Tool) -> dict[str, str]:
    """JSON type by parameter, where the schema names a single one."""
    schema: Any = msgspec.json.decode(tool.parameters)
    properties: Any = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    found: dict[str, str] = {}
    for name, described in properties.items():
        kind: Any = described.get("type") if isinstance(described, dict) else None
        if isinstance(kind, str):
            found[str(name)] = kind
    return found

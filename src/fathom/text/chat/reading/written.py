"""How a template writes thoughts and calls of tools. Marks are without whitespace at their ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtsWritten:
    """What is thought stands between two marks at the beginning of an answer."""

    opens: str
    """Like `<think>`."""
    closes: str
    """Like `</think>`."""
    opened_by_prompt: bool
    """The prompt ends with `opens`: the answer begins with a thought."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """`<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`."""

    opens: str
    """Like `<tool_call>`. Empty: an answer that begins with such an object is a call."""
    closes: str
    """Like `</tool_call>`. Empty: the object's own end."""
    name_key: str
    """Key of the tool's name."""
    arguments_key: str
    """Key of the arguments."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedCalls:
    """Name and JSON arguments between marks: `<calls><call>NAME<sep>{...}</call></calls>`."""

    all_open: str
    """In front of the first call. May be empty."""
    opens: str
    """In front of a name."""
    between: str
    """Between name and arguments."""
    closes: str
    """Behind the arguments."""
    all_close: str
    """Behind the last call. May be empty."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """Each argument between tags of its own: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...`."""

    opens: str
    """In front of a call."""
    name_opens: str
    """In front of the name. Empty: it follows `opens`."""
    name_closes: str
    """Behind the name. Empty: the end of its line."""
    key_opens: str
    """In front of a key."""
    value_opens: str
    """Between key and value; parts of it may have whitespace between them."""
    value_closes: str
    """Behind a value."""
    lines: bool
    """A value stands on lines of its own: a newline in front and one behind are not part of it."""
    closes: str
    """Behind a call."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelCalls:
    """An answer is several messages with a channel each; calls are addressed to a tool (`harmony`)."""

    start: str = "<|start|>"
    """In front of a message's header, but for the first, which the prompt opened."""
    channel: str = "<|channel|>"
    """In front of a channel's name, in a header."""
    message: str = "<|message|>"
    """Between header and body."""
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")
    """Behind a body."""


CallsWritten = JsonCalls | MarkedCalls | TaggedCalls | ChannelCalls


def marks_of(calls: CallsWritten | None, thoughts: ThoughtsWritten | None) -> str:
    """All marks in one text: special tokens that appear in it mean something, and others are not shown."""
    match calls:
        case JsonCalls():
            marks = [calls.opens, calls.closes]
        case MarkedCalls():
            marks = [calls.all_open, calls.opens, calls.between, calls.closes, calls.all_close]
        case TaggedCalls():
            marks = [calls.opens, calls.name_opens, calls.name_closes, calls.key_opens]
            marks += [calls.value_opens, calls.value_closes, calls.closes]
        case ChannelCalls():
            marks = [calls.start, calls.channel, calls.message, *calls.ends]
        case None:
            marks = []
    if thoughts is not None:
        marks += [thoughts.opens, thoughts.closes]
    return "\n".join(marks)

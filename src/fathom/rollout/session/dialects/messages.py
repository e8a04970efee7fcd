"""Anthropic's Messages: reading."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, final

import msgspec

from fathom.core.records.message import Message, Role, Tool, ToolCall
from fathom.rollout.session.call import CallRefusedError, Refusal, TurnCall
from fathom.rollout.session.dialects.body import (
    at_least_one,
    not_text,
    read_body,
    sampling_of,
    schema,
    stop_strings,
    unsupported,
)
from fathom.rollout.session.dialects.dialect import Asked, Terms
from fathom.rollout.session.dialects.history import History, Keep, read_on
from fathom.rollout.session.dialects.messages_writer import MessagesWriter, anthropic_error, arguments_of

_CHANGES_NOTHING = ("metadata", "service_tier", "cache_control", "inference_geo")
_NEUTRAL: dict[str, Sequence[Any]] = {
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
    "mcp_servers": ([],),
}


class _Block(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message, of any type; which fields it has depends on that."""

    type: str
    text: str = ""
    thinking: str = ""
    signature: str | None = None
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: str | list[_Block] | None = None
    is_error: bool | None = None
    source: msgspec.Raw = msgspec.Raw()
    data: str | None = None
    title: str | None = None
    context: str | None = None
    cache_control: msgspec.Raw = msgspec.Raw()
    citations: list[msgspec.Raw] | None = None
    caller: msgspec.Raw = msgspec.Raw()


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: msgspec.Raw = msgspec.Raw()
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: msgspec.Raw = msgspec.Raw()


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Request(msgspec.Struct):
    model: str
    max_tokens: int
    messages: list[_Message]
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


@final
class Messages:
    """`POST /v1/messages`."""

    def read(self, body: bytes, terms: Terms, history: History | None = None) -> Asked:
        """See `Dialect.read`."""
        return read_on(self._read, body, terms, history, "messages")

    def _read(self, body: bytes, terms: Terms, known: tuple[Message, ...], keep: Keep) -> Asked:
        asked = read_body(body, _Request, terms, changes_nothing=_CHANGES_NOTHING, neutral=_NEUTRAL)
        system = _text(asked.system, "system", "\n")
        new = [each for at, given in enumerate(asked.messages) for each in _messages(given, f"messages[{at}]")]
        # A model that must call no tool is told of none, and nothing that it says is read as a call.
        tools = () if _no_tools(asked.tool_choice, terms) else _tools(asked.tools or (), terms)
        call = TurnCall(
            messages=keep((Message(role=Role.SYSTEM, content=system),) if system else (), (*known, *new), tools),
            tools=tools,
            max_new_tokens=at_least_one(asked.max_tokens, "max_tokens"),
            sampling=sampling_of(terms, temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k),
            stop_strings=stop_strings(asked.stop_sequences, "stop_sequences"),
        )
        writer = MessagesWriter(asked.model, call.stop_strings)
        return Asked(call=call, stream=bool(asked.stream), writer=writer)

    def refusal(self, error: CallRefusedError) -> bytes:
        """See `Dialect.refusal`."""
        return msgspec.json.encode(anthropic_error(error))


def _no_tools(choice: _Choice | None, terms: Terms) -> bool:
    if choice is None:
        return False
    if choice.type not in ("auto", "none"):
        raise unsupported("tool_choice.type", choice.type)
    if choice.disable_parallel_tool_use and "disable_parallel_tool_use" not in terms.ignored:
        raise unsupported("tool_choice.disable_parallel_tool_use", value=True)
    return choice.type == "none"


def _tools(given: Sequence[_Tool], terms: Terms) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for place, tool in enumerate(given):
        if tool.type not in (None, "custom") or not bytes(tool.input_schema):
            raise unsupported(f"tools[{place}].type", tool.type)
        if tool.strict and "strict" not in terms.ignored:
            raise unsupported(f"tools[{place}].strict", tool.strict)
        parameters = schema(bytes(tool.input_schema), f"tools[{place}].input_schema")  # a copy: the body is not kept
        tools.append(Tool(name=tool.name, description=tool.description or "", parameters=parameters))
    return tuple(tools)


def _messages(given: _Message, place: str) -> Iterator[Message]:
    if given.role == "assistant":
        yield _assistant(given.content, place)
    elif given.role == "system":
        yield Message(role=Role.SYSTEM, content=_text(given.content, place, "\n"))
    else:
        yield from _from_user(given.content, place)


def _assistant(content: str | Sequence[_Block], place: str) -> Message:
    """What it said in parts was one text."""
    if isinstance(content, str):
        return Message(role=Role.ASSISTANT, content=content)
    said, thought, calls = "", "", list[ToolCall]()
    for index, block in enumerate(content):
        match block.type:
            case "text":
                said += block.text
            case "thinking":
                thought += block.thinking
            case "tool_use":
                calls.append(ToolCall(id=block.id, name=block.name, arguments=_arguments(block.input, place)))
            case other:
                raise not_text(f"{place}.content[{index}].type", other)
    return Message(role=Role.ASSISTANT, content=said, reasoning=thought, tool_calls=tuple(calls))


def _arguments(given: msgspec.Raw, place: str) -> str:
    try:
        return arguments_of(json.loads(bytes(given)))
    except (ValueError, RecursionError) as error:
        reason = f"{place}: the input of a tool cannot be read as JSON: {error}"
        raise CallRefusedError(Refusal.INVALID, reason, place) from error


def _from_user(content: str | Sequence[_Block], place: str) -> Iterator[Message]:
    """Results of tools are messages of their own; what stands between them is the user's."""
    if isinstance(content, str):
        yield Message(role=Role.USER, content=content)
        return
    texts: list[str] = []
    for index, block in enumerate(content):
        where = f"{place}.content[{index}]"
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_result":
            if texts:
                yield Message(role=Role.USER, content="\n".join(texts))
                texts = []
            said = _text(block.content, where, "\n")
            yield Message(role=Role.TOOL, content=said, tool_call_id=block.tool_use_id)
        else:
            raise not_text(f"{where}.type", block.type)
    if texts or not content:
        yield Message(role=Role.USER, content="\n".join(texts))


def _text(content: str | Sequence[_Block] | None, place: str, between: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for index, block in enumerate(content):
        if block.type != "text":
            raise not_text(f"{place}.content[{index}].type", block.type)
    return between.join(block.text for block in content)

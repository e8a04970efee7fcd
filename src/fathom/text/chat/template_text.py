"""A conversation as its model's chat template writes it: text, not yet ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, final

import msgspec

from fathom.core.errors import DataError
from fathom.core.records.message import Message, Role, Tool, ToolCall
from fathom.text.chat.one_call_each import one_call_each
from fathom.text.chat_template import FAULTS, compile_template

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_PROBES = ("fathomvalue", "fathomother")
_THOUGHT = "fathomthought"
_QUESTION = Message(role=Role.USER, content="?")


@final
class TemplateText:
    """Writes messages by a template.

    Templates differ in what they want messages to look like. That is found out once, by trying: whether the arguments
    of a tool call are an object or text, under which key they read what was thought, whether they write more than one
    call in a message. Nothing that a model may have sampled makes a template fail that takes the same message well
    formed: arguments that are not an object, or hold half a character, are written as `{"_": TEXT}` where one is
    wanted, calls for which there is no room get messages of their own, and a thought is left out where a template
    refuses it beside other words.
    """

    def __init__(self, source: str, special: dict[str, str]) -> None:
        """`special`: texts of the special tokens by role, as the tokenizer names them. Raises ConfigError."""
        self._template = compile_template(source)
        self._special = special
        self.source = source
        """The template itself."""
        self.reasoning_key = _REASONING_KEYS[0]
        """Where messages carry what was thought."""
        self.calls_as = ""
        """How the arguments of a tool call are given: `mapping` or `text`. Empty: it writes no tool calls."""
        self.calls_at_once = True
        """It writes several calls of one message."""
        self.writes_reasoning = self._probe_reasoning()
        """It writes what was thought, at least in some places."""
        self.calls_as = self._probe_calls()
        self.calls_at_once = self._probe_several() if self.calls_as else True

    def write(self, messages: Sequence[Message], tools: Sequence[Tool], *, opened: bool) -> str:
        """The conversation. `opened`: the assistant's next answer begins at the end.

        Raises:
            DataError: the template refuses it.
        """
        given = messages if self.calls_at_once else one_call_each(messages)
        try:
            return self._write(given, tools, opened=opened)
        except DataError:
            spoken = [_without_a_thought_beside_words(message) for message in given]
            if spoken == list(given):
                raise
            return self._write(spoken, tools, opened=opened)

    def _write(self, messages: Sequence[Message], tools: Sequence[Tool], *, opened: bool) -> str:
        given: dict[str, Any] = {"messages": [self._plain(message) for message in messages]}
        if tools:
            given["tools"] = [_plain_tool(tool) for tool in tools]
        try:
            return self._template.render(**given, **self._special, add_generation_prompt=opened)
        except FAULTS as error:
            said = str(error) or type(error).__name__
            raise DataError(f"the chat template refuses this conversation: {said}") from error

    def _plain(self, message: Message) -> dict[str, Any]:
        """As templates expect it. Keys without a value are absent: some templates ask only whether a key is there."""
        plain: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.reasoning:
            plain[self.reasoning_key] = message.reasoning
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call, as_text=self.calls_as == "text") for call in message.tool_calls]
        if message.tool_call_id:
            plain["tool_call_id"] = message.tool_call_id
        if message.name:
            plain["name"] = message.name
        return plain

    def _probe_reasoning(self) -> bool:
        thinking = Message(role=Role.ASSISTANT, content="!", reasoning=_THOUGHT)
        for key in _REASONING_KEYS:
            self.reasoning_key = key
            if _THOUGHT in self._tried([_QUESTION, thinking]):
                return True
        self.reasoning_key = _REASONING_KEYS[0]
        return False

    def _probe_calls(self) -> str:
        for way in ("mapping", "text"):
            self.calls_as = way
            text = self._tried([_QUESTION, _asking(1)])
            if _PROBES[0] in text and f"'{_PROBES[0]}'" not in text:  # Python's own way to write an object: not meant
                return way
        return ""

    def _probe_several(self) -> bool:
        text = self._tried([_QUESTION, _asking(2)])
        return all(probe in text for probe in _PROBES)

    def _tried(self, messages: Sequence[Message]) -> str:
        """Empty: refused."""
        try:
            return self._write(messages, (), opened=False)
        except DataError:
            return ""


def _asking(calls: int) -> Message:
    made = tuple(
        ToolCall(id=f"call0000{number}", name="probe", arguments=f'{{"key": "{probe}"}}')
        for number, probe in enumerate(_PROBES[:calls])
    )
    return Message(role=Role.ASSISTANT, content="", tool_calls=made)


def _without_a_thought_beside_words(message: Message) -> Message:
    beside = message.reasoning and message.content and message.tool_calls
    return msgspec.structs.replace(message, reasoning="") if beside else message


def _plain_call(call: ToolCall, *, as_text: bool) -> dict[str, Any]:
    arguments: Any = call.arguments
    if not as_text:
        parsed = call.parsed
        arguments = parsed if parsed is not None and _is_text(parsed) else {"_": call.arguments}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _is_text(value: Any) -> bool:
    """It can be written. JSON may hold half a character by its number, which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeError, RecursionError):
        return False
    return True


def _plain_tool(tool: Tool) -> dict[str, Any]:
    parameters = msgspec.json.decode(tool.parameters)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }

"""A conversation as its model's chat template writes it: text, not yet ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jinja2
import msgspec

from fathom.core.errors import DataError
from fathom.core.records.message import Message, Role, Tool, ToolCall
from fathom.text.chat_template import compile_template

_PROBE_CALL = ToolCall(id="call00001", name="probe", arguments='{"key": "fathomvalue"}')


@final
class TemplateText:
    """Writes messages by a template.

    Templates differ in whether they want the arguments of a tool call as an object or as text; that is found out once,
    by trying. Arguments that are not an object, which a model may well have sampled, are written as `{"_": TEXT}` where
    an object is wanted: no template fails on them.
    """

    def __init__(self, source: str, special: dict[str, str]) -> None:
        """`special`: texts of the special tokens by role, as the tokenizer names them. Raises ConfigError."""
        self._template = compile_template(source)
        self._special = special
        self.calls_as = self._probe_calls()
        """How the arguments of a tool call are given: `mapping` or `text`. Empty: it writes no tool calls."""

    def write(self, messages: Sequence[Message], tools: Sequence[Tool], *, opened: bool) -> str:
        """The conversation. `opened`: the assistant's next answer begins at the end.

        Raises:
            DataError: the template refuses it.
        """
        return self._write(messages, tools, opened=opened, as_mapping=self.calls_as != "text")

    def _write(self, messages: Sequence[Message], tools: Sequence[Tool], *, opened: bool, as_mapping: bool) -> str:
        given: dict[str, Any] = {"messages": [_plain(message, as_mapping=as_mapping) for message in messages]}
        if tools:
            given["tools"] = [_plain_tool(tool) for tool in tools]
        try:
            return self._template.render(**given, **self._special, add_generation_prompt=opened)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise DataError(f"the chat template refuses this conversation: {error}") from error

    def _probe_calls(self) -> str:
        question = Message(role=Role.USER, content="?")
        asking = Message(role=Role.ASSISTANT, content="", tool_calls=(_PROBE_CALL,))
        for as_mapping, name in ((True, "mapping"), (False, "text")):
            try:
                text = self._write([question, asking], (), opened=False, as_mapping=as_mapping)
            except DataError:
                continue
            if "fathomvalue" in text and "'fathomvalue'" not in text:  # Python's own way to write an object: not meant
                return name
        return ""


def _plain(message: Message, *, as_mapping: bool) -> dict[str, Any]:
    """As templates expect it. Keys without a value are absent: some templates ask only whether a key is there."""
    plain: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call, as_mapping=as_mapping) for call in message.tool_calls]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.name:
        plain["name"] = message.name
    return plain


def _plain_call(call: ToolCall, *, as_mapping: bool) -> dict[str, Any]:
    arguments: Any = call.arguments
    if as_mapping:
        arguments = call.parsed if call.parsed is not None else {"_": call.arguments}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _plain_tool(tool: Tool) -> dict[str, Any]:
    parameters = msgspec.json.decode(tool.parameters)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }

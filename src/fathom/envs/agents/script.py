"""Answers of a model as an environment writes them down for a warm start (`DemonstratedAgentEnvironment.script`)."""

from __future__ import annotations

import json

from pydantic import JsonValue

from fathom.core.records.message import Message, Role, ToolCall


def says(text: str) -> Message:
    """An answer in words."""
    return Message(role=Role.ASSISTANT, content=text)


def calls(tool: str, **arguments: JsonValue) -> Message:
    """An answer that calls a tool, e.g. `calls("read", name="numbers.txt")`."""
    call = ToolCall(id="call", name=tool, arguments=json.dumps(arguments, ensure_ascii=False))
    return Message(role=Role.ASSISTANT, content="", tool_calls=(call,))

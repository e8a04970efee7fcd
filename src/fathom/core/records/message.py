"""What agents and models say to each other, in no dialect of any API.

Long conversations are many of these, and none can be part of a cycle: the garbage collector does not look at them.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import msgspec


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(msgspec.Struct, frozen=True, gc=False, tag="tool_call.1"):
    """A model asks for a tool."""

    id: str
    """Names the call, for the answer to it. Unique in its message."""
    name: str
    """The tool."""
    arguments: str
    """As the model wrote them: the text of a JSON object, or what should have been one."""

    @property
    def parsed(self) -> dict[str, Any] | None:
        """The arguments as an object. None: they are not the text of one."""
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


class Message(msgspec.Struct, frozen=True, gc=False, tag="message.1"):
    """One message of a conversation."""

    role: Role
    """Who says it."""
    content: str
    """What is said. Empty where a message only calls tools."""
    reasoning: str = ""
    """What the model thought before. Of the assistant only; empty: nothing, or it was not sent back."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tools asked for. Of the assistant only."""
    tool_call_id: str = ""
    """The call that this answers. Of tools only; empty: the agent did not say."""
    name: str = ""
    """Name of the speaker, or of the tool. Empty: not said."""


class Tool(msgspec.Struct, frozen=True, tag="tool.1"):
    """A tool that a model may ask for."""

    name: str
    """Its name."""
    description: str
    """What it is good for. Empty: not said."""
    parameters: msgspec.Raw
    """JSON schema of its arguments, as sent."""

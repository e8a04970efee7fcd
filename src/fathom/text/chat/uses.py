"""What an agent may do next: the ways in which a conversation goes on behind an answer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from fathom.core.records.message import Message, Role
from fathom.text.chat.behind import unsettled


class Use(StrEnum):
    """A way to go on. A template is tried for each."""

    TEXT = "a user speaks"
    """Behind an answer in words."""
    TOOLS = "tools are called"
    """Calls, a result each, several rounds, then words and a user."""
    SEVERAL = "several tools are called at once"
    """Calls in one message, results in a row."""
    THOUGHT_TEXT = "a user speaks behind a thought"
    """Something was thought on the way to the answer."""
    THOUGHT_TOOLS = "tools are called with thoughts"
    """As `TOOLS`, until the next user speaks."""
    WORDS_TEXT = "a user speaks behind words beside calls"
    """Something was said beside calls on the way to the answer."""
    WORDS_TOOLS = "tools are called beside words"
    """As `TOOLS`, until the next user speaks."""
    SYSTEM = "a system message in the middle"
    """Behind an answer."""


def use_of(before: Sequence[Message], new: Sequence[Message]) -> list[Use]:
    """All ways in which `new` goes on behind the answer that `before` ends with."""
    roles = {message.role for message in new}
    results, speaks = Role.TOOL in roles, roles != {Role.TOOL}
    open_turns = list(unsettled(before))
    thought = any(message.reasoning for message in open_turns)
    words = any(message.content and message.tool_calls for message in open_turns)
    called = any(message.tool_calls for message in open_turns)
    asked = {
        Use.TEXT: speaks,
        Use.TOOLS: results or called,
        Use.SEVERAL: results and len(before[-1].tool_calls) > 1,
        Use.THOUGHT_TEXT: thought and speaks,
        Use.THOUGHT_TOOLS: thought and results,
        Use.WORDS_TEXT: words and speaks,
        Use.WORDS_TOOLS: words and results,
        Use.SYSTEM: Role.SYSTEM in roles,
    }
    return [use for use, is_asked in asked.items() if is_asked]

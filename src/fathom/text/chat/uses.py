"""What an agent may do next: the ways in which a conversation goes on behind an answer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from fathom.core.records.message import Message, Role
from fathom.text.chat.behind import has_called, has_thought


class Use(StrEnum):
    """A way to go on. A template is tried for each."""

    TEXT = "a user speaks"
    """Behind an answer in words."""
    TOOLS = "tools are called"
    """Calls, a result each, several rounds, then words and a user."""
    SEVERAL = "several tools are called at once"
    """Calls in one message, results in a row."""
    THOUGHT_TEXT = "a user speaks behind a thought"
    """The answer, or one since the last user, was thought about."""
    THOUGHT_TOOLS = "tools are called with thoughts"
    """As `TOOLS`, until the next user speaks."""
    SYSTEM = "a system message in the middle"
    """Behind an answer."""


def use_of(before: Sequence[Message], new: Sequence[Message]) -> list[Use]:
    """All ways in which `new` goes on behind the answer that `before` ends with."""
    roles = {message.role for message in new}
    results = Role.TOOL in roles
    thought = has_thought(before)
    uses: list[Use] = []
    if Role.SYSTEM in roles:
        uses.append(Use.SYSTEM)
    if roles != {Role.TOOL}:
        uses.append(Use.THOUGHT_TEXT if thought else Use.TEXT)
    if results:
        uses.append(Use.THOUGHT_TOOLS if thought else Use.TOOLS)
    elif has_called(before) and not thought:
        uses.append(Use.TOOLS)
    if len(before[-1].tool_calls) > 1 and results:
        uses.append(Use.SEVERAL)
    return uses

"""Conversations for templates that write one tool call a message."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fathom.core.records.message import Message, Role


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The same conversation: each call of several gets a message of its own, and its result right behind it.

    What was said and thought stays with the first call. Results that answer no call stay behind the others.
    """
    written: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        if len(message.tool_calls) < 2:
            written.append(message)
            continue
        results: list[Message] = []
        while position < len(messages) and messages[position].role is Role.TOOL:
            results.append(messages[position])
            position += 1
        ids = {call.id for call in message.tool_calls}
        for number, call in enumerate(message.tool_calls):
            said = message if number == 0 else msgspec.structs.replace(message, content="", reasoning="")
            written.append(msgspec.structs.replace(said, tool_calls=(call,)))
            named = [result for result in results if result.tool_call_id == call.id]
            mine = (named or [result for result in results if result.tool_call_id not in ids])[:1]
            written += mine
            results = [result for result in results if not any(result is each for each in mine)]
        written += results
    return written

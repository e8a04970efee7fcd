"""Rows of files as conversations to imitate, and as pairs of answers.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}
    {"prompt": "..." or [messages], "completion": "..." or [messages]}
    {"prompt": "..." or [messages], "chosen": "..." or [messages], "rejected": "..." or [messages]}

Messages are as in the chat completions API. What is not known here and would be lost is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fathom.core.errors import DataError
from fathom.core.records.message import Message, Role, Tool, ToolCall
from fathom.envs.row_file import FileRow, column_names, read_rows

T = TypeVar("T")
_ROLES = {role.value: role for role in Role} | {"developer": Role.SYSTEM}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """A conversation to imitate."""

    source: str
    """File and row, for people."""
    messages: tuple[Message, ...]
    """What is said."""
    tools: tuple[Tool, ...]
    """What the assistant could call."""
    untrained: frozenset[int]
    """Places of answers with `"weight": 0`: context alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """Two answers to one prompt."""

    source: str
    """File and row, for people."""
    prompt: tuple[Message, ...]
    """What both answer, at least one message."""
    chosen: tuple[Message, ...]
    """The better answer; it begins and ends with the assistant."""
    rejected: tuple[Message, ...]
    """The worse one, likewise."""
    tools: tuple[Tool, ...]
    """What the assistant could call."""


def read_conversations(path: Path, limit: int | None = None) -> list[ConversationRow]:
    """The first `limit` rows. Raises DataError, which names the file, the row and what was found."""
    return [_conversation(row, f"{path}: row {number}") for number, row in read_rows(path, limit)]


def read_pairs(path: Path, limit: int | None = None) -> list[PairRow]:
    """The same of pairs. Raises DataError: also where sides are equal, empty, or answer different prompts."""
    return [_pair(row, f"{path}: row {number}") for number, row in read_rows(path, limit)]


class _Function(msgspec.Struct):
    name: str
    arguments: Any = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: dict[str, Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    weight: float | None = None


class _Tool(msgspec.Struct):
    function: _Function | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


def _conversation(row: FileRow, where: str) -> ConversationRow:
    if row.get("messages") is not None:
        given = _listed(row["messages"], f"{where}: messages")
    elif row.get("prompt") is not None and row.get("completion") is not None:
        given = [
            *_said(row["prompt"], "user", f"{where}: prompt"),
            *_said(row["completion"], "assistant", f"{where}: completion"),
        ]
    else:
        found = ", ".join(column_names(row))
        raise DataError(f"{where} has neither messages nor prompt and completion; columns found: {found}")
    messages = tuple(_message(each, f"{where}: message {number}") for number, each in enumerate(given, start=1))
    untrained = frozenset(
        place for place, each in enumerate(given) if _weight(each, f"{where}: message {place + 1}") == 0
    )
    return ConversationRow(source=where, messages=messages, tools=_tools(row, where), untrained=untrained)


def _pair(row: FileRow, where: str) -> PairRow:
    sides: list[tuple[Message, ...]] = []
    for side in ("chosen", "rejected"):
        if row.get(side) is None:
            raise DataError(f"{where} has no column {side!r}; columns found: {', '.join(column_names(row))}")
        given = _said(row[side], "assistant", f"{where}: {side}")
        sides.append(tuple(_message(each, f"{where}: {side}") for each in given))
    chosen, rejected = sides
    prompt = _prompt(row, where)
    if prompt is None:
        prompt = chosen[: _same(chosen, rejected)]
        while prompt and prompt[-1].role is Role.ASSISTANT:
            prompt = prompt[:-1]
        if not prompt:
            raise DataError(f"{where}: the prompts of chosen and rejected differ from the first message on")
    pair = PairRow(
        source=where,
        prompt=prompt,
        chosen=_without(prompt, chosen, f"{where}: chosen"),
        rejected=_without(prompt, rejected, f"{where}: rejected"),
        tools=_tools(row, where),
    )
    _check_pair(pair)
    return pair


def _prompt(row: FileRow, where: str) -> tuple[Message, ...] | None:
    """None: the row has none of its own; what both sides begin with is it."""
    column = next((name for name in ("prompt", "messages") if row.get(name) is not None), None)
    if column is None:
        return None
    given = _said(row[column], "user", f"{where}: {column}")
    prompt = tuple(_message(each, f"{where}: {column}") for each in given)
    if not prompt or prompt[-1].role is Role.ASSISTANT:
        raise DataError(f"{where}: {column} does not end with a message that the assistant could answer")
    return prompt


def _without(prompt: tuple[Message, ...], side: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    """The answer alone, where a side repeats the prompt."""
    answer = side if side and side[0].role is Role.ASSISTANT else side[len(prompt) :]
    if len(answer) < len(side) and side[: len(prompt)] != prompt:
        raise DataError(f"{where} answers another prompt than the row's")
    if not answer or answer[0].role is not Role.ASSISTANT or answer[-1].role is not Role.ASSISTANT:
        raise DataError(f"{where} does not begin and end with the assistant's words")
    if any(said.role not in (Role.ASSISTANT, Role.TOOL) for said in answer):
        raise DataError(
            f"{where} holds a message of a user or the system: that is another prompt than the other side's"
        )
    return answer


def _check_pair(pair: PairRow) -> None:
    for name, side in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if not all(said.content.strip() or said.tool_calls for said in side if said.role is Role.ASSISTANT):
            raise DataError(f"{pair.source}: {name} is empty; there is nothing to prefer or to reject")
    if pair.chosen == pair.rejected:
        raise DataError(f"{pair.source}: chosen and rejected are equal; there is nothing to prefer")


def _same(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Messages at the beginning that are equal."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def _said(value: Any, role: str, where: str) -> list[_Message]:
    """Messages; text alone is one of this role."""
    if isinstance(value, str) and not value.lstrip().startswith('[{"'):
        return [_Message(role=role, content=value)]
    return _listed(value if not isinstance(value, dict) else [value], where)


def _listed(value: Any, where: str) -> list[_Message]:
    """Messages from a list, or from the JSON text of one."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise DataError(f"{where} is not the JSON text of a list of messages: {error}") from error
    return _converted(value, list[_Message], f"{where} is not a list of messages with role and content")


def _converted(value: Any, kind: type[T], complaint: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise DataError(f"{complaint}: {error}") from error


def _message(given: _Message, where: str) -> Message:
    role = _ROLES.get(given.role)
    if role is None:
        raise DataError(f"{where} has role {given.role!r}; known are {', '.join(_ROLES)}")
    if given.function_call is not None:
        raise DataError(f"{where} has a function_call; write it as tool_calls")
    thoughts = given.reasoning_content or given.reasoning or given.thinking or ""
    if role is not Role.ASSISTANT and (thoughts or given.tool_calls):
        raise DataError(f"{where} thinks or calls tools, which only the assistant does")
    return Message(
        role=role,
        content=_text(given.content, where),
        reasoning=thoughts,
        tool_calls=tuple(_call(call, number, where) for number, call in enumerate(given.tool_calls or ())),
        tool_call_id=given.tool_call_id or "",
        name=given.name or "",
    )


def _text(content: str | list[_Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            raise DataError(f"{where} has a part of type {part.type!r}; only text can be trained on")
    return "".join(part.text or "" for part in content)


def _call(call: _Call, number: int, where: str) -> ToolCall:
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    made = ToolCall(id=call.id or f"call{number:05}", name=call.function.name, arguments=arguments or "{}")
    if made.parsed is None:
        raise DataError(f"{where} calls {made.name} with arguments that are no JSON object: {str(arguments)[:60]!r}")
    return made


def _weight(given: _Message, where: str) -> float:
    if given.weight not in (None, 0, 1):
        raise DataError(f"{where} has weight {given.weight:g}; 0 (context alone) and 1 are possible")
    return 1 if given.weight is None or given.role != "assistant" else given.weight


def _tools(row: FileRow, where: str) -> tuple[Tool, ...]:
    given: Any = row.get("tools") or []
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except msgspec.DecodeError as error:
            raise DataError(f"{where}: tools is not the JSON text of a list: {error}") from error
    tools: list[Tool] = []
    for tool in _converted(given, list[_Tool], f"{where}: tools is not a list of tools"):
        name, about, parameters = tool.name, tool.description, tool.parameters
        if tool.function is not None:
            name, about, parameters = tool.function.name, tool.function.description, tool.function.parameters
        if not name:
            raise DataError(f"{where}: a tool has no name")
        schema = msgspec.Raw(msgspec.json.encode(parameters or {"type": "object", "properties": {}}))
        tools.append(Tool(name=name, description=about or "", parameters=schema))
    return tuple(tools)

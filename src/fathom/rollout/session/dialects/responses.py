"""OpenAI's Responses: reading. Nothing is stored on this side but tokens: every request carries its conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, final

import msgspec

from fathom.core.records.message import Message, Role, Tool, ToolCall
from fathom.rollout.session.call import CallRefusedError, TurnCall
from fathom.rollout.session.dialects.body import at_least_one, not_text, read_body, sampling_of, unsupported
from fathom.rollout.session.dialects.chat_completions import function_tool, openai_error
from fathom.rollout.session.dialects.dialect import Asked, Terms
from fathom.rollout.session.dialects.history import History, Keep, read_on
from fathom.rollout.session.dialects.responses_writer import Echo, ResponsesWriter

_CHANGES_NOTHING = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "max_tool_calls",  # of tools that the API itself would run; there is none
    "stream_options",
)
_NEUTRAL: dict[str, Sequence[Any]] = {
    "parallel_tool_calls": (True,),
    "background": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "text": ({}, {"format": {"type": "text"}}),
    "include": ([], ["reasoning.encrypted_content"]),
}
_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Item(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a conversation, of any type; which fields it has depends on that."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[_Part] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"{}")
    strict: bool | None = None


class _Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _Request(msgspec.Struct):
    model: str
    input: str | list[_Item]
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: _Reasoning | None = None
    stream: bool | None = None


@final
class Responses:
    """`POST /v1/responses`."""

    def read(self, body: bytes, terms: Terms, history: History | None = None) -> Asked:
        """See `Dialect.read`."""
        return read_on(self._read, body, terms, history, "responses", "input")

    def _read(self, body: bytes, terms: Terms, known: tuple[Message, ...], keep: Keep) -> Asked:
        asked = read_body(body, _Request, terms, changes_nothing=_CHANGES_NOTHING, neutral=_NEUTRAL)
        if asked.tool_choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", asked.tool_choice)
        if asked.reasoning is not None and asked.reasoning.effort and "effort" not in terms.ignored:
            raise unsupported("reasoning.effort", asked.reasoning.effort)
        first = (Message(role=Role.SYSTEM, content=asked.instructions),) if asked.instructions else ()
        tools = _tools(asked.tools or (), terms)
        # A model that must call no tool is told of none, and nothing that it says is read as a call.
        told_of = () if asked.tool_choice == "none" else tools
        call = TurnCall(
            messages=keep(first, _messages(known, asked.input), told_of),
            tools=told_of,
            max_new_tokens=at_least_one(asked.max_output_tokens, "max_output_tokens"),
            sampling=sampling_of(terms, temperature=asked.temperature, top_p=asked.top_p),
        )
        used = call.sampling or terms.sampling
        echo = Echo(
            model=asked.model,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            temperature=used.temperature,
            top_p=used.top_p,
            tool_choice=asked.tool_choice or "auto",
            tools=tools,
        )
        return Asked(call=call, stream=bool(asked.stream), writer=ResponsesWriter(echo))

    def refusal(self, error: CallRefusedError) -> bytes:
        """See `Dialect.refusal`."""
        return msgspec.json.encode({"error": openai_error(error)})


def _tools(given: Sequence[_Tool], terms: Terms) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for place, tool in enumerate(given):
        if tool.type != "function":
            raise unsupported(f"tools[{place}].type", tool.type)
        tools.append(function_tool(tool.name, tool.description, tool.parameters, tool.strict, terms))
    return tuple(tools)


def _messages(known: Sequence[Message], given: str | Sequence[_Item]) -> list[Message]:
    """A conversation of which the first messages are known.

    What the model thought, said and called in a row are items here, and one message inside: the last that is known may
    grow by what was not.
    """
    if isinstance(given, str):
        return [Message(role=Role.USER, content=given)]
    messages = list(known)
    for place, item in enumerate(given):
        message = _message(item, f"input[{place}]")
        before = messages[-1] if messages else None
        if before is not None and before.role is message.role is Role.ASSISTANT:
            messages[-1] = Message(
                role=Role.ASSISTANT,
                content=before.content + message.content,
                reasoning=before.reasoning + message.reasoning,
                tool_calls=before.tool_calls + message.tool_calls,
            )
        else:
            messages.append(message)
    return messages


def _message(item: _Item, place: str) -> Message:
    match item.type:
        case "message":
            role = Role.SYSTEM if item.role == "developer" else Role(item.role)
            between = "" if role is Role.ASSISTANT else "\n"
            return Message(role=role, content=_text(item.content, f"{place}.content", between), name=item.name)
        case "reasoning":
            thought = _text(item.content or item.summary, f"{place}.content", "")
            return Message(role=Role.ASSISTANT, content="", reasoning=thought)
        case "function_call":
            call = ToolCall(id=item.call_id, name=item.name, arguments=item.arguments)
            return Message(role=Role.ASSISTANT, content="", tool_calls=(call,))
        case "function_call_output":
            said = _text(item.output, f"{place}.output", "\n")
            return Message(role=Role.TOOL, content=said, tool_call_id=item.call_id)
        case other:
            raise not_text(f"{place}.type", other)


def _text(content: str | Sequence[_Part] | None, place: str, between: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in _PARTS:
            raise not_text(f"{place}[{index}].type", part.type)
    return between.join(part.text for part in content)

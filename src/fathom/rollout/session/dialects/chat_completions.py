"""OpenAI's Chat Completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal, final

import msgspec

from fathom.core.records.message import Message, Role, Tool, ToolCall
from fathom.core.records.sampling import FinishReason
from fathom.rollout.session.call import CallRefusedError, Refusal, TurnBegan, TurnCall, TurnEnded
from fathom.rollout.session.dialects.body import (
    at_least_one,
    not_text,
    read_body,
    sampling_of,
    schema,
    stop_strings,
    unsupported,
)
from fathom.rollout.session.dialects.dialect import STATUS, Asked, Terms, event
from fathom.rollout.session.dialects.history import History, Keep, read_on
from fathom.text.chat.deltas import Delta, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallBegun

_CHANGES_NOTHING = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)
_NEUTRAL: dict[str, Sequence[Any]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
}
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: _Function
    type: Literal["function"] = "function"
    index: int | None = None


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: list[msgspec.Raw] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None


class _ToolFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw(b"{}")
    strict: bool | None = None


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    function: _ToolFunction | None = None


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Request(msgspec.Struct):
    model: str
    messages: list[_Message]
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


@final
class ChatCompletions:
    """`POST /v1/chat/completions`."""

    def read(self, body: bytes, terms: Terms, history: History | None = None) -> Asked:
        """See `Dialect.read`."""
        return read_on(self._read, body, terms, history, "chat.completions")

    def _read(self, body: bytes, terms: Terms, known: tuple[Message, ...], keep: Keep) -> Asked:
        asked = read_body(body, _Request, terms, changes_nothing=_CHANGES_NOTHING, neutral=_NEUTRAL)
        if asked.tool_choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", asked.tool_choice)
        limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        # A model that must call no tool is told of none, and nothing that it says is read as a call.
        tools = () if asked.tool_choice == "none" else _tools(asked.tools or (), terms)
        new = (_message(message, place) for place, message in enumerate(asked.messages))
        call = TurnCall(
            messages=keep((), (*known, *new), tools),
            tools=tools,
            max_new_tokens=at_least_one(limit, "max_tokens"),
            sampling=sampling_of(
                terms,
                temperature=asked.temperature,
                top_p=asked.top_p,
                top_k=asked.top_k,
                min_p=asked.min_p,
                logit_bias=asked.logit_bias,
            ),
            stop_strings=stop_strings(asked.stop, "stop"),
        )
        usage = bool(asked.stream_options and asked.stream_options.include_usage)
        return Asked(call=call, stream=bool(asked.stream), writer=_Writer(asked.model, usage))

    def refusal(self, error: CallRefusedError) -> bytes:
        """See `Dialect.refusal`."""
        return msgspec.json.encode({"error": openai_error(error)})


def openai_error(error: CallRefusedError) -> dict[str, Any]:
    """The form of errors of OpenAI's APIs."""
    ours = STATUS[error.kind] >= 500
    return {
        "message": str(error),
        "type": "server_error" if ours else "invalid_request_error",
        "param": error.param or None,
        "code": error.kind.value,
    }


def function_tool(
    name: str, description: str | None, parameters: msgspec.Raw, strict: bool | None, terms: Terms
) -> Tool:
    """A tool. Raises CallRefusedError when the schema is to be enforced."""
    if strict and "strict" not in terms.ignored:
        raise unsupported("tools.strict", strict)
    return Tool(name=name, description=description or "", parameters=schema(bytes(parameters), "tools.parameters"))


def _tools(given: Sequence[_Tool], terms: Terms) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for place, tool in enumerate(given):
        if tool.type != "function" or tool.function is None:
            raise unsupported(f"tools[{place}].type", tool.type)
        function = tool.function
        tools.append(function_tool(function.name, function.description, function.parameters, function.strict, terms))
    return tuple(tools)


def _message(given: _Message, place: int) -> Message:
    content = given.content
    return Message(
        role=_ROLES[given.role],
        content=content if isinstance(content, str) else _text(content or (), given.role, place),
        reasoning=given.reasoning_content or given.reasoning or "",
        tool_calls=_calls(given.tool_calls, given.role, place) if given.tool_calls else (),
        tool_call_id=given.tool_call_id or "",
        name=given.name or "",
    )


def _calls(given: Sequence[_Call], role: str, place: int) -> tuple[ToolCall, ...]:
    if role != "assistant":
        where = f"messages[{place}].tool_calls"
        raise CallRefusedError(Refusal.INVALID, f"{where}: only the assistant calls tools", where)
    return tuple(ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments) for call in given)


def _text(parts: Sequence[_Part], role: str, place: int) -> str:
    """What the model said in parts was one text; parts of others are lines of their own."""
    for index, part in enumerate(parts):
        if part.type != "text":
            raise not_text(f"messages[{place}].content[{index}].type", part.type)
    return ("" if role == "assistant" else "\n").join(part.text for part in parts)


@final
class _Writer:
    """One answer as a completion, or as chunks of one."""

    def __init__(self, model: str, usage: bool) -> None:
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._usage = usage

    def whole(self, ended: TurnEnded) -> bytes:
        message = ended.message
        said: dict[str, Any] = {
            "role": "assistant",
            "content": message.content if message.content or not message.tool_calls else None,
            "refusal": None,
        }
        if message.reasoning:
            said["reasoning_content"] = message.reasoning
        if message.tool_calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        choice = {"index": 0, "message": said, "logprobs": None, "finish_reason": _reason(ended)}
        reply = self._head("chat.completion") | {"choices": [choice], "usage": _usage(ended)}
        return msgspec.json.encode(reply)

    def begin(self, began: TurnBegan) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        match delta:
            case TextDelta(text):
                return self._chunk({"content": text})
            case ReasoningDelta(text):
                return self._chunk({"reasoning_content": text})
            case ToolCallBegun(index, call_id, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                return self._chunk({"tool_calls": [call]})
            case ToolArgumentsDelta(index, text):
                return self._chunk({"tool_calls": [{"index": index, "function": {"arguments": text}}]})

    def end(self, ended: TurnEnded) -> bytes:
        last = self._chunk({}, _reason(ended))
        if self._usage:
            last += event(self._head("chat.completion.chunk") | {"choices": [], "usage": _usage(ended)})
        return last + b"data: [DONE]\n\n"

    def fail(self, error: CallRefusedError) -> bytes:
        return event({"error": openai_error(error)})

    def wait(self) -> bytes:
        return b": waiting\n\n"

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._usage else {}
        return event(self._head("chat.completion.chunk") | {"choices": [choice]} | usage)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


def _reason(ended: TurnEnded) -> str:
    if ended.finish_reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if ended.message.tool_calls else "stop"


def _usage(ended: TurnEnded) -> dict[str, Any]:
    return {
        "prompt_tokens": ended.prompt_tokens,
        "completion_tokens": ended.sampled_tokens,
        "total_tokens": ended.prompt_tokens + ended.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": ended.cached_tokens},
    }

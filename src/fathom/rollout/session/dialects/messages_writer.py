"""Anthropic's Messages: writing. A message is a list of blocks, streamed one after the other."""

from __future__ import annotations

import json
import secrets
from typing import Any, final

import msgspec

from fathom.core.records.sampling import FinishReason
from fathom.rollout.session.call import CallRefusedError, Refusal, TurnBegan, TurnEnded
from fathom.rollout.session.dialects.dialect import event
from fathom.text.chat.deltas import Delta, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallBegun

_MALFORMED = "malformed_arguments"
"""This API has objects where models write text. Text that is none is handed over, and comes back, as the only field of
an object: the tool complains, the model reads why, and its own ids stay what they are."""
_ERRORS = {
    Refusal.UNKNOWN_KEY: "authentication_error",
    Refusal.UNKNOWN_PATH: "not_found_error",
    Refusal.TOO_LARGE: "request_too_large",
    Refusal.INTERNAL: "api_error",
    Refusal.ENGINE_FAILED: "overloaded_error",
}
_SIGNATURE = "unsigned"


def anthropic_error(error: CallRefusedError) -> dict[str, Any]:
    """The form of errors of Anthropic's API. That of a full context begins as agents look for it."""
    message = f"prompt is too long: {error}" if error.kind is Refusal.CONTEXT_FULL else str(error)
    kind = _ERRORS.get(error.kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": error.kind.value}}


def input_of(arguments: str) -> dict[str, Any]:
    """The arguments of a tool call as an object, from which `arguments_of` makes what is equal to them."""
    try:
        value = json.loads(arguments)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # as every client can read it
    except (ValueError, RecursionError):
        return {_MALFORMED: arguments}
    return value if isinstance(value, dict) and list(value) != [_MALFORMED] else {_MALFORMED: arguments}


def arguments_of(given: object) -> str:
    """The text of a tool call's arguments."""
    if isinstance(given, dict) and list(given) == [_MALFORMED] and isinstance(text := given[_MALFORMED], str):
        return text
    return json.dumps(given, ensure_ascii=False)


@final
class MessagesWriter:
    """One answer as a message, or as the events of one."""

    def __init__(self, model: str, stop_strings: tuple[str, ...]) -> None:
        """`model` is the name that the agent used; `stop_strings` those of the call."""
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._stop_strings = stop_strings
        self._index = -1
        self._open = ""
        self._arguments: list[str] = []

    def whole(self, ended: TurnEnded) -> bytes:
        """See `Writer`."""
        message = ended.message
        blocks: list[dict[str, Any]] = []
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": _SIGNATURE})
        if message.content:
            blocks.append({"type": "text", "text": message.content})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": input_of(call.arguments)}
            for call in message.tool_calls
        ]
        return msgspec.json.encode(self._message(blocks) | self._stopped(ended) | {"usage": _usage(ended)})

    def begin(self, began: TurnBegan) -> bytes:
        """See `Writer`."""
        usage = {
            "input_tokens": began.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message) + self.wait()

    def delta(self, delta: Delta) -> bytes:
        """See `Writer`."""
        match delta:
            case TextDelta(text):
                opened = self._enter("text", {"type": "text", "text": ""})
                return opened + self._block_delta({"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                opened = self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return opened + self._block_delta({"type": "thinking_delta", "thinking": text})
            case ToolCallBegun(index, call_id, name):
                block: dict[str, Any] = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return self._enter(f"tool {index}", block)
            case ToolArgumentsDelta(_, text):
                self._arguments.append(text)  # sent once they are whole: only then it is known whether they are JSON
                return b""

    def end(self, ended: TurnEnded) -> bytes:
        """See `Writer`."""
        last = self._leave() + _event("message_delta", delta=self._stopped(ended), usage=_usage(ended))
        return last + _event("message_stop")

    def fail(self, error: CallRefusedError) -> bytes:
        """See `Writer`."""
        return event(anthropic_error(error), "error")

    def wait(self) -> bytes:
        """See `Writer`."""
        return _event("ping")

    def _enter(self, what: str, block: dict[str, Any]) -> bytes:
        """Begin a block, unless one of this kind is open."""
        if self._open == what:
            return b""
        left = self._leave()
        self._index, self._open = self._index + 1, what
        return left + _event("content_block_start", index=self._index, content_block=block)

    def _leave(self) -> bytes:
        """End the block that is open."""
        if not self._open:
            return b""
        rest = b""
        if self._open == "thinking":
            rest = self._block_delta({"type": "signature_delta", "signature": _SIGNATURE})
        elif self._open.startswith("tool"):
            arguments, self._arguments = "".join(self._arguments), []
            text = msgspec.json.encode(input_of(arguments)).decode()
            rest = self._block_delta({"type": "input_json_delta", "partial_json": text})
        self._open = ""
        return rest + _event("content_block_stop", index=self._index)

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": blocks}

    def _stopped(self, ended: TurnEnded) -> dict[str, Any]:
        """Which of several stop strings it was is not known."""
        known = self._stop_strings[0] if ended.by_stop_string and len(self._stop_strings) == 1 else None
        return {"stop_reason": _reason(ended), "stop_sequence": known}


def _reason(ended: TurnEnded) -> str:
    if ended.finish_reason is not FinishReason.STOP:
        return "max_tokens"
    if ended.message.tool_calls:
        return "tool_use"
    return "stop_sequence" if ended.by_stop_string else "end_turn"


def _usage(ended: TurnEnded) -> dict[str, Any]:
    """In this API what was cached does not count as input."""
    return {
        "input_tokens": ended.prompt_tokens - ended.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": ended.cached_tokens,
        "output_tokens": ended.sampled_tokens,
    }


def _event(name: str, /, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)

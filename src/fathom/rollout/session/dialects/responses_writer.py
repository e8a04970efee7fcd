"""OpenAI's Responses: writing. A response is a list of items: what was thought, what was said, each call of a tool."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any, final

import msgspec

from fathom.core.records.message import Tool
from fathom.core.records.sampling import FinishReason
from fathom.rollout.session.answers import deltas_of
from fathom.rollout.session.call import CallRefusedError, TurnBegan, TurnEnded
from fathom.rollout.session.dialects.dialect import event
from fathom.text.chat.deltas import Delta, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallBegun


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """What a response repeats of its request."""

    model: str
    """The name that the agent used."""
    instructions: str | None
    """As sent. None: none were."""
    max_output_tokens: int | None
    """As sent. None: it was not."""
    temperature: float
    """Sampled with."""
    top_p: float
    """Sampled with."""
    tool_choice: str
    """`auto` or `none`."""
    tools: tuple[Tool, ...]
    """As sent."""


@final
class ResponsesWriter:
    """One answer as a response, or as the events of one."""

    def __init__(self, echo: Echo) -> None:
        """Nothing is written yet."""
        self._echo = echo
        self._id = secrets.token_hex(12)
        self._created = int(time.time())
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._open = ""

    def whole(self, ended: TurnEnded) -> bytes:
        """See `Writer`."""
        for delta in deltas_of(ended.message):
            self.delta(delta)
        self._leave(_status(ended))
        return msgspec.json.encode(self._response(_status(ended), ended))

    def begin(self, began: TurnBegan) -> bytes:
        """See `Writer`."""
        response = self._response("in_progress", None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        """See `Writer`."""
        match delta:
            case TextDelta(text):
                opened = self._enter("message", "msg", role="assistant", content=[])
                return opened + self._more("response.output_text.delta", text, content_index=0, logprobs=[])
            case ReasoningDelta(text):
                opened = self._enter("reasoning", "rs", summary=[], content=[])
                return opened + self._more("response.reasoning_text.delta", text, content_index=0)
            case ToolCallBegun(_, call_id, name):
                left = self._leave("completed")
                return left + self._enter("function_call", "fc", call_id=call_id, name=name, arguments="")
            case ToolArgumentsDelta(_, text):
                return self._more("response.function_call_arguments.delta", text)

    def end(self, ended: TurnEnded) -> bytes:
        """See `Writer`."""
        status = _status(ended)
        left = self._leave(status)
        return left + self._event(f"response.{status}", response=self._response(status, ended))

    def fail(self, error: CallRefusedError) -> bytes:
        """See `Writer`."""
        failed = self._response("failed", None) | {"error": {"code": "server_error", "message": str(error)}}
        return self._event("response.failed", response=failed)

    def wait(self) -> bytes:
        """See `Writer`."""
        return b": waiting\n\n"

    # Items ----------------------------------------------------------------------------------------------------------

    def _enter(self, kind: str, prefix: str, **fields: Any) -> bytes:
        """Begin an item, unless one of this kind is open."""
        if self._open == kind:
            return b""
        left = self._leave("completed")
        item = {"id": f"{prefix}_{self._id}_{len(self._items)}", "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._texts, self._open = [], kind
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        if kind == "function_call":
            return left + added
        return left + added + self._item_event("response.content_part.added", content_index=0, part=self._part(""))

    def _leave(self, status: str) -> bytes:
        """End the item that is open."""
        if not self._open:
            return b""
        kind, text, item = self._open, "".join(self._texts), self._items[-1]
        self._open = ""
        if kind == "function_call":
            self._items[-1] = item | {"arguments": text, "status": status}
            done = self._item_event("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = self._part(text)
            self._items[-1] = item | {"content": [part], "status": status}
            name, rest = ("output_text", {"logprobs": []}) if kind == "message" else ("reasoning_text", {})
            done = self._item_event(f"response.{name}.done", content_index=0, text=text, **rest)
            done += self._item_event("response.content_part.done", content_index=0, part=part)
        return done + self._event("response.output_item.done", output_index=self._index, item=self._items[-1])

    def _more(self, name: str, text: str, /, **fields: Any) -> bytes:
        self._texts.append(text)
        return self._item_event(name, delta=text, **fields)

    def _part(self, text: str) -> dict[str, Any]:
        if self._items[-1]["type"] == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": text}

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _item_event(self, name: str, /, **fields: Any) -> bytes:
        return self._event(name, item_id=self._items[-1]["id"], output_index=self._index, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        sequence, self._sequence = self._sequence, self._sequence + 1
        return event({"type": name, "sequence_number": sequence, **fields}, name)

    def _response(self, status: str, ended: TurnEnded | None) -> dict[str, Any]:
        echo = self._echo
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": echo.instructions,
            "max_output_tokens": echo.max_output_tokens,
            "model": echo.model,
            "output": self._items,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": echo.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": echo.tool_choice,
            "tools": [_tool(tool) for tool in echo.tools],
            "top_p": echo.top_p,
            "truncation": "disabled",
            "usage": None if ended is None else _usage(ended),
            "user": None,
            "metadata": {},
        }


def _tool(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": tool.parameters,
        "strict": False,
    }


def _status(ended: TurnEnded) -> str:
    return "completed" if ended.finish_reason is FinishReason.STOP else "incomplete"


def _usage(ended: TurnEnded) -> dict[str, Any]:
    return {
        "input_tokens": ended.prompt_tokens,
        "input_tokens_details": {"cached_tokens": ended.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": ended.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": ended.prompt_tokens + ended.sampled_tokens,
    }
